"""Failed runs in a real browser: drawn up to their end, explained by rank, text escaped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, needs_browser

pytestmark = needs_browser
OPEN = ("0B0", "1B0")
"""By rank: where each is when rank 1 is stopped."""
LOOK = """
const isReady = (div) => div?.timeline?.drawn != null;
"""
# Right after the start of the first bar of a trace: its end is far off to the right.
START = """(() => {
  const { timeline } = div;
  const kind = timeline.kinds.findIndex((one) => one.name === "%s");
  const { x, y, height } = timeline.boxOfSpan({ kind, n: 0 });
  const canvas = timeline.canvas.getBoundingClientRect();
  return [canvas.left + x + 30, canvas.top + y + height / 2];
})()"""


@dataclass(frozen=True)
class Opened:
    """A page whose `div` is the chart of the run that failed."""

    tab: Tab
    page: Path


@pytest.fixture(scope="module")
def pages(page_of: Callable[[str], Path]) -> tuple[Path, Path]:
    return page_of("failures"), page_of("failed timeline")


@pytest.fixture(
    params=[
        (0, DESK, "light"),
        (1, PHONE, "dark"),
    ],
    ids=["report-desk", "timeline-phone"],
    scope="module",
)
def opened(request: pytest.FixtureRequest, browser: Browser, pages: tuple[Path, Path]) -> Opened:
    """The page, opened; in a report, the failure's chart is unfolded first."""
    number, width, scheme = request.param
    tab = Tab(browser, pages[number], width, scheme, LOOK)
    tab.evaluate("""(async () => {
      all("#failures details").forEach((details) => { details.open = true; });
      globalThis.div = all("#failures .chart, section.timeline .chart")[0];
      div.scrollIntoView();
      await until(() => isReady(div));
    })()""")
    return Opened(tab, pages[number])


def test_what_was_never_finished_is_hatched_and_told_from_what_was(opened: Opened) -> None:
    names = opened.tab.evaluate("div.timeline.kinds.map((kind) => kind.name)")
    assert {"forward", "waiting at the end", "stopped"} <= set(names)
    hatched = opened.tab.evaluate("div.timeline.kinds.filter((kind) => kind.hatch).length")
    assert hatched >= 2
    said = "Hatched actions were never finished" in str(
        opened.tab.evaluate("document.body.innerText")
    )
    assert said == ("timeline" in opened.page.stem)
    labels = opened.tab.evaluate("div.timeline.texts")
    assert set(OPEN) <= set(labels)


def test_hovering_tells_for_whom_a_rank_waited_and_for_how_long(opened: Opened) -> None:
    tab = opened.tab
    tab.evaluate("div.scrollIntoView({ block: 'center' })")
    x, y = tab.evaluate(START % "stopped")
    for dx in (2, 0):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        tab.evaluate("pause()")
    assert tab.evaluate("until(() => !div.timeline.tip.hidden)")
    told = tab.evaluate("[...div.timeline.tip.children].map((line) => line.textContent)")
    assert told[:2] == [
        "stopped",
        "rank 1 is stopped (SIGSTOP or a debugger) in 1B0 of step 1, since 10.0 s",
    ]
    assert "duration 10,000.000 ms" in told
