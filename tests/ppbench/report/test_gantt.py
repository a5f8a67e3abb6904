"""The Gantt chart, from spans made by hand."""

from __future__ import annotations

import base64
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from packed_columns import columns_of
from stored_runs import ACTIONS, MS, simulated_spans, spans, traces

from engine.plan.action import Op
from ppbench.display.colors import LIGHTEST, OP_COLORS, OP_WORDS, tinted
from ppbench.prediction import simulate
from ppbench.report.timeline.drawing import MOST_BARS, NUM_SLICES, PALE, Drawing, packed
from ppbench.report.timeline.gantt import PATH, gantt
from ppbench.report.timeline.marks import Step
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
    assert receive.hovertext[0].endswith("4.0 KiB<br>posted 9.000 ms before the transfer began")
    assert send.hovertext[0].endswith("4.0 KiB<br>posted 0.000 ms before the transfer began")
    assert "stage" not in bars["optimizer"].hovertext[0]
    waiting = bars["receive activations, waiting"]
    assert (waiting.base[0], waiting.x[0]) == (1.0, 9.0)
    assert waiting.marker.color == tinted(receive.marker.color, 0.55)
    assert not waiting.showlegend
    assert waiting.legendgroup == receive.legendgroup


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
    assert [text.split("<br>")[1] for text in stage.hovertext] == [
        "until stage 1 (rank 1) has computed the gradient of microbatch 0",
        "until stage 0 (rank 0) has computed the forward of microbatch 0",
    ]
    assert list(bars["idle: message"].x) == [2.0, 2.0]
    assert list(bars["idle: no work left"].base) == [34.0]
    assert "idle: host" not in bars


def test_each_further_stage_of_a_rank_is_drawn_in_a_lighter_colour() -> None:
    (forward,) = [bar for bar in drawn(simulated_spans("zbv", 2, 4)).data if bar.name == "forward"]
    stages = [re.search(r"stage (\d)", text)[1] for text in forward.hovertext]
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


def test_a_page_gets_the_bars_of_the_chart_in_columns() -> None:
    steps = [Step("a", simulated_spans("zbv", 2, 4, 1)), Step("b", spans())]
    told = packed(Drawing(steps))
    read = columns_of(told.meta, told.columns)
    bars = [trace for trace in gantt(steps).data if trace.type == "bar" and trace.name]
    assert len(bars) == len(read)
    for trace in bars:
        own, lane = read[trace.name, 0], told.meta["lanes"][read[trace.name, 0].kind["lane"]]
        order = np.lexsort((trace.base, trace.y))
        np.testing.assert_allclose(own.begin, np.array(trace.base)[order], atol=1e-4)
        np.testing.assert_allclose(own.width, trace.x[order], atol=1e-4)
        np.testing.assert_allclose(own.row + lane["at"], trace.y[order], atol=1e-6)
        for n, phrase in zip(order, own.phrases, strict=False):
            assert phrase in trace.hovertext[n]
        if not isinstance(trace.marker.color, str):
            assert own.colors == [trace.marker.color[n] for n in order]


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
    assert grid.zmax == 4


def test_the_steps_beside_a_long_one_are_paler_in_its_overview() -> None:
    step = planned_step(simulate("zb_h2", 4, 200).frame_in_a_row)
    (heat_map,) = [trace for trace in gantt([step]).data if trace.type == "heatmap"]
    kind = np.floor(np.asarray(heat_map.z, dtype=float)[0])  # of rank 0
    assert heat_map.zmax == 11  # three times three ops, several, and several beside it
    assert (kind[100], kind[300], kind[500]) == (10, 9, 10)
    assert heat_map.x0 < 0
    meta = packed(Drawing([step])).meta
    (cells,) = meta["cells"]
    kinds = [meta["kinds"][number] for number in cells["kinds"]]
    assert [own["name"] for own in kinds[:3]] == [own["name"] for own in kinds[3:6]]
    assert [own["opacity"] for own in kinds] == [1] * 3 + [PALE] * 6
    mostly, busy = (
        np.frombuffer(base64.b64decode(cells[key]), np.uint8)[:NUM_SLICES]
        for key in ("mostly", "busy")
    )
    np.testing.assert_array_equal(mostly[busy > 0], kind[~np.isnan(kind)])


def test_times_are_kept_to_a_millionth_of_the_step_or_finer() -> None:
    for end_ns, quantum_ns in ((500_000, 1), (10**7, 10), (10**9, 1000), (10**12, 1000)):
        step = spans().assign(start_ns=0, end_ns=end_ns)
        assert packed(Drawing([Step("", step)])).meta["quantum"] * MS == pytest.approx(quantum_ns)
