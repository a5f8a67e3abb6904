"""Timelines in a real browser, steered with mouse, wheel, fingers and keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, Tab
from gestures import SHIFT, Point, click, drag, key, touch, typed, wheel
from made_pages import runs_with_plans
from screens import DESK, PHONE, needs_browser
from stored_runs import run_row, simulated_spans

from ppbench import simulate
from ppbench.config.case import Case
from ppbench.display.formats import Assets
from ppbench.report.pages.report import write_report
from ppbench.report.pages.timeline import write_timeline
from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.overview import overview
from ppbench.store import Store

pytestmark = needs_browser
MS = 1_000_000
LOOK = """
const div = document.querySelector(".chart");
const placeOf = (x, y) => {
  const box = div.timeline.canvas.getBoundingClientRect();
  return [box.left + x, box.top + y];
};
const middleOf = (span) => {
  const box = div.timeline.boxOfSpan(span);
  return placeOf(box.x + box.width / 2, box.y + box.height / 2);
};
const kindOf = (name) => div.timeline.kinds.findIndex((kind) => kind.name === name);
const spanOf = (name, n) => ({ kind: kindOf(name), n });
const chosen = () => {
  const { chosen: span, kinds } = div.timeline;
  return span && actionOf(kinds[span.kind], span.n);
};
const picture = () => div.timeline.canvas.toDataURL();
const shown = (name) => all(".tl-layers button", div).find((one) => one.textContent === name);
const centreOf = (node) => {
  const box = node.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
};
"""
TABLET = 1024


def opened(browser: Browser, page: Path, width: int, scheme: str = "light") -> Tab:
    tab = Tab(browser, page, width, scheme, LOOK)
    if width == PHONE:
        tab.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    assert tab.evaluate("until(() => div.timeline?.kinds && div.timeline.plane)")
    return tab


@pytest.fixture(scope="module")
def page(page_of: Callable[[str], Path]) -> Path:
    return page_of("timeline")


ON_A_DESK = pytest.mark.parametrize("any_tab", [DESK], indirect=True)
"""It marks tests of what is the same at every width."""
WIDTHS = [DESK, pytest.param(TABLET, marks=pytest.mark.thorough), PHONE]


@pytest.fixture(scope="module", params=WIDTHS)
def any_tab(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Tab:
    return opened(browser, page, request.param, "dark" if request.param == PHONE else "light")


@pytest.fixture
def tab(any_tab: Tab) -> Tab:
    """The page as it was when it was opened."""
    any_tab.evaluate("""(() => {
      const { timeline } = div;
      timeline.choose(null);
      timeline.measure(null);
      timeline.search.value = "";
      timeline.find("");
      timeline.show(timeline.first, timeline.last);
      document.activeElement.blur();
      scrollTo(0, 0);
      return pause();
    })()""")
    return any_tab


def view(tab: Tab) -> tuple[float, float]:
    start, end = tab.evaluate("[div.timeline.view.start, div.timeline.view.end]")
    return start, end


def place(tab: Tab, share: float, y: float = 60) -> Point:
    """A point of the plot, by its share of the width and its distance from the top."""
    tab.evaluate("div.timeline.rows.scrollIntoView({ block: 'center' })")
    x, y = tab.evaluate(f"""(() => {{
      const {{ left, width }} = div.timeline.plane;
      const [x, y] = placeOf(left + {share} * width, 0);
      return [Math.round(x), Math.max(y, div.timeline.head.getBoundingClientRect().bottom) + {y}];
    }})()""")
    return x, y


def middle(tab: Tab, name: str, n: int) -> Point:
    """The middle of a bar, scrolled into sight."""
    tab.evaluate(f"""(() => {{
      const [, y] = middleOf(spanOf("{name}", {n}));
      scrollBy(0, y - innerHeight / 2);
      return pause();
    }})()""")
    x, y = tab.evaluate(f'middleOf(spanOf("{name}", {n}))')
    return x, y


def centre(tab: Tab, node: str) -> Point:
    tab.evaluate(f"{node}.scrollIntoView({{ block: 'center' }})")
    x, y = tab.evaluate(f"centreOf({node})")
    return x, y


def time_at(tab: Tab, at: Point) -> float:
    return float(
        str(
            tab.evaluate(
                "timeAt(div.timeline.plane, "
                f"{at[0]} - div.timeline.canvas.getBoundingClientRect().left)"
            )
        )
    )


def focus(tab: Tab) -> None:
    tab.evaluate("div.timeline.rows.focus({ preventScroll: true })")


COVERED = """(() => {
  const controls = all("button, input, [tabindex='0'], canvas.tl-axis", div)
    .filter((control) => control.checkVisibility());
  return controls.filter((control) => {
    control.scrollIntoView({ block: "center" });
    return !control.contains(document.elementFromPoint(...centreOf(control)));
  }).map((control) => control.outerHTML.slice(0, 80));
})()"""


def test_measured_and_planned_steps_stand_on_one_time_axis(tab: Tab) -> None:
    titles = tab.evaluate("texts('.tl-title')")
    names = [text.split(" · ")[0].split(",")[0] for text in titles]
    assert names == ["afab", "afab", "1f1b", "1f1b"]
    assert 2 <= len(tab.evaluate("div.timeline.ticks")) < 12
    assert len(tab.evaluate("div.timeline.drawn.get(div.timeline.kinds[0])")) > 0
    drawn = "(name) => div.timeline.drawn.get(div.timeline.kinds[spanOf(name, 0).kind]).length / 2"
    assert tab.evaluate(f"({drawn})('forward')") == 4 * 4 * 8


def hovered(tab: Tab, at: Point) -> list[str]:
    for dx in (2, 0):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0] + dx, y=at[1])
    assert tab.evaluate("until(() => !div.timeline.tip.hidden)")
    return list(tab.evaluate("[...div.timeline.tip.children].map((line) => line.textContent)"))


def test_hovering_tells_the_span_and_why_the_gap_before_it_exists(tab: Tab) -> None:
    assert hovered(tab, middle(tab, "forward", 8)) == [
        "forward",
        "microbatch 0",
        "rank 1, stage 1",
        "start 11.000 ms",
        "duration 10.000 ms",
        "idle for 11.000 ms before it, mostly until stage 0 (rank 0) has computed the forward",
    ]
    assert hovered(tab, middle(tab, "idle: another stage", 0))[:2] == [
        "idle: another stage",
        "until stage 1 (rank 1) has computed the gradient of microbatch 0",
    ]


@ON_A_DESK
def test_the_wheel_zooms_around_the_pointer(tab: Tab) -> None:
    at = place(tab, 0.7)
    before, time = view(tab), time_at(tab, at)
    wheel(tab, at, -240)
    start, end = view(tab)
    assert end - start < 0.8 * (before[1] - before[0])
    assert time_at(tab, at) == pytest.approx(time, rel=1e-6)
    wheel(tab, at, 60, across=200)  # sideways
    assert view(tab)[0] > start
    wheel(tab, at, 5000)
    assert view(tab) == before


@ON_A_DESK
def test_dragging_moves_the_view_and_a_double_click_shows_the_whole_step(tab: Tab) -> None:
    whole = view(tab)
    wheel(tab, place(tab, 0.5), -600)
    start, end = view(tab)
    at, to = place(tab, 0.6), place(tab, 0.4)
    time = time_at(tab, at)
    drag(tab, [at, (at[0] - 20, at[1]), to])
    assert time_at(tab, to) == pytest.approx(time, rel=1e-6)
    assert view(tab)[1] - view(tab)[0] == pytest.approx(end - start)
    assert view(tab)[0] > start
    click(tab, place(tab, 0.5), count=2)
    assert view(tab) == whole


def test_two_fingers_zoom_and_one_moves(browser: Browser, page: Path) -> None:
    phone = opened(browser, page, PHONE, "light")
    touch(phone, [[middle(phone, "backward", 3)]])
    assert phone.evaluate("chosen()") == "0B3"
    x, y = place(phone, 0.5)
    left, right = time_at(phone, (x - 30, y)), time_at(phone, (x + 30, y))
    apart = [[(x - d, y), (x + d, y)] for d in (30, 45, 60, 90)]
    touch(phone, apart)
    assert time_at(phone, (x - 90, y)) == pytest.approx(left, rel=0.02)
    assert time_at(phone, (x + 90, y)) == pytest.approx(right, rel=0.02)
    time = time_at(phone, (x + 60, y))
    touch(phone, [[(x + 60, y)], [(x + 40, y)], [(x - 20, y)]])
    assert time_at(phone, (x - 20, y)) == pytest.approx(time, rel=0.02)
    assert phone.problems() == []
    phone.close()


@ON_A_DESK
def test_keys_zoom_and_move(tab: Tab) -> None:
    focus(tab)
    key(tab, "w")
    key(tab, "w")
    start, end = view(tab)
    assert end - start < 0.6 * float(str(tab.evaluate("div.timeline.last")))
    for forth, back in (("d", "a"), ("ArrowRight", "ArrowLeft")):
        key(tab, forth)
        assert view(tab)[0] > start
        key(tab, back)
        assert view(tab)[0] == pytest.approx(start)
    key(tab, "s")
    assert view(tab)[1] - view(tab)[0] > end - start
    assert " to " in str(tab.evaluate("div.timeline.live.textContent"))
    key(tab, "0")
    assert view(tab)[0] == 0


def test_the_small_overview_shows_and_moves_the_window(tab: Tab) -> None:
    wheel(tab, place(tab, 0.5), -800)
    start, end = view(tab)
    left, right = tab.evaluate("""(() => {
      const { map: all, pane: part } = div.timeline;
      const [map, pane] = [all, part].map((one) => one.getBoundingClientRect());
      return [(pane.left - map.left) / map.width, (pane.right - map.left) / map.width];
    })()""")
    last = float(str(tab.evaluate("div.timeline.last")))
    assert (left, right) == pytest.approx((start / last, end / last), abs=0.02)
    x, y = centre(tab, "div.timeline.pane")
    drag(tab, [(x, y), (x + 10, y), (x + 30, y)])
    assert view(tab)[0] > start
    assert view(tab)[1] - view(tab)[0] == pytest.approx(end - start)
    tab.evaluate("div.timeline.show(0, div.timeline.last)")
    tab.evaluate("getSelection().selectAllChildren(document.body)")  # not to be dragged instead
    box = tab.evaluate(
        "(({ left, width }) => [left, width])(div.timeline.map.getBoundingClientRect())"
    )
    at = [(box[0] + share * box[1], y) for share in (0.25, 0.3, 0.5)]
    drag(tab, at)
    assert view(tab) == pytest.approx((0.25 * last, 0.5 * last), rel=0.05)
    tab.evaluate("div.timeline.pane.focus()")
    key(tab, "ArrowRight")
    assert view(tab)[0] > 0.26 * last
    assert "ms" in str(tab.evaluate("div.timeline.pane.getAttribute('aria-valuetext')"))


def search(tab: Tab, text: str) -> None:
    click(tab, centre(tab, "div.timeline.search"))
    tab.evaluate("div.timeline.search.select()")
    typed(tab, text)
    key(tab, "Enter")


@ON_A_DESK
def test_the_search_finds_actions_ranks_and_names(tab: Tab) -> None:
    count = "div.timeline.count.textContent"
    search(tab, "2F7")
    assert tab.evaluate("chosen()") == "2F7"
    assert tab.evaluate(count) == "1 of 4"  # measured and planned, of both schedules
    search(tab, "f7")
    assert tab.evaluate(count) == "1 of 16"
    assert str(tab.evaluate("chosen()")).endswith("F7")
    first = tab.evaluate("div.timeline.chosen")
    click(tab, centre(tab, "div.timeline.next"))
    assert tab.evaluate(count) == "2 of 16"
    click(tab, centre(tab, "div.timeline.previous"))
    assert tab.evaluate("div.timeline.chosen") == first
    search(tab, "rank 1")
    assert tab.evaluate(
        "div.timeline.matches.every((s) => numberOf(div.timeline.kinds[s.kind], 'rank', s.n) === 1)"
    )
    search(tab, "rank 1 backward")
    assert tab.evaluate(count) == "1 of 32"
    search(tab, "9X9")
    assert tab.evaluate(count) == "no match"
    assert tab.evaluate("div.timeline.next.disabled")


def test_a_click_pins_details_beside_the_plot_and_its_messages(tab: Tab) -> None:
    before = tab.evaluate("picture()")
    click(tab, middle(tab, "forward", 9))  # of rank 1
    assert tab.evaluate("chosen()") == "1F1"
    text = tab.evaluate("div.timeline.side.innerText")
    assert text.startswith("1F1 forward")
    assert "duration 10.000 ms" in text
    assert "sent by rank 0" in text
    assert "arrives at rank 2" in text
    plot, side = tab.evaluate("""[div.timeline.rows, div.timeline.side].map((node) => {
      const { left, right, top, bottom } = node.getBoundingClientRect();
      return { left, right, top, bottom };
    })""")
    assert side["left"] >= plot["right"] or side["top"] >= plot["bottom"]
    messages = tab.evaluate("""div.timeline.messages.map((message) => (
      [message.from, message.to].map(({ kind, n }) => actionOf(div.timeline.kinds[kind], n))))""")
    assert messages == [["0SEND_F1", "1RECV_F1"], ["1SEND_F1", "2RECV_F1"]]
    assert tab.evaluate("picture()") != before
    assert tab.evaluate(COVERED) == []
    if tab.evaluate("div.timeline.brief.checkVisibility()"):  # the details lie below the plot
        click(tab, centre(tab, "div.timeline.brief"))
        top = float(str(tab.evaluate("div.timeline.side.getBoundingClientRect().top")))
        assert 0 < top < 900
    click(tab, centre(tab, "div.timeline.side.querySelector('.tl-message button')"))
    assert tab.evaluate("chosen()") == "0SEND_F1"
    focus(tab)
    key(tab, "Escape")
    assert tab.evaluate("chosen()") is None
    assert not tab.evaluate("div.timeline.side.innerText.startsWith('0SEND')")


def test_a_range_is_measured_with_the_busy_time_of_every_rank(tab: Tab, page: Path) -> None:
    spans = simulated_spans("afab", 4, 8, 1)
    compute = spans[spans["lane"] == "compute"]
    points = [place(tab, share) for share in (0.2, 0.3, 0.6)]
    drag(tab, points, modifiers=SHIFT)
    start, end = tab.evaluate("[div.timeline.range.start, div.timeline.range.end]")
    assert start == pytest.approx(time_at(tab, points[0]), abs=1)
    assert end == pytest.approx(time_at(tab, points[-1]), abs=1)
    first = compute[compute["rank"] == 0]
    clipped = first["end_ns"].clip(start * MS, end * MS) - first["start_ns"].clip(
        start * MS, end * MS
    )
    row = tab.evaluate("texts('td', div.timeline.side.querySelectorAll('table tr')[1])")
    assert float(row[1]) == pytest.approx(clipped.sum() / MS, abs=0.01)
    assert float(row[2]) == pytest.approx(end - start - clipped.sum() / MS, abs=0.01)
    assert f"Measured: {end - start:,.3f} ms" in tab.evaluate("div.timeline.side.innerText")
    click(tab, centre(tab, "div.timeline.buttons.measure"))
    assert tab.evaluate("div.timeline.buttons.measure.ariaPressed") == "true"
    drag(tab, [place(tab, share) for share in (0.7, 0.75, 0.8)])
    assert tab.evaluate("div.timeline.range.start") > start
    assert tab.evaluate("div.timeline.buttons.measure.ariaPressed") == "false"


@ON_A_DESK
def test_keys_reach_every_span_and_say_it(tab: Tab) -> None:
    focus(tab)
    key(tab, "Enter")
    assert "microbatch 0, rank 0, stage 0" in tab.evaluate("div.timeline.live.textContent")
    key(tab, "ArrowRight")
    assert tab.evaluate("chosen()") == "0F1"
    assert "microbatch 1" in tab.evaluate("div.timeline.live.textContent")
    key(tab, "ArrowDown")
    key(tab, "ArrowDown")
    key(tab, "ArrowDown")
    assert "rank 1" in tab.evaluate("div.timeline.live.textContent")
    reached, total = tab.evaluate("""(async () => {
      const { timeline } = div;
      const press = (key) => timeline.rows.dispatchEvent(new KeyboardEvent("keydown", { key }));
      const seen = new Set();
      const name = () => `${timeline.chosen.kind} ${timeline.chosen.n}`;
      timeline.choose(null);
      press("Enter");
      for (let lane = null; lane !== name(); press("ArrowDown"), press("Home")) {
        press("Home");
        lane = name();
        for (let last = null; last !== name(); press("ArrowRight")) seen.add(last = name());
        press("Home");
        const now = name();
        press("ArrowDown");
        press("Home");
        if (name() === now) break;
        press("ArrowUp");
      }
      return [seen.size, timeline.kinds.reduce((sum, kind) => sum + kind.begin.length, 0)];
    })()""")
    assert reached == total > 300


@ON_A_DESK
def test_layers_are_buttons_that_say_whether_they_are_on(tab: Tab) -> None:
    for name, group in (("critical path", "critical path"), ("forward", "forward")):
        before, was_on = tab.evaluate(f"[picture(), shown('{name}').ariaPressed]")
        click(tab, centre(tab, f"shown('{name}')"))
        assert tab.evaluate(f"shown('{name}').ariaPressed") != was_on
        assert tab.evaluate(f"div.timeline.hidden.has('{group}')") == (was_on == "true")
        assert tab.evaluate("picture()") != before
        click(tab, centre(tab, f"shown('{name}')"))
        assert tab.evaluate(f"shown('{name}').ariaPressed") == was_on
    click(tab, centre(tab, "shown('all transfers')"))
    assert tab.evaluate("shown('send activations').ariaPressed") == "false"
    click(tab, centre(tab, "shown('all transfers')"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    store = runs_with_plans(folder / "results", 8, 8)
    text = {"title": "report", "command": "ppbench report", "sweep_text": None}
    write_report(folder / "report.html", store, store.runs(), **text)
    return folder / "report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_timeline_in_a_table_leaves_the_wheel_to_the_page_until_it_is_clicked(
    browser: Browser, report: Path, width: int
) -> None:
    look = LOOK.replace("const div =", "globalThis.div =")
    tab = Tab(browser, report, width, look=f"{look}void 0")
    tab.evaluate("""(async () => {
      const opener = document.querySelector("#runs .opener");
      opener.click();
      globalThis.div = opener.closest("tr").nextElementSibling.querySelector(".chart");
      div.scrollIntoView();
      await until(() => div.timeline?.plane);
    })()""")
    whole = view(tab)
    wheel(tab, place(tab, 0.5), -300)
    assert view(tab) == whole
    tab.evaluate("new Promise((done) => setTimeout(done, 500))")  # the page has scrolled
    at = place(tab, 0.5)
    click(tab, at)
    at = place(tab, 0.5)
    wheel(tab, at, -300)
    assert view(tab)[1] - view(tab)[0] < 0.8 * (whole[1] - whole[0])
    seen = tab.evaluate("""(async () => {
      const { bottom } = div.timeline.rows.getBoundingClientRect();
      scrollBy(0, bottom - 300);
      await pause();
      await pause();
      const { top } = div.timeline.axis.getBoundingClientRect();
      const there = document.elementFromPoint(...centreOf(div.timeline.axis));
      const side = div.timeline.side.getBoundingClientRect();
      return [top >= 0, div.timeline.axis === there, side.bottom > 0];
    })()""")
    assert seen == [True, True, True]
    assert tab.evaluate(COVERED) == []
    assert tab.problems() == []
    tab.close()


def test_the_library_is_shared_and_a_missing_one_is_said_to_be_missing(
    browser: Browser, tmp_path: Path
) -> None:
    store = runs_with_plans(tmp_path / "results", 2, 4)
    text = {"title": "shared", "command": "ppbench report", "sweep_text": None}
    write_report(tmp_path / "r.html", store, store.runs(), **text, assets=Assets.shared)
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "r.html", tmp_path / "alone" / "r.html")
    tab = Tab(browser, tmp_path / "r.html", DESK, look=LOOK)
    assert tab.evaluate("until(() => document.querySelector('.main-svg') !== null)")
    assert tab.problems() == []
    assert len(tab.requests()) == 2
    assert all(address.startswith(tmp_path.as_uri()) for address in tab.requests())
    alone = Tab(browser, tmp_path / "alone" / "r.html", DESK)
    alert = str(alone.evaluate("document.querySelector('[role=alert]').textContent"))
    assert "is missing beside this page" in alert
    assert "Copy the folder" in alert
    for one in (tab, alone):
        one.close()


# More than can be drawn


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return runs_with_plans(tmp_path_factory.mktemp("big") / "results", 4, 600)


@pytest.fixture(scope="module")
def big(browser: Browser, big_store: Store) -> Tab:
    page = big_store.folder / "overview.html"
    write_timeline(page, big_store, big_store.runs().iloc[[1]])
    return opened(browser, page, DESK)


def shown(tab: Tab, start: float, end: float) -> tuple[bool, str]:
    """Whether single bars are drawn between two times, and what the note says."""
    tab.evaluate(f"(div.timeline.show({start}, {end}), pause().then(pause))")
    is_single, note = tab.evaluate(
        "[div.timeline.drawn !== null, div.querySelector('.merged').textContent]"
    )
    return is_single, note


def test_too_many_spans_open_as_an_overview_that_says_what_was_merged(big: Tab) -> None:
    is_single, note = shown(big, 0, 20000)
    assert not is_single
    assert note.startswith("12,000 spans make ")
    assert "% computing" in hovered(big, place(big, 0.4, 20))[0]
    assert big.problems() == []


def test_the_page_slices_time_as_the_overview_did(big: Tab, big_store: Store) -> None:
    spans = big_store.table("spans", [big_store.runs().iloc[1]["run_id"]])
    step = Step("", spans)
    kinds = [m for m in step.marks if m.kind.has_text]
    wanted = overview(kinds, 4, 2e9, 3e9, 50)
    busy, mostly, counts = json.loads(
        str(
            big.evaluate("""(() => {
              const kinds = div.timeline.kinds.filter((kind) => kind.isComputation);
              const [step] = div.timeline.steps;
              const { busy, mostly, counts } = overviewOf(kinds, step, 2000, 3000, 50, 0.8);
              return JSON.stringify([busy, mostly, counts].map((values) => [...values]));
            })()""")
        )
    )
    np.testing.assert_allclose(np.reshape(busy, (4, 50)), wanted.busy, atol=1e-6)
    np.testing.assert_array_equal(np.reshape(mostly, (4, 50)), wanted.mostly)
    np.testing.assert_array_equal(np.reshape(counts, (4, 50)), wanted.counts)


def test_zooming_in_shows_every_bar_and_double_click_the_overview_again(
    big: Tab, big_store: Store
) -> None:
    shown(big, 0, 20000)
    for _ in range(8):
        wheel(big, place(big, 0.5, 20), -300)
    start, end = view(big)
    spans = big_store.table("spans", [big_store.runs().iloc[1]["run_id"]])
    seen = spans[(spans["start_ns"] < end * MS) & (spans["end_ns"] > start * MS)]
    lengths = dict(
        big.evaluate("[...div.timeline.drawn].map(([kind, at]) => [kind.name, at.length / 2])")
    )
    assert lengths["forward"] == (seen["op"] == "F").sum() > 4
    assert lengths["send activations"] >= (seen["op"] == "SEND_F").sum() > 4
    assert shown(big, start, end)[1].endswith("bars in view, drawn one by one.")
    forward = seen[(seen["op"] == "F") & (seen["start_ns"] > start * MS)]
    first = forward.sort_values(["rank", "start_ns"]).iloc[0]
    at = big.evaluate(f"""div.timeline.kinds[spanOf("forward", 0).kind].begin
      .findIndex((begin) => Math.abs(begin - {first["start_ns"] / MS}) < 0.01)""")
    told = hovered(big, middle(big, "forward", int(str(at))))
    assert told[:4] == [
        "forward",
        f"microbatch {first['microbatch']}",
        f"rank {first['rank']}, stage {first['stage']}",
        f"start {first['start_ns'] / MS:,.3f} ms",
    ]
    click(big, place(big, 0.5, 20), count=2)
    assert shown(big, *view(big))[1].startswith("12,000 spans make ")


def test_the_search_zooms_to_a_span_among_too_many(big: Tab) -> None:
    shown(big, 0, 20000)
    search(big, "2B431")
    assert big.evaluate("chosen()") == "2B431"
    assert big.evaluate("div.timeline.drawn !== null")
    x, y = middle(big, "backward", int(str(big.evaluate("div.timeline.chosen.n"))))
    assert hovered(big, (x, y))[1] == "microbatch 431"
    big.evaluate("div.timeline.choose(null)")


def test_the_view_survives_another_colour_scheme(big: Tab) -> None:
    shown(big, 9000, 9300)
    before = big.evaluate("picture()")
    big.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    big.evaluate("pause().then(pause)")
    assert view(big) == (9000, 9300)
    assert big.evaluate("picture()") != before
    assert shown(big, 9000, 9300)[0]


def test_zooming_in_a_little_makes_a_finer_overview(big: Tab) -> None:
    assert not shown(big, 4000, 12000)[0]
    cells = big.evaluate("""(({ start, end, slices }) => [start, end, slices])(
      div.timeline.cells[0].overview)""")
    assert cells == [4000, 12000, 600]


@pytest.fixture(scope="module")
def page_in_a_row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZB-H2, whose ranks begin a step while others end the one before it, in steps 4 to 6."""
    folder = tmp_path_factory.mktemp("row")
    spans = simulate("zb_h2", 4, 8, cost="F=0.01,I=0.01,W=0.01").frame_in_a_row
    spans = spans.astype({"start_ns": "int64", "end_ns": "int64"})
    planned, spans = spans.drop(columns="num_bytes"), spans.assign(step=spans["step"] + 5)
    case = Case(schedule="zb_h2", world_size=4, num_microbatches=8)
    steps = pd.DataFrame({"step": [4, 5, 6], "step_ns": 240 * MS})
    store = Store(folder / "results")
    run = run_row(0, case)
    store.write_run(run, {"steps": steps, "spans": spans, "planned": planned})
    write_timeline(folder / "row.html", store, store.runs(), choice="5", has_plan=True)
    return folder / "row.html"


@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (PHONE, "dark")])
def test_a_step_in_a_row_is_marked_between_those_beside_it(
    browser: Browser, page_in_a_row: Path, width: int, scheme: str
) -> None:
    tab = opened(browser, page_in_a_row, width, scheme)
    names = "div.timeline.steps.map(({ names }) => names.map(([name]) => name))"
    assert tab.evaluate(names) == [
        ["step 4", "step 5 · 240.0 ms", "step 6"],
        ["the step before", "the step · 240.0 ms", "the step after"],
    ]
    windows = tab.evaluate("div.timeline.steps[0].windows")
    assert windows == [[10 * rank, 240 + 10 * rank] for rank in range(4)]
    label = str(tab.evaluate("div.timeline.rows.getAttribute('aria-label')"))
    assert "step 5 · 240.0 ms is marked, beside step 4 and step 6." in label
    whole = view(tab)
    assert whole[0] == -240
    focus(tab)
    key(tab, "0")
    assert view(tab) == pytest.approx((0, 270))
    key(tab, "0")
    assert view(tab) == whole
    # The search is in the marked step; a span beside it says its step, and has messages in it.
    search(tab, "2F7")
    assert tab.evaluate("div.timeline.count.textContent") == "1 of 2"  # measured and planned
    beside = "div.timeline.kinds.findIndex(({ name, beside }) => name === 'forward' && beside > 0)"
    tab.evaluate(f"div.timeline.choose({{ kind: {beside}, n: 9 }}, {{ isShown: true }})")
    assert str(tab.evaluate("div.timeline.live.textContent")).endswith("step 6")
    kinds = """div.timeline.messages.flatMap(({ from, to }) => (
      [from, to].map(({ kind }) => div.timeline.kinds[kind].beside)))"""
    assert tab.evaluate(kinds) == [1, 1, 1, 1]
    # The busy time of the marked step: each rank computes for 240 ms of its window.
    tab.evaluate("div.timeline.measure({ start: 30, end: 240 })")
    busy = tab.evaluate("texts('td', div.timeline.side.querySelectorAll('table tr')[1])")
    assert busy[1] == "210.000"
    assert tab.problems() == []
    tab.close()
