"""The page of a history in a real browser: commits open, by pointer and by keys, and it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Browser, Tab
from gestures import click, key
from made_pages import BAD, NASTY, sha
from screens import DESK, needs_browser

from ppbench.display.commands import from_anywhere

pytestmark = needs_browser
LOOK = """
const section = all("section[id^=series-]").find((one) => one.querySelector("[id$=change-0]"));
const chart = section.querySelector(".chart");
const plot = () => section.querySelector(".chart .plot");
const detail = (key) => document.getElementById(`${section.id}-${key}`);
const timelines = () => detail("change-0").querySelector(".chart");
const opener = (key) => document.querySelector(`[aria-controls="${section.id}-${key}"]`);
const sections = () => all("section[id^=series-]");
const shownSections = () => sections().filter((one) => one.checkVisibility()).length;
"""


@pytest.fixture(scope="module")
def page(page_of: Callable[[str], Path]) -> Path:
    return page_of("history")


def opened(browser: Browser, page: Path, width: int, scheme: str) -> Tab:
    tab = Tab(browser, page, width, scheme, LOOK)
    tab.evaluate("section.scrollIntoView()")
    assert tab.evaluate("until(() => isDrawn(chart))")
    return tab


@pytest.fixture(scope="module")
def desk(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, DESK, "light")


def click_on(tab: Tab, trace: str, number: int) -> None:
    """Click on a marker of the chart."""
    place = tab.evaluate(f"""(() => {{
      const n = plot().data.findIndex((one) => one.name === "{trace}");
      const {{ x, y, yaxis }} = plot().data[n];
      const axes = plot()._fullLayout, vertical = axes[(yaxis ?? "y").replace("y", "yaxis")];
      chart.scrollIntoView();
      const at = plot().getBoundingClientRect();
      return [
        at.left + axes._size.l + axes.xaxis.d2p(x[{number}]),
        at.top + vertical._offset + vertical.d2p(y[{number}]),
      ];
    }})()""")
    assert isinstance(place, list)
    click(tab, (place[0], place[1]))


def test_a_click_on_a_change_shows_the_commit_the_command_and_both_timelines(desk: Tab) -> None:
    click_on(desk, "change", 0)
    assert desk.evaluate("until(() => detail('change-0').checkVisibility())")
    text = str(desk.evaluate("detail('change-0').textContent"))
    assert sha(BAD) in text
    assert NASTY in text
    command = f"ppbench compare {sha(BAD - 1)[:12]} {sha(BAD)[:12]}"
    assert from_anywhere(command) in desk.evaluate("texts('pre', detail('change-0'))")
    assert desk.evaluate("until(() => isDrawn(timelines()))")
    titles = desk.evaluate("texts('.tl-title', timelines())")
    assert any(title.startswith(sha(BAD - 1)[:9]) for title in titles)
    assert any(title.startswith(sha(BAD)[:9]) for title in titles)


def test_a_click_on_a_commit_opens_its_row_and_the_one_before_is_a_key_away(desk: Tab) -> None:
    click_on(desk, "median", 2)
    assert desk.evaluate("until(() => detail('3').checkVisibility())")
    assert sha(3) in str(desk.evaluate("detail('3').textContent"))
    assert desk.evaluate("document.activeElement === opener('3')")
    open_line = "plot().layout.shapes.filter((one) => one.name === 'open').map((one) => one.x0)"
    assert desk.evaluate(open_line) == [3]
    desk.evaluate("opener('2').focus()")
    key(desk, "Enter")
    assert "1 launch did not run: error." in desk.evaluate("texts('p', detail('2'))")
    key(desk, "Enter")
    assert desk.evaluate("detail('2').checkVisibility()") is False


def test_what_a_row_opens_is_of_its_commit(desk: Tab) -> None:
    rows = desk.evaluate("""all("details tr.detail", section).map((row) =>
      [row.previousElementSibling.cells[1].textContent, row.querySelector("dd").textContent])""")
    assert isinstance(rows, list)
    assert len(rows) == 10
    assert all(commit.startswith(short) for short, commit in rows)


def test_the_mark_of_what_was_opened_is_there_in_another_scheme(desk: Tab) -> None:
    click_on(desk, "median", 2)
    desk.evaluate("figures.redrawAll()")
    marks = "plot().layout.shapes.filter((one) => one.name === 'open').length"
    assert desk.evaluate(f"until(() => {marks} === 1)")


def test_the_command_is_copied_from_the_row(desk: Tab) -> None:
    desk.evaluate("""(() => {
      document.addEventListener("copy", () => { globalThis.copied = String(getSelection()); });
      Object.defineProperty(navigator, "clipboard", { value: undefined, configurable: true });
      if (detail("change-0").hidden) opener("change-0").click();
      detail("change-0").querySelector(".copy").focus();
    })()""")
    key(desk, "Enter")
    assert desk.evaluate("until(() => globalThis.copied !== undefined)")
    copied = str(desk.evaluate("globalThis.copied")).strip()
    assert copied.startswith(from_anywhere("ppbench compare "))
    assert desk.evaluate(
        "until(() => detail('change-0').querySelector('.copy').textContent === 'Copied')"
    )


def test_the_list_leaves_the_series_that_are_looked_for(desk: Tab) -> None:
    look_for = """((text) => {
      const find = document.getElementById("find");
      find.value = text;
      find.dispatchEvent(new Event("input"));
    })"""
    desk.evaluate(f"{look_for}('changed')")
    assert desk.evaluate("[shownSections(), section.checkVisibility()]") == [1, True]
    desk.evaluate(f"{look_for}('no such')")
    assert desk.evaluate("shownSections()") == 0
    assert desk.evaluate("document.getElementById('found').textContent") == "0 of 2 series"
    desk.evaluate(f"{look_for}('')")
    assert desk.evaluate("shownSections()") == 2
