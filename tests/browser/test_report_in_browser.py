"""Pages in a real browser: they load without an error, draw their charts, react and fit.

Set PPBENCH_SCREENSHOTS to a folder to keep pictures of the pages at both widths and schemes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest
from chromium import CHROMIUM, Browser, Tab

from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from ppbench.analysis.metrics import run_figures, step_figures
from ppbench.config.case import Case
from ppbench.report.page import write_report
from ppbench.store import Store

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)
MS = 1_000_000
DESK, PHONE = 1440, 390
SCREENSHOTS = os.environ.get("PPBENCH_SCREENSHOTS")
ERROR = "</script><script>document.title = 'taken over'</script>"

READER = """
const pause = () => new Promise((done) => setTimeout(done, 20));
const until = async (check) => { for (let n = 0; n < 250 && !check(); n++) await pause(); };
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const texts = (selector, within) => all(selector, within).map((node) => node.textContent);
const isDrawn = (div) => div.querySelector(".main-svg") !== null;
const show = async (div) => { div.scrollIntoView(); await until(() => isDrawn(div)); };
const chart = (name) => document.querySelector(`#${name} .chart`);
const timelines = (state) => all(`details.timeline${state} .chart`);
"""


def simulated_run(store: Store, number: int, case: Case, **changes: object) -> None:
    """Store a run whose spans are those that the program predicts."""
    program = build_program(case.schedule, case.world_size, case.num_microbatches)
    transfers = TransferModel(latency_ns=MS, message_bytes=4096)
    durations = uniform(program.placement, 10 * MS, 10 * MS, 10 * MS)
    spans = pd.DataFrame(simulate(program, durations, transfers).spans())
    tokens_of_step = dict.fromkeys(spans["step"], case.max_tokens_per_step)
    steps = step_figures(spans, case.world_size, tokens_of_step)
    run = {
        "run_id": f"20260101T00000000{number}-abcdef",
        "sweep_id": "s",
        "sweep_name": "demo",
        "sweep_file": "demo.toml",
        "case_id": case.case_id,
        "launch": 0,
        "status": "ok",
        "created_at": "2026-01-01T00:00:00+00:00",
        **case.settings(),
        **run_figures(steps),
        "peak_memory_bytes": 2**20 * case.num_microbatches,
        "cautions": "oversubscribed" if case.world_size > 2 else "",
        "environment": "{}",
        **changes,
    }
    ranks = [{"rank": r, "peak_memory_bytes": 2**20} for r in range(case.world_size)]
    store.write_run(run, {"steps": steps, "ranks": pd.DataFrame(ranks), "spans": spans})


def write_demo(folder: Path) -> Path:
    """A report on two schedules × 1, 2, 4 ranks × two sequence lengths, and one failure."""
    store = Store(folder / "results")
    cases = [
        Case(schedule=schedule, world_size=p, num_microbatches=4, seq_len=t)
        for schedule in ("afab", "1f1b")
        for p in (1, 2, 4)
        for t in (128, 256)
    ]
    for number, case in enumerate(cases):
        simulated_run(store, number, case)
    simulated_run(store, 99, cases[-1], status="error", error=ERROR, tokens_per_s=None)
    page = folder / "page.html"
    write_report(page, store, store.runs(), title="demo", command="ppbench", sweep_text=None)
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def desk(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, DESK, "light")


@pytest.fixture(scope="module")
def phone(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, PHONE, "dark")


@pytest.fixture(params=["desk", "phone"])
def tab(request: pytest.FixtureRequest) -> Tab:
    return request.getfixturevalue(request.param)


def opened(browser: Browser, page: Path, width: int, scheme: str) -> Tab:
    """The page as someone has it who has scrolled through it."""
    tab = Tab(browser, page, width, scheme)
    tab.evaluate(READER)
    tab.evaluate("""(async () => {
      const isFolded = (div) => div.closest("details:not([open])") !== null;
      for (const div of all(".chart")) if (!isFolded(div)) await show(div);
      scrollTo(0, 0);
    })()""")
    if SCREENSHOTS:
        tab.screenshot(Path(SCREENSHOTS) / f"report-{width}-{scheme}.png")
    return tab


def test_the_page_has_no_error_and_requests_nothing_but_itself(tab: Tab, page: Path) -> None:
    assert tab.problems() == []
    assert tab.requests() == [page.as_uri()]


@pytest.mark.parametrize("name", ["throughput", "bubble", "memory"])
def test_every_chart_is_drawn_with_a_bar_per_case(tab: Tab, name: str) -> None:
    in_panels = f"all('.cartesianlayer .bars .point path', chart('{name}')).filter(isLong).length"
    isLong = "(path) => path.getAttribute('d') !== 'M0,0Z'"
    assert tab.evaluate(in_panels.replace("isLong", isLong)) == 12


def test_panels_stand_side_by_side_on_a_desk_and_below_each_other_on_a_phone(
    desk: Tab, phone: Tab
) -> None:
    columns = "chart('throughput').dataset.columns"
    assert (desk.evaluate(columns), phone.evaluate(columns)) == ("2", "1")


def test_nothing_is_wider_than_the_screen(tab: Tab) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("all('.chart').every((d) => d.scrollWidth <= d.clientWidth)")


def test_timelines_worth_comparing_are_drawn_at_once(tab: Tab) -> None:
    assert tab.evaluate("timelines('[open]').filter(isDrawn).length") >= 4


def test_a_closed_timeline_is_drawn_when_it_is_opened(tab: Tab) -> None:
    assert tab.evaluate("timelines(':not([open])').filter(isDrawn).length") == 0
    script = """(async () => {
      const closed = document.querySelector("details.timeline:not([open])");
      closed.querySelector("summary").click();
      const div = closed.querySelector(".chart");
      await show(div);
      return [closed.open, isDrawn(div)];
    })()"""
    assert tab.evaluate(script) == [True, True]


def test_microbatches_stand_inside_the_bars(desk: Tab) -> None:
    inside = desk.evaluate("texts('.bartext', timelines('[open]')[0])")
    assert sorted(inside) == sorted(str(m) for m in range(4) for _ in range(4))


def test_hovering_tells_what_a_bar_is(desk: Tab) -> None:
    script = """(async () => {
      const div = timelines("[open]")[0];
      div.scrollIntoView();
      const curveNumber = div.data.findIndex((trace) => trace.name === "forward");
      Plotly.Fx.hover(div, [{ curveNumber, pointNumber: 1 }]);
      await until(() => div.querySelector(".hovertext"));
      return texts(".hovertext tspan.line", div);
    })()"""
    told = ["forward", "microbatch 1", "rank 0, stage 0", "start 10.000 ms", "duration 10.000 ms"]
    assert desk.evaluate(script) == told


def test_a_click_on_a_heading_sorts_by_number_and_leaves_missing_figures_last(desk: Tab) -> None:
    script = """(() => {
      const heading = all("#runs th").find((th) => th.textContent === "tokens/s");
      const column = all("#runs th").indexOf(heading) + 1;
      heading.querySelector("button").click();
      return texts(`#runs td:nth-child(${column})`);
    })()"""
    for is_falling in (True, False):
        shown = desk.evaluate(script)
        assert shown[-1] == "–"
        speeds = [float(text.replace(",", "")) for text in shown[:-1]]
        assert speeds == sorted(speeds, reverse=is_falling)


def test_an_error_with_markup_does_not_act(desk: Tab) -> None:
    assert desk.evaluate("document.title") == "demo"


def test_charts_take_the_colours_of_the_scheme(desk: Tab, phone: Tab) -> None:
    title = "getComputedStyle(chart('throughput').querySelector('.annotation-text')).fill"
    assert desk.evaluate(title) == "rgb(26, 28, 31)"
    assert phone.evaluate(title) == "rgb(230, 232, 234)"
