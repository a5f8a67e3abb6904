"""The page of a comparison in a real browser: its intervals lie where they say, and it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, needs_browser

pytestmark = needs_browser
SIZES = ((DESK, "light"), (PHONE, "dark"))
LOOK = """
const middle = (node) => { const at = node.getBoundingClientRect(); return at.x + at.width / 2; };
const strips = all(".forest tbody .interval");
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
def page(page_of: Callable[[str], Path]) -> Path:
    return page_of("comparison")


@pytest.fixture(scope="module")
def tabs(browser: Browser, page: Path) -> list[Tab]:
    return [Tab(browser, page, width, scheme, LOOK) for width, scheme in SIZES]


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


def test_the_answer_and_the_picture_are_on_the_first_screen(tabs: list[Tab]) -> None:
    for tab in tabs:
        assert "faster in 1" in str(tab.evaluate("document.querySelector('.lead').textContent"))
        assert tab.evaluate("strips[0].getBoundingClientRect().bottom < 900")
    spoken = "document.querySelector('.forest tbody td').textContent.trim()"
    assert str(tabs[0].evaluate(spoken)).endswith("faster")


def test_less_and_more_are_on_the_sides_where_they_are_drawn(tabs: list[Tab]) -> None:
    assert tabs[0].evaluate("texts('.ends span')") == [
        "← slower", "faster →", "← less", "more →", "← less", "more →",
    ]  # fmt: skip
