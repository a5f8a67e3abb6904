"""Timelines in a real browser: hovering shows the right span, zooming shows detail.

Screenshots of the pages at both widths and schemes are kept; see `conftest.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, keep, needs_browser

from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from ppbench.config.case import Case
from ppbench.report.pages.timeline import write_timeline
from ppbench.report.timeline.marks import SizeUnit, Step, marks_of
from ppbench.report.timeline.overview import overview
from ppbench.store import Store

pytestmark = needs_browser
MS = 1_000_000
NASTY = "</script><script>document.title = 'taken over'</script> & 'ünïcode'"
READER = """
const pause = () => new Promise((done) => setTimeout(done, 20));
const until = async (check) => {
  for (let n = 0; n < 250 && !check(); n++) await pause();
  return check();
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const texts = (selector, within) => all(selector, within).map((node) => node.textContent);
const div = document.querySelector(".chart");
"""


def step_of(schedule: str, ranks: int, microbatches: int) -> pd.DataFrame:
    program = build_program(schedule, ranks, microbatches)
    durations = uniform(program.placement, 10 * MS, 10 * MS, 10 * MS)
    transfers = TransferModel(latency_ns=MS, message_bytes=4096)
    return pd.DataFrame(simulate(program, durations, transfers).spans()).assign(step=3)


def store_of(folder: Path, ranks: int, microbatches: int) -> Store:
    """AFAB and 1F1B as simulated, each with its plan."""
    store = Store(folder)
    for number, schedule in enumerate(("afab", "1f1b")):
        spans = step_of(schedule, ranks, microbatches)
        step_ns = spans["end_ns"].max()
        case = Case(schedule=schedule, world_size=ranks, num_microbatches=microbatches)
        figures = {"step_ns": step_ns, "step_with_optimizer_ns": step_ns, "bubble_fraction": 0.2}
        run = {
            "run_id": f"20260101T00000000{number}-abcdef",
            "case_id": case.case_id,
            "launch": 0,
            "status": "ok",
            "cautions": "",
            **case.settings(),
            "model_preset": NASTY,
            **figures,
        }
        steps = pd.DataFrame([{"step": 3, **figures}])
        planned = spans.drop(columns="num_bytes")
        store.write_run(run, {"steps": steps, "spans": spans, "planned": planned})
    return store


def opened(browser: Browser, page: Path, width: int, scheme: str) -> Tab:
    tab = Tab(browser, page, width, scheme)
    tab.evaluate(READER)
    assert tab.evaluate("until(() => div.querySelector('.main-svg') !== null)")
    keep(tab, f"{page.stem}-{width}-{scheme}")
    return tab


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline")
    store = store_of(folder / "results", 4, 8)
    write_timeline(folder / "timeline.html", store, store.runs(), has_plan=True)
    return folder / "timeline.html"


@pytest.fixture(scope="module")
def desk(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, DESK, "light")


def test_stacked_timelines_have_no_error_request_nothing_and_fit(
    browser: Browser, desk: Tab, page: Path
) -> None:
    for tab in (desk, opened(browser, page, PHONE, "dark")):
        assert tab.problems() == []
        assert tab.requests() == [page.as_uri()]
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate("document.title") == "afab and 1f1b"
        assert NASTY in str(tab.evaluate("document.body.innerText"))


def test_measured_and_planned_steps_stand_on_one_time_axis(desk: Tab) -> None:
    titles = desk.evaluate("texts('.annotation-text')")
    assert [text.split(" · ")[0].split(",")[0] for text in titles] == [
        "afab",
        "afab",
        "1f1b",
        "1f1b",
    ]
    assert desk.evaluate("texts('.xaxislayer-above .xtick').length") < 12
    lengths = dict(desk.evaluate("div._fullData.map((trace) => [trace.name, trace._length])"))
    assert lengths["forward"] == 4 * 4 * 8


BAR = """(() => {
  const trace = div._fullData.findIndex((one) => one.name === "%s");
  const { base, x, y } = div.data[trace];
  const at = %s;
  const { xaxis, yaxis } = div._fullLayout;
  const box = div.getBoundingClientRect();
  const read = (values, n) => (values._inputArray ?? values)[n];
  const middle = read(div._fullData[trace].base, at) + read(div._fullData[trace].x, at) / 2;
  return [
    box.left + xaxis._offset + xaxis.d2p(middle),
    box.top + yaxis._offset + yaxis.d2p(read(div._fullData[trace].y, at)),
  ];
})()"""


def hovered(tab: Tab, trace: str, at: object) -> list[str]:
    """The text that the page shows when the mouse is on the middle of a bar."""
    tab.evaluate("div.scrollIntoView()")
    x, y = tab.evaluate(BAR % (trace, at))
    tab.evaluate("(Plotly.Fx.unhover(div), until(() => !div.querySelector('.hovertext')))")
    for dx in (2, 0):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        tab.evaluate("pause()")
    assert tab.evaluate("until(() => div.querySelector('.hovertext') !== null)")
    lines = tab.evaluate("texts('.hovertext tspan.line', div)")
    return lines or tab.evaluate("texts('.hovertext .nums', div)")


def test_hovering_tells_the_span_and_why_the_gap_before_it_exists(desk: Tab) -> None:
    assert hovered(desk, "forward", 8) == [
        "forward",
        "microbatch 0",
        "rank 1, stage 1",
        "start 11.000 ms",
        "duration 10.000 ms",
        "idle for 11.000 ms before it, mostly until stage 0 (rank 0) has computed the forward",
    ]
    told = hovered(desk, "idle: another stage", 0)
    assert told[:2] == [
        "idle: another stage",
        "until stage 1 (rank 1) has computed the gradient of microbatch 0",
    ]


def test_the_critical_path_can_be_switched_on(desk: Tab) -> None:
    lines = "all('.scatterlayer .trace path.js-line', div).length"
    assert desk.evaluate(lines) == 0
    desk.evaluate("""(async () => {
      const names = texts(".legendtext", div);
      const item = all(".traces", div)[names.indexOf("critical path")];
      const toggle = item.querySelector(".legendtoggle");
      toggle.dispatchEvent(new MouseEvent("mousedown", { bubbles: true }));
      toggle.dispatchEvent(new MouseEvent("mouseup", { bubbles: true }));
      await until(() => all(".scatterlayer .trace path.js-line", div).length > 0);
    })()""")
    assert desk.evaluate(lines) == 4  # a piece for each step


# More than can be drawn


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(tmp_path_factory.mktemp("big") / "results", 4, 600)


@pytest.fixture(scope="module")
def big(browser: Browser, big_store: Store) -> Tab:
    page = big_store.folder / "overview.html"
    write_timeline(page, big_store, big_store.runs().iloc[[1]])
    tab = opened(browser, page, DESK, "light")
    assert tab.evaluate("columnsOf.get(div).then((traces) => traces.length)") > 5
    return tab


def view(tab: Tab) -> tuple[int, str]:
    """How many bars are drawn, and what the note says."""
    bars = "all('.barlayer .point', div).length"
    return int(str(tab.evaluate(bars))), str(tab.evaluate("div.previousElementSibling.textContent"))


def drag(tab: Tab, start: float, end: float) -> None:
    """Zoom by dragging over a part of the width of the plot."""
    tab.evaluate("div.scrollIntoView()")
    tab.evaluate("""void (globalThis.shown = new Promise((done) => {
      div.addEventListener("detailed", done, { once: true });
    }))""")
    left, width, y = tab.evaluate("""(() => {
      const { xaxis, yaxis } = div._fullLayout;
      const box = div.getBoundingClientRect();
      return [box.left + xaxis._offset, xaxis._length, box.top + yaxis._offset + 20];
    })()""")
    mouse = {"button": "left", "clickCount": 1, "y": y}
    tab.call("Input.dispatchMouseEvent", type="mousePressed", x=left + start * width, **mouse)
    for part in (0.3, 0.7, 1.0):
        x = left + (start + part * (end - start)) * width
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, x=x, **mouse)
    tab.call("Input.dispatchMouseEvent", type="mouseReleased", x=left + end * width, **mouse)
    tab.evaluate("shown.then(() => true)")


def whole(tab: Tab) -> None:
    """Back to the whole step."""
    tab.evaluate("""(async () => {
      const shown = new Promise((done) => div.addEventListener("detailed", done, { once: true }));
      await Plotly.relayout(div, { "xaxis.autorange": false, "xaxis.range": [0, 20000] });
      await shown;
    })()""")


def test_too_many_spans_open_as_an_overview_that_says_what_was_merged(big: Tab) -> None:
    num_bars, note = view(big)
    assert num_bars < 100
    assert note.startswith("12,000 spans make ")
    assert big.evaluate("all('.heatmaplayer image', div).length") == 1
    assert big.problems() == []


def test_the_page_slices_time_as_the_overview_did(big: Tab, big_store: Store) -> None:
    spans = big_store.table("spans", [big_store.runs().iloc[1]["run_id"]])
    step = Step("", spans)
    kinds = [m for m in marks_of(step, SizeUnit()) if m.kind.has_text]
    wanted = overview(kinds, 4, 2e9, 3e9, 50)
    found = json.loads(
        str(
            big.evaluate("""(async () => {
              const traces = (await columnsOf.get(div)).filter((trace) => trace.hasText);
              const grid = div.layout.meta.detail.grids[0];
              const { spent, counts } = slicesOf(traces, grid, 2000, 3000, 50);
              return JSON.stringify({ spent: spent.map((one) => [...one]), counts: [...counts] });
            })()""")
        )
    )
    np.testing.assert_allclose(np.reshape(found["spent"], (2, 4, 50)), wanted.shares, atol=1e-6)
    np.testing.assert_array_equal(np.reshape(found["counts"], (4, 50)), wanted.counts)


def test_zooming_in_shows_every_bar_and_double_click_the_overview_again(
    big: Tab, big_store: Store
) -> None:
    drag(big, 0.5, 0.52)
    _, note = view(big)
    start, end = big.evaluate("div.layout.xaxis.range")
    spans = big_store.table("spans", [big_store.runs().iloc[1]["run_id"]])
    seen = spans[(spans["start_ns"] < end * MS) & (spans["end_ns"] > start * MS)]
    lengths = dict(big.evaluate("div._fullData.map((t) => [t.name, t.visible ? t._length : 0])"))
    assert lengths["forward"] == (seen["op"] == "F").sum() > 10
    assert lengths["send activations"] >= (seen["op"] == "SEND_F").sum() > 10
    assert note.endswith("bars in view, drawn one by one.")
    first = (
        seen[(seen["op"] == "F") & (seen["start_ns"] > start * MS)]
        .sort_values(["rank", "start_ns"])
        .iloc[0]
    )
    at = big.evaluate(f"""div._fullData.find((trace) => trace.name === "forward").base
      .findIndex((base) => Math.abs(base - {first["start_ns"] / MS}) < 0.01)""")
    told = hovered(big, "forward", at)
    assert told[:2] == ["forward", f"microbatch {first['microbatch']}"]
    assert told[2] == f"rank {first['rank']}, stage {first['stage']}"
    assert told[3] == f"start {first['start_ns'] / MS:,.3f} ms"
    keep(big, "overview-zoomed")
    whole(big)
    assert view(big)[1].startswith("12,000 spans make ")


def test_the_view_survives_another_colour_scheme_and_a_hidden_op(big: Tab) -> None:
    drag(big, 0.5, 0.52)
    before = big.evaluate("div.layout.xaxis.range")
    big.evaluate("""void (globalThis.shown = new Promise((done) => {
      div.addEventListener("detailed", done, { once: true });
    }))""")
    big.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    big.evaluate("shown.then(() => true)")
    assert big.evaluate("div.layout.xaxis.range") == before
    assert view(big)[1].endswith("bars in view, drawn one by one.")


def test_zooming_in_a_little_makes_a_finer_overview(big: Tab) -> None:
    whole(big)
    drag(big, 0.2, 0.6)
    _, note = view(big)
    assert note.startswith("12,000 spans make ")
    width = big.evaluate("div.data.find((trace) => trace.type === 'heatmap').dx")
    start, end = big.evaluate("div.layout.xaxis.range")
    assert width == pytest.approx((end - start) / 600)
