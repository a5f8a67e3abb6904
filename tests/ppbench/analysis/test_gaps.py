"""Why a rank idles, and the way back, against the simulator's own account of the same step."""

import numpy as np
import pandas as pd
import pytest
from stored_runs import MS, spans

from engine.plan.action import COMPUTE_OPS, NO_INDEX, OPS, Action, Op
from engine.plan.predict import WalkedStep, predict, uniform
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.spans import Lane, Span
from engine.plan.walk import TransferModel
from ppbench.analysis.waits import NONE, Cause, Spans, critical_path, gaps, moments, waits


def simulated(schedule: str, latency_ms: int, ranks: int = 4, microbatches: int = 8) -> WalkedStep:
    program = build_program(schedule, ranks, microbatches)
    transfers = TransferModel(latency_ns=latency_ms * MS, message_bytes=10)
    return predict(program, uniform(program.placement, 10 * MS, 8 * MS, 7 * MS), transfers)


def spans_of(simulation: WalkedStep) -> Spans:
    return Spans.of(pd.DataFrame(simulation.spans()))


@pytest.mark.parametrize("latency_ms", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gaps_and_computations_fill_every_rank_without_overlap(schedule, latency_ms):
    result = waits(spans_of(simulated(schedule, latency_ms)))
    pieces = gaps(result), result.spans
    rank, start, end = (
        np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("rank", "start_ns", "end_ns")
    )
    for number in range(4):
        own = np.flatnonzero(rank == number)
        own = own[np.argsort(start[own])]
        assert start[own[0]] == result.spans.start_ns.min()
        assert end[own[-1]] == result.spans.end_ns.max()
        assert (start[own[1:]] == end[own[:-1]]).all()


@pytest.mark.parametrize("latency_ms", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_critical_path_of_spans_is_that_of_the_plan(schedule, latency_ms):
    simulation = simulated(schedule, latency_ms)
    result = waits(spans_of(simulation))
    path = result.spans.at(critical_path(result))
    ops = [OPS[code] for code in path.op]
    walked = list(map(Action, path.stage.tolist(), ops, path.microbatch.tolist()))
    assert walked == [a for a in simulation.critical_path() if a.op in COMPUTE_OPS]


def told(step: pd.DataFrame) -> list[tuple]:
    result = gaps(waits(Spans.of(step)))
    causes = [Cause(cause).name for cause in result.cause]
    return list(zip(result.rank, causes, result.start_ns // MS, result.end_ns // MS, strict=True))


def test_a_gap_is_cut_where_its_input_was_made_and_where_that_arrived():
    # Rank 0 computes 5 to 15 and from 41; rank 1 makes the gradient until 39, it comes at 41.
    assert told(spans()) == [
        (0, "STAGE", 15, 39),
        (0, "TRANSFER", 39, 41),
        (1, "STAGE", 5, 15),
        (1, "TRANSFER", 15, 17),
        (1, "NO_WORK", 39, 61),
    ]


def test_a_rank_that_has_everything_and_does_not_begin_waits_for_its_host():
    late = spans()
    is_backward = (late["rank"] == 0) & (late["op"] == "B")
    late.loc[is_backward, ["start_ns", "end_ns"]] += 4 * MS
    assert (0, "HOST", 41, 45) in told(late)


def test_parameters_that_come_after_the_input_cut_the_gap_once_more():
    late = spans()
    is_backward = (late["rank"] == 0) & (late["op"] == "B")
    late.loc[is_backward, ["start_ns", "end_ns"]] += 4 * MS
    gathered = Span(1, 0, Lane.COLLECTIVE, 0, Op.UNSHARD, NO_INDEX, 16 * MS, 43 * MS, 0)
    reduced = Span(1, 1, Lane.COLLECTIVE, 1, Op.REDUCE_GRAD, NO_INDEX, 40 * MS, 70 * MS, 0)
    step = pd.concat([late, pd.DataFrame([gathered, reduced])], ignore_index=True)
    found = told(step)
    assert found[1:4] == [(0, "TRANSFER", 39, 41), (0, "GATHER", 41, 43), (0, "HOST", 43, 45)]
    assert found[4:] == [
        (0, "NO_WORK", 65, 70),
        (1, "STAGE", 5, 15),
        (1, "TRANSFER", 15, 17),
        (1, "REDUCE", 39, 70),
    ]


def test_what_was_made_before_the_rank_was_free_did_not_keep_it_waiting():
    result = waits(spans_of(simulated("afab", 0)))
    free, made, arrived, gathered, start = moments(result)
    assert (free <= made).all()
    assert (made <= arrived).all()
    assert (arrived == gathered).all()  # there is no collective
    assert (gathered <= start).all()
    assert (result.before == NONE).sum() == 4


def test_a_step_of_one_rank_has_no_makers():
    alone = spans()[lambda frame: (frame["rank"] == 0) & frame["op"].isin(["F", "B"])]
    result = waits(Spans.of(alone))
    assert (result.maker == NONE).all()
    assert told(alone) == [(0, "HOST", 15, 41)]
