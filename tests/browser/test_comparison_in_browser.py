"""The page of a comparison in a real browser: its intervals lie where they say, and it fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, assert_sound, keep, needs_browser
from tracked import CASE, STEADY, add_launches, slower, store_in

from ppbench.commits.comparison import compare
from ppbench.report.pages.comparison import render_comparison
from ppbench.report.pages.templates import write_page

pytestmark = needs_browser
SIZES = ((DESK, "light"), (1024, "dark"), (PHONE, "dark"))
LOOK = """
const middle = (node) => { const at = node.getBoundingClientRect(); return at.x + at.width / 2; };
const strips = all(".forest tbody .strip");
const place = (strip, selector) => middle(strip.querySelector(selector));
const isInside = (strip) => {
  const out = strip.getBoundingClientRect();
  return all("i", strip).every((mark) => {
    const at = mark.getBoundingClientRect();
    return at.left >= out.left - 6 && at.right <= out.right + 6;
  });
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1F1B is faster on two ranks, about as fast on four, and slower on eight."""
    folder = tmp_path_factory.mktemp("across")
    store = store_in(folder)
    for ranks, by in ((2, -0.04), (4, 0.0), (8, 0.06)):
        for schedule, speeds in (("afab", STEADY), ("1f1b", slower(by))):
            case = replace(CASE, schedule=schedule, world_size=ranks)
            stretch = {(1, "B"): 1.0 + (by if schedule == "1f1b" else 0)}
            add_launches(store, speeds, "c0de" * 10, case, stretch=stretch, position=ranks)
    result = compare(across="schedule", results=store.folder)
    changed = result.break_down(result.changed())
    write_page(folder / "page.html", render_comparison(result, changed, "ppbench compare"))
    return folder / "page.html"


@pytest.fixture(scope="module")
def tabs(browser: Browser, page: Path) -> list[Tab]:
    opened = [Tab(browser, page, width, scheme, LOOK) for width, scheme in SIZES]
    for tab, (width, scheme) in zip(opened, SIZES, strict=True):
        keep(tab, f"comparison-{width}-{scheme}")
    return opened


def test_faster_is_right_of_zero_and_slower_left_on_every_width(tabs: list[Tab]) -> None:
    for tab in tabs:
        speeds = "strips.filter((_, n) => n % 3 === 0)"
        right_px = f"{speeds}.map((one) => place(one, '.dot') - place(one, '.zero'))"
        faster, equal, lower = tab.evaluate(right_px)  # type: ignore[misc]
        assert faster > 0
        assert abs(equal) < faster / 10
        assert lower < 0
        assert tab.evaluate("strips.length") == 9
        assert tab.evaluate("strips.every(isInside)")
        colors = f"{speeds}.map((one) => getComputedStyle(one.querySelector('.dot')).borderColor)"
        assert len(set(tab.evaluate(colors))) == 3


def test_the_zero_of_the_axis_is_above_that_of_the_strips(tabs: list[Tab]) -> None:
    tick = "middle(all('.ticks i').find((one) => one.textContent === '0'))"
    assert tabs[0].evaluate(f"Math.abs({tick} - place(strips[0], '.zero')) < 1.5")


def test_nothing_is_wider_than_the_screen_and_no_text_lies_on_another(tabs: list[Tab]) -> None:
    for tab, (width, _) in zip(tabs, SIZES, strict=True):
        assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width] * 2
        assert tab.evaluate("overlaps()[1]") == []


def test_the_answer_and_the_picture_are_on_the_first_screen(tabs: list[Tab]) -> None:
    for tab in tabs:
        assert "faster in 1" in str(tab.evaluate("document.querySelector('.lead').textContent"))
        assert tab.evaluate("strips[0].getBoundingClientRect().bottom < 900")
    spoken = "document.querySelector('.forest tbody td').textContent.trim()"
    assert str(tabs[0].evaluate(spoken)).endswith("faster")


def test_the_page_requests_nothing_and_has_no_error(tabs: list[Tab], page: Path) -> None:
    for tab in tabs:
        assert_sound(tab, page)
    assert page.stat().st_size < 100_000


def test_paper_has_the_answer_and_every_interval_in_black_on_white(
    browser: Browser, page: Path
) -> None:
    tab = Tab(browser, page, DESK, "dark", look=LOOK)
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    keep(tab, "comparison-print")
    assert tab.evaluate("document.querySelector('.lead').checkVisibility()")
    assert tab.evaluate("strips.filter((one) => one.checkVisibility()).length") == 9
    assert tab.evaluate("overlaps()[1]") == []
    colors = (
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    text, ground = map(str, tab.evaluate(colors))  # type: ignore[arg-type]
    assert sum(map(int, re.findall(r"\d+", text)[:3])) < 200
    assert ground in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
    tab.close()
