"""The Gantt chart, from spans made by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from stored_runs import ACTIONS, MS, simulated_spans, spans, traces

from engine.plan.action import Op
from ppbench.display.colors import LIGHTEST, OP_COLORS, OP_WORDS, tinted
from ppbench.prediction import simulate
from ppbench.report.scripts import plain_json
from ppbench.report.timeline.gantt import MOST_BARS, PATH, gantt, gantt_with_detail
from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.overview import NUM_SLICES, PALE, packed
from ppbench.report.timeline.timelines import planned_step


def drawn(step: pd.DataFrame, title: str = "") -> go.Figure:
    return gantt([Step(title, step)])


def test_a_gantt_has_a_bar_trace_per_op_and_cause_whatever_the_number_of_spans() -> None:
    few, many = drawn(simulated_spans("1f1b", 2, 2)), drawn(simulated_spans("1f1b", 2, 200))
    assert [trace.name for trace in many.data] == [trace.name for trace in few.data]
    names = set(traces(drawn(spans())))
    assert {OP_WORDS[op] for _, _, op, *_ in ACTIONS} <= names
    assert {trace.type for trace in many.data} == {"bar", "scatter"}
    assert not many.layout.shapes
    assert not many.layout.annotations


def test_gantt_bars_start_and_last_as_measured_in_ms_since_the_first_action() -> None:
    forward = traces(drawn(spans()))["forward"]
    np.testing.assert_array_equal(forward.base, [0.0, 12.0])
    np.testing.assert_array_equal(forward.x, [10.0, 10.0])
    backward = traces(drawn(spans(late_ms=700)))["backward"]
    np.testing.assert_array_equal(backward.base, [36.0, 22.0])
    np.testing.assert_array_equal(backward.x, [20.0, 12.0])


def test_the_waiting_part_of_a_transfer_is_a_lighter_bar_before_it_moves() -> None:
    bars = traces(drawn(spans()))
    receive, send = bars["receive activations"], bars["send activations"]
    assert receive.base[0] == send.base[0] == 10.0  # posted at 1, but sent at 10
    assert receive.x[0] == 2.0
    assert receive.customdata[0][4] == 9.0  # ms that the receiver had waited
    assert send.customdata[0][4] == 0.0
    assert "KiB" in send.hovertemplate
    assert send.customdata[0][3] == 4.0
    assert "stage" not in bars["optimizer"].hovertemplate
    waiting = bars["receive activations, waiting"]
    assert (waiting.base[0], waiting.x[0]) == (1.0, 9.0)
    assert waiting.marker.color == tinted(receive.marker.color, 0.55)
    assert not waiting.showlegend
    assert waiting.legendgroup == receive.legendgroup


def test_what_is_posted_before_the_step_begins_waits_from_its_beginning() -> None:
    early = spans()
    early.loc[early["op"] == "RECV_F", "start_ns"] = 0
    waiting = traces(drawn(early))["receive activations, waiting"]
    assert (waiting.base[0], waiting.x[0]) == (0.0, 10.0)
    assert waiting.customdata[0][4] == 15.0


def test_rank_0_is_on_top_and_transfers_lie_in_thin_lanes_below_compute() -> None:
    figure = drawn(spans())
    low, high = figure.layout.yaxis.range
    assert low > high  # y grows downwards, so rank 0 is on top
    words = [re.sub("<.*?>", "", text) for text in figure.layout.yaxis.ticktext]
    assert words == ["rank 0", "send", "recv", "rank 1", "send", "recv"]
    bars = traces(figure)
    compute, send, recv = (
        bars[name].y[0] for name in ("forward", "send activations", "receive gradients")
    )
    assert compute < send < recv < compute + 1
    assert bars["send activations"].width < bars["forward"].width / 2


def test_idle_time_has_a_bar_for_every_cause_and_says_what_it_waits_for() -> None:
    bars = traces(drawn(spans()))
    stage = bars["idle: another stage"]
    assert list(zip(stage.base, stage.x, strict=True)) == [(10.0, 24.0), (0.0, 10.0)]
    assert stage.hovertext == (
        "until stage 1 (rank 1) has computed the gradient",
        "until stage 0 (rank 0) has computed the forward",
    )
    assert list(bars["idle: message"].x) == [2.0, 2.0]
    assert list(bars["idle: no work left"].base) == [34.0]
    assert "idle: host" not in bars


def test_a_single_rank_without_transfers_is_drawn() -> None:
    alone = spans()
    alone = alone[(alone["rank"] == 0) & (alone["lane"] == "compute")]
    names = {"forward", "backward", "optimizer", "idle: host", PATH}
    assert set(traces(drawn(alone))) == names


def test_arrays_are_typed_so_that_thousands_of_spans_stay_small() -> None:
    text = drawn(spans()).to_json(engine="json")
    assert all("bdata" in trace["x"] for trace in json.loads(text)["data"])


def test_each_further_stage_of_a_rank_is_drawn_in_a_lighter_colour() -> None:
    (forward,) = [bar for bar in drawn(simulated_spans("zbv", 2, 4)).data if bar.name == "forward"]
    stages = forward.customdata[:, 1]
    by_stage = {int(s): c for s, c in zip(stages, forward.marker.color, strict=True)}
    assert by_stage[0] == by_stage[1] == tinted(OP_COLORS[Op.F], 0)
    assert by_stage[2] == by_stage[3] == tinted(OP_COLORS[Op.F], LIGHTEST)


def test_the_critical_path_is_one_line_that_waits_to_be_switched_on() -> None:
    path = traces(drawn(spans()))[PATH]
    assert path.visible == "legendonly"
    assert list(path.x[:-1]) == [0, 10, 12, 34, 36, 56]  # 0F, 1F and 1B, 0B
    assert [round(y + 0.14) for y in path.y[:-1]] == [0, 0, 1, 1, 0, 0]


def test_steps_are_stacked_on_one_axis_under_their_titles() -> None:
    afab, other = simulated_spans("afab", 2, 2), simulated_spans("1f1b", 2, 2)
    figure = gantt([Step("AFAB", afab), Step("<b>1F1B", other)])
    forward = traces(figure)["forward"]
    rows = sorted(set(np.round(forward.y, 6)))
    assert len(rows) == 4
    assert rows[1] - rows[0] == pytest.approx(1)
    assert rows[2] - rows[1] > 1  # room for the second title
    assert [a.text for a in figure.layout.annotations] == ["<b>AFAB</b>", "<b>&lt;b&gt;1F1B</b>"]


def test_a_picture_is_written_as_plotly_would_write_its_figure(many) -> None:
    other = simulated_spans("zbv", 2, 4)
    for steps in ([Step("", spans())], [Step("a", spans()), Step("<b>", other)], [Step("", many)]):
        picture = gantt_with_detail(steps).picture
        assert plain_json(picture) == plain_json(go.Figure(picture))


# More than can be drawn


@pytest.fixture(scope="module")
def many() -> pd.DataFrame:
    return simulated_spans("1f1b", 4, 1200)


def test_more_bars_than_can_be_drawn_become_an_overview_and_a_plain_note(many) -> None:
    figure = drawn(many)
    (grid,) = [trace for trace in figure.data if trace.type == "heatmap"]
    assert np.shape(grid.z) == (4, NUM_SLICES)
    assert all(len(t.x) == 1 for t in figure.data if t.type == "bar" and t.legendgroup)
    (note,) = figure.layout.annotations
    assert f"{len(many):,} spans make 24,015 bars, too many to draw one by one" in note.text
    assert f"at most {MOST_BARS:,} bars" not in note.text  # a picture cannot be zoomed


def test_a_cell_is_as_bright_as_it_is_busy_and_has_the_hue_of_its_op(many) -> None:
    (grid,) = [trace for trace in drawn(many).data if trace.type == "heatmap"]
    last = np.asarray(grid.z, dtype=float)[3]
    assert last[-1] == pytest.approx(1.0025, abs=0.0001)  # a little backward, then nothing left
    assert np.floor(last[300]) == 2  # forward and backward in turn: several
    assert grid.zmax == 3


def test_the_steps_beside_a_long_one_are_paler_in_its_overview() -> None:
    picture = gantt_with_detail([planned_step(simulate("zb_h2", 4, 200).frame_in_a_row)]).picture
    heat_map, (grid,) = picture["data"][1], picture["layout"]["meta"]["detail"]["grids"]
    traces = [picture["data"][number] for number in grid["kinds"]]
    assert [trace["name"] for trace in traces[:3]] == [trace["name"] for trace in traces[3:6]]
    assert [trace["marker"].get("opacity") for trace in traces] == [None] * 3 + [PALE] * 6
    kind = np.floor(np.asarray(heat_map["z"], dtype=float)[0])  # of rank 0
    assert heat_map["zmax"] == 11  # three times three ops, several, and several beside it
    assert (kind[100], kind[300], kind[500]) == (10, 9, 10)
    assert heat_map["x0"] < 0


def test_times_are_kept_to_a_millionth_of_the_step_or_finer() -> None:
    for end_ns, quantum_ns in ((500_000, 1), (10**7, 10), (10**9, 1000), (10**12, 1000)):
        told, _ = packed([], end_ns)
        assert told["quantumMs"] * MS == pytest.approx(quantum_ns)
