"""The page of a history in a real browser: commits open, by pointer and by keys, and it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Browser, Tab
from gestures import click, key
from histories import CASE, OTHER, CommitFacts, Runs, five
from screens import DESK, assert_sound, keep, needs_browser

from ppbench.commits.series import history
from ppbench.display.metrics import METRICS
from ppbench.report.pages.history import HistoryPage, render_history
from ppbench.report.pages.templates import write_page

pytestmark = needs_browser
NASTY = "</script><script>document.title = 'taken over'</script> & <b>'ünïcode'</b>"
NUM, BAD, NARROW = 10, 6, 400
LOOK = """
const isDrawn = (div) => div?.querySelector(".main-svg, .tl-axis") != null;
const section = all(".series").find((one) => one.querySelector('[data-opens="change 0"]'));
const chart = section.querySelector(".chart");
const panel = section.querySelector(".panel");
const timelines = () => panel.querySelector(".chart");
const opener = (key) => section.querySelector(`.openers [data-opens="${key}"]`);
const shownSections = () => all(".series").filter((one) => one.checkVisibility()).length;
"""


def sha(number: int) -> str:
    return f"{number:x}" * 40


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seventh of ten commits makes one case slower and leaves the other; one did not run."""
    folder = tmp_path_factory.mktemp("history")
    runs = Runs(folder / "results")
    for number in range(NUM):
        told = CommitFacts(sha(number), number, NASTY if number == BAD else f"change {number}")
        level = 1000.0 if number < BAD else 900.0
        runs.add_launches(told, CASE, [None] if number == 2 else five(level, number)[:2])
    for number in range(2):
        runs.add_launches(CommitFacts(sha(number), number), OTHER, five(2000.0, number)[:2])
    metric = METRICS["tokens_per_s"]
    found = history(results=runs.store.folder)
    told_page = HistoryPage(metric, found.series, found.notes, found.line, "ppbench history")
    write_page(folder / "page.html", render_history(runs.store, told_page))
    return folder / "page.html"


def opened(browser: Browser, page: Path, width: int, scheme: str) -> Tab:
    tab = Tab(browser, page, width, scheme, LOOK)
    tab.evaluate("section.scrollIntoView()")
    assert tab.evaluate("until(() => isDrawn(chart))")
    return tab


@pytest.fixture(scope="module")
def desk(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, DESK, "light")


@pytest.fixture(scope="module")
def phone(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, NARROW, "dark")


def click_on(tab: Tab, trace: str, number: int) -> None:
    """Click on a marker of the chart."""
    place = tab.evaluate(f"""(() => {{
      const n = chart.data.findIndex((one) => one.name === "{trace}");
      const {{ x, y, yaxis }} = chart.data[n];
      const axes = chart._fullLayout, vertical = axes[(yaxis ?? "y").replace("y", "yaxis")];
      chart.scrollIntoView();
      const at = chart.getBoundingClientRect();
      return [
        at.left + axes._size.l + axes.xaxis.d2p(x[{number}]),
        at.top + vertical._offset + vertical.d2p(y[{number}]),
      ];
    }})()""")
    assert isinstance(place, list)
    click(tab, (place[0], place[1]))


def test_a_click_on_a_change_shows_the_commit_the_command_and_both_timelines(desk: Tab) -> None:
    click_on(desk, "change", 0)
    assert desk.evaluate("until(() => panel.checkVisibility())")
    assert str(desk.evaluate("panel.querySelector('h3').textContent")).endswith(sha(BAD)[:9])
    assert desk.evaluate("panel.querySelector('.subject').textContent") == NASTY
    commands = desk.evaluate("texts('.commands pre', panel)")
    assert sha(BAD) in commands
    assert f"ppbench compare {sha(BAD - 1)[:12]} {sha(BAD)[:12]}" in commands
    assert desk.evaluate("until(() => isDrawn(timelines()))")
    titles = desk.evaluate("texts('.tl-title', timelines())")
    assert any(title.startswith(sha(BAD - 1)[:9]) for title in titles)
    assert any(title.startswith(sha(BAD)[:9]) for title in titles)
    keep(desk, "history-desk-light")


def test_a_click_on_a_commit_shows_it_and_its_neighbours_are_a_key_away(desk: Tab) -> None:
    click_on(desk, "median", 2)
    heading = "panel.querySelector('h3').textContent"
    assert desk.evaluate(f"until(() => {heading} === '{sha(3)[:9]}')")
    desk.evaluate("panel.querySelector('.older').focus()")
    key(desk, "Enter")
    assert desk.evaluate(heading) == sha(2)[:9]
    assert desk.evaluate("texts('.sentences p', panel)") == ["1 launch did not run: error."]
    assert desk.evaluate("document.activeElement.className") == "older"
    key(desk, "Escape")
    assert desk.evaluate("panel.checkVisibility()") is False


def test_keys_alone_open_a_change_and_close_it(desk: Tab) -> None:
    desk.evaluate("opener('change 0').focus()")
    key(desk, "Enter")
    assert desk.evaluate("until(() => isDrawn(timelines()))")
    assert desk.evaluate("document.activeElement === panel")
    key(desk, "Escape")
    assert desk.evaluate("[panel.checkVisibility(), document.activeElement === opener('change 0')]")


def test_the_command_is_copied_from_the_panel(desk: Tab) -> None:
    desk.evaluate("""(() => {
      document.addEventListener("copy", () => { globalThis.copied = String(getSelection()); });
      Object.defineProperty(navigator, "clipboard", { value: undefined, configurable: true });
      opener("change 0").click();
      panel.querySelectorAll(".copy")[1].focus();
    })()""")
    key(desk, "Enter")
    assert desk.evaluate("until(() => globalThis.copied !== undefined)")
    assert str(desk.evaluate("globalThis.copied")).strip().startswith("ppbench compare ")
    desk.evaluate("until(() => panel.querySelectorAll('.copy')[1].textContent === 'Copied')")


def test_the_list_leaves_the_series_that_are_looked_for(desk: Tab) -> None:
    desk.evaluate("document.querySelector('#list input[value=changed]').click()")
    assert desk.evaluate("[shownSections(), section.checkVisibility()]") == [1, True]
    desk.evaluate("""(() => {
      const find = document.getElementById("find");
      find.value = "no such";
      find.dispatchEvent(new Event("input"));
    })()""")
    assert desk.evaluate("shownSections()") == 0
    desk.evaluate("document.querySelector('#nothing button').click()")
    assert desk.evaluate("shownSections()") == 2


def test_on_a_phone_in_the_dark_nothing_is_wider_than_the_screen(phone: Tab) -> None:
    phone.evaluate("opener('change 0').click()")
    assert phone.evaluate("until(() => isDrawn(timelines()))")
    assert phone.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [NARROW] * 2
    color = "getComputedStyle(chart.querySelector('.xtick text')).fill"
    assert phone.evaluate(color) == "rgb(155, 162, 171)"
    keep(phone, "history-phone-dark")


def test_the_page_has_no_error_and_requests_nothing_but_itself(
    desk: Tab, phone: Tab, page: Path
) -> None:
    for tab in (desk, phone):
        assert_sound(tab, page)
        assert tab.evaluate("document.title") == "tokens_per_s over commits"
