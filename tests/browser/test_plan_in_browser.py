"""The page of a planned schedule in a real browser: the Gantt chart of measured runs.

PPBENCH_SCREENSHOTS names a folder for pictures of it at both widths and schemes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, keep, needs_browser

from ppbench.cli import schedules as planning

pytestmark = needs_browser
DRAWN = "until(() => document.querySelector('.chart')?.timeline?.drawn != null)"
CHART = "document.querySelector('.chart')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    planning.draw("zbv", 4, 8, output=path)
    assert path.exists()
    return path


@pytest.fixture(scope="module", params=[(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
def tab(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Tab:
    width, scheme = request.param
    opened = Tab(browser, page, width, scheme)
    assert opened.evaluate(DRAWN)
    keep(opened, f"plan-{width}-{scheme}")
    return opened


def test_the_title_and_the_facts_say_that_it_is_planned(tab: Tab) -> None:
    assert tab.evaluate("document.title") == "zbv, planned"
    text = str(tab.evaluate("document.body.innerText"))
    assert "planned by simulation, not measured · 4 ranks, 8 stages, 8 microbatches" in text
    for fact in ("25.5 s", "0.0588", "0.0625", "0.0000", "F=1 I=1 W=1", "arXiv 2401.10241"):
        assert fact in text


def test_every_action_has_its_bar_in_seconds(tab: Tab) -> None:
    counts = tab.evaluate(f"{CHART}.timeline.kinds.map((kind) => [kind.name, kind.begin.length])")
    lengths = dict(counts)
    for words in ("forward", "input gradient", "weight gradient"):
        assert lengths[words] == 8 * 8  # stages, microbatches
    assert tab.evaluate(f"{CHART}.timeline.unit") == " s"
    period = 8 * 3  # without a bubble: the step after ends so much later
    assert 25.5 <= float(str(tab.evaluate(f"{CHART}.timeline.last"))) - period < 26


def test_steps_below_a_second_are_in_milliseconds(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "short.html"
    planning.draw("1f1b", 2, 2, cost="F=0.01,I=0.01,W=0.01", output=path)
    tab = Tab(browser, path, DESK)
    assert tab.evaluate(DRAWN)
    assert tab.evaluate(f"{CHART}.timeline.unit") == " ms"
    assert tab.evaluate(f"{CHART}.timeline.last") == pytest.approx(90, rel=0.01)
