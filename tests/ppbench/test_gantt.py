"""The Gantt chart, from spans made by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
from stored_runs import ACTIONS, MS, spans, traces

from engine.plan.action import Op
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import simulate, uniform
from ppbench.report.gantt import gantt
from ppbench.report.palette import LIGHTEST, OP_COLORS, OP_WORDS, tinted


def test_a_gantt_has_one_bar_trace_per_op_whatever_the_number_of_spans() -> None:
    many = pd.concat([spans().assign(microbatch=n) for n in range(300)], ignore_index=True)
    few = gantt(spans(), "few")
    assert len(gantt(many, "many").data) == len(few.data)
    ops = {OP_WORDS[op] for _, _, op, *_ in ACTIONS}
    assert set(traces(few)) == ops | {"idle"}
    assert {trace.type for trace in few.data} == {"bar"}
    assert not few.layout.shapes
    assert not few.layout.annotations


def test_gantt_bars_start_and_last_as_measured_in_ms_since_the_first_action() -> None:
    forward = traces(gantt(spans(), ""))["forward"]
    np.testing.assert_array_equal(forward.base, [0.0, 12.0])
    np.testing.assert_array_equal(forward.x, [10.0, 10.0])
    backward = traces(gantt(spans(late_ms=700), ""))["backward"]
    np.testing.assert_array_equal(backward.base, [36.0, 22.0])
    np.testing.assert_array_equal(backward.x, [20.0, 12.0])
    np.testing.assert_array_equal(backward.customdata[:, 5], [20.0, 12.0])  # for hovering


def test_a_transfer_begins_when_both_sides_are_ready() -> None:
    drawn = traces(gantt(spans(), ""))
    receive, send = drawn["receive activations"], drawn["send activations"]
    assert receive.base[0] == send.base[0] == 10.0  # posted at 1, but sent at 10
    assert receive.x[0] == 2.0
    assert receive.customdata[0][3] == 9.0  # ms that the receiver had waited
    assert send.customdata[0][3] == 0.0


def test_rank_0_is_on_top_and_transfers_lie_in_thin_lanes_below_compute() -> None:
    figure = gantt(spans(), "")
    low, high = figure.layout.yaxis.range
    assert low > high  # y grows downwards, so rank 0 is on top
    words = [re.sub("<.*?>", "", text) for text in figure.layout.yaxis.ticktext]
    assert words == ["rank 0", "send", "recv", "rank 1", "send", "recv"]
    drawn = traces(figure)
    compute, send, recv = (
        drawn[name].y[0] for name in ("forward", "send activations", "receive gradients")
    )
    assert compute < send < recv < compute + 1
    assert drawn["send activations"].width < drawn["forward"].width / 2


def test_the_grey_left_uncovered_is_the_step_without_its_optimizer() -> None:
    idle = traces(gantt(spans(), ""))["idle"]
    np.testing.assert_array_equal(idle.x, [56.0, 56.0])


def test_compute_bars_carry_their_microbatch_and_hovering_tells_the_rest() -> None:
    drawn = traces(gantt(spans(), ""))
    assert list(drawn["forward"].text) == ["0", "0"]
    assert drawn["optimizer"].text is None
    for word in ("rank", "stage", "microbatch", "start", "duration"):
        assert word in drawn["forward"].hovertemplate
    assert "KiB" in drawn["send gradients"].hovertemplate
    assert drawn["send gradients"].customdata[0][4] == 4.0
    assert "stage" not in drawn["optimizer"].hovertemplate


def test_a_single_rank_without_transfers_is_drawn() -> None:
    alone = spans()
    alone = alone[(alone["rank"] == 0) & (alone["lane"] == "compute")]
    assert set(traces(gantt(alone, ""))) == {"forward", "backward", "optimizer", "idle"}


def test_arrays_are_typed_so_that_thousands_of_spans_stay_small() -> None:
    text = gantt(spans(), "").to_json(engine="json")
    assert all("bdata" in trace["x"] for trace in json.loads(text)["data"])


def test_each_further_stage_of_a_rank_is_drawn_in_a_lighter_colour():
    program = build_program("zbv", 2, 4)
    spans = pd.DataFrame(simulate(program, uniform(program.placement, MS, MS, MS)).spans())
    (forward,) = [bar for bar in gantt(spans, "").data if bar.name == "forward"]
    stages = forward.customdata[:, 1]
    by_stage = {int(s): c for s, c in zip(stages, forward.marker.color, strict=True)}
    assert by_stage[0] == by_stage[1] == tinted(OP_COLORS[Op.F], 0)
    assert by_stage[2] == by_stage[3] == tinted(OP_COLORS[Op.F], LIGHTEST)
