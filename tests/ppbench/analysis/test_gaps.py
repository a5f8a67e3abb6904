"""Why a rank idles, and the way back, against the simulator's own account of the same step."""

import pandas as pd
import pytest
from stored_runs import MS, spans

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.critical_path import critical_path as path_of_plan
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.simulate import Simulation, TransferModel, simulate, uniform
from ppbench.analysis.attribution import NONE, Cause, critical_path, gaps, moments, waits


def simulated(schedule: str, latency_ms: int, ranks: int = 4, microbatches: int = 8) -> Simulation:
    program = build_program(schedule, ranks, microbatches)
    transfers = TransferModel(latency_ns=latency_ms * MS, message_bytes=10)
    return simulate(program, uniform(program.placement, 10 * MS, 8 * MS, 7 * MS), transfers)


@pytest.mark.parametrize("latency_ms", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gaps_and_computations_fill_every_rank_without_overlap(schedule, latency_ms):
    step = pd.DataFrame(simulated(schedule, latency_ms).spans())
    result = waits(step)
    end = result.spans["end_ns"].max()
    pieces = [
        gaps(result)[["rank", "start_ns", "end_ns"]],
        result.spans[["rank", "start_ns", "end_ns"]],
    ]
    for _, filled in pd.concat(pieces).sort_values("start_ns").groupby("rank"):
        assert filled["start_ns"].iloc[0] == result.spans["start_ns"].min()
        assert filled["end_ns"].iloc[-1] == end
        assert (
            filled["start_ns"].iloc[1:].to_numpy() == filled["end_ns"].iloc[:-1].to_numpy()
        ).all()


@pytest.mark.parametrize("latency_ms", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_critical_path_of_spans_is_that_of_the_plan(schedule, latency_ms):
    simulation = simulated(schedule, latency_ms)
    result = waits(pd.DataFrame(simulation.spans()))
    rows = result.spans.iloc[critical_path(result)]
    walked = [Action(row.stage, Op(row.op), row.microbatch) for row in rows.itertuples()]
    assert walked == [a for a in path_of_plan(simulation) if a.op in COMPUTE_OPS]


def test_a_plan_with_free_transfers_waits_for_stages_alone():
    result = gaps(waits(pd.DataFrame(simulated("1f1b", 0).spans())))
    assert set(result["cause"]) == {Cause.STAGE, Cause.NO_WORK}


def told(step: pd.DataFrame) -> list[tuple]:
    columns = ["rank", "cause", "start_ns", "end_ns"]
    result = gaps(waits(step))
    return [
        (r, Cause(c).name, s // MS, e // MS)
        for r, c, s, e in result[columns].itertuples(index=False)
    ]


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


def test_what_was_made_before_the_rank_was_free_did_not_keep_it_waiting():
    result = waits(pd.DataFrame(simulated("afab", 0).spans()))
    free, made, arrived, start = moments(result)
    assert (free <= made).all()
    assert (made <= arrived).all()
    assert (arrived <= start).all()
    assert (result.before == NONE).sum() == 4


def test_a_step_of_one_rank_has_no_makers():
    alone = spans()[lambda frame: (frame["rank"] == 0) & frame["op"].isin(["F", "B"])]
    result = waits(alone)
    assert (result.maker == NONE).all()
    assert told(alone) == [(0, "HOST", 15, 41)]
