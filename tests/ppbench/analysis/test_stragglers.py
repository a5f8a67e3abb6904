"""Stragglers of made-up jobs are named, and their cost is the one that was built in."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from samples import sampled

from benchmarks.made_up_jobs import KINDS, Shape, durations, make, named, walked
from engine.plan.action import RECV_OPS, SEND_OPS, Op
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero2, Zero3
from engine.plan.lower import lower
from engine.plan.period import with_end
from engine.plan.predict import timed
from engine.plan.schedules.registry import build_program
from engine.plan.spans import Span, lane_of
from engine.plan.walk import walk
from ppbench.analysis.job_times import Columns, JobTimes, times_of
from ppbench.analysis.running import Following
from ppbench.analysis.stragglers import Kind, stragglers_of

SMALL = Shape(ranks=4, microbatches=6, replicas=5, num_steps=2)
POLICIES = [NoCollectives(), DataParallel(), Zero2(), Zero3(1, 0)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_times_that_are_replayed_give_the_steps_that_they_were_taken_from(schedule, policy):
    shape = replace(SMALL, schedule=schedule, policy=policy, microbatches=8, noise=0.3)
    walk = walked(shape, durations(shape, np.random.default_rng(0)))

    times = times_of(walk.spans().sample(frac=1, random_state=0), shape.lowered, shape.replicas)

    (steps_ns,) = times.steps_ns([times.ns])
    assert steps_ns.tolist() == walk.step_ns.tolist()
    assert times.measured_ns.tolist() == walk.step_ns.tolist()


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("policy", [*POLICIES, TorchWindow(1)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("schedule", ["afab", "1f1b", "zbv", "looped_bfs"])
def test_all_steps_at_once_take_as_long_as_each_of_them_alone(schedule, policy, replicas):
    lowered = replace(SMALL, schedule=schedule, policy=policy, microbatches=8).lowered
    columns, zeros = Columns(with_end(lowered, meets=True, has_optimizer=False)), np.zeros(4, int)
    is_meeting = columns.of_ops([Op.NORM])
    ns = np.random.default_rng(1).integers(0, 10**6, (4, replicas, len(columns.actions)))
    ns[..., is_meeting] = 0

    alone = [
        timed(lowered, [array("q", one.tobytes()) for one in step]).makespan_ns
        for step in ns[..., ~is_meeting]
    ]

    (steps_ns,) = JobTimes(columns, ns, range(4), zeros, zeros).steps_ns([ns])
    assert steps_ns.tolist() == alone


def steps_in_a_row(program, ns, replicas):
    """Spans of steps of times `ns` from 0 ns on, each rank going on when it is done."""
    ended = with_end(program, meets=False)
    columns, spans = Columns(ended), []
    took = np.moveaxis(ns, 1, 0)
    walked = walk(ended, [array("q", one.tobytes()) for one in took])
    for replica, step in itertools.product(range(replicas), range(len(ns))):
        times = (walked.of_step(of, replica, step) for of in (walked.starts_ns, walked.ends_ns))
        for at, (start, end) in enumerate(zip(*times, strict=True)):
            stage, op, microbatch = columns.actions[at]
            if op is not Op.RESHARD:
                place = step + 7, int(columns.rank[at]), lane_of(op), stage, op, microbatch
                spans.append(Span(*place, start, end, 0, replica))
    return pd.DataFrame(spans)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "zbv"])
def test_steps_in_a_row_are_replayed_as_long_as_they_were_all_together(schedule, policy):
    shape = replace(SMALL, schedule=schedule, policy=policy, microbatches=8, replicas=2)
    columns = Columns(with_end(shape.lowered, meets=False))
    ns = np.random.default_rng(2).integers(10, 1000, (3, 2, len(columns.actions)))
    ns[..., columns.of_ops([*RECV_OPS, Op.RESHARD])] = 0
    spans = steps_in_a_row(shape.lowered, ns, 2)
    whole = spans["end_ns"].max()
    following = Following((1,) * shape.ranks, meets=False)

    times = times_of(spans, shape.lowered, 2, following)

    (steps_ns,) = times.steps_ns([times.ns])
    assert steps_ns.sum() == whole
    assert times.measured_ns.tolist() == [whole]
    assert stragglers_of(times).step_ns == whole / 3
    # A pause between steps is no part of them: each is a row of its own.
    late = spans.assign(step=2 * spans["step"])
    assert len(times_of(late, shape.lowered, 2, following).measured_ns) == 3
    in_turns = times_of(spans, shape.lowered, 2, following, after_pause=[spans["step"].max()])
    assert in_turns.firsts == [0, 2]


def test_a_slow_optimizer_costs_what_the_next_steps_lose_by_it():
    shape = replace(SMALL, schedule="zb_h2", microbatches=8, replicas=2, policy=NoCollectives())
    columns = Columns(with_end(shape.lowered, meets=False))
    ns = np.full((3, 2, len(columns.actions)), 1000)
    ns[..., columns.of_ops([*RECV_OPS, *SEND_OPS])] = 0
    is_optimizer = columns.of_ops([Op.OPT])
    slow = ns + 5000 * (is_optimizer & (columns.rank == 2)) * np.array([[0], [1]])
    last, usual = (steps_in_a_row(shape.lowered, each, 2)["end_ns"].max() for each in (slow, ns))

    following = Following((1000,) * shape.ranks, meets=False)
    times = times_of(steps_in_a_row(shape.lowered, slow, 2), shape.lowered, 2, following)
    found = stragglers_of(times)

    assert last > usual
    assert found.step_ns == last / 3
    assert found.ideal_ns == usual / 3
    assert named(found.cause) == ("worker", 1, 2)
    assert found.cause.cost_ns == pytest.approx((last - usual) / 3)


def test_slices_that_differ_make_nobody_slow():
    program = lower(build_program("seq1f1b", 2, 4, slices=(0.25, 0.75)))
    columns = Columns(with_end(program, meets=False))
    ns = np.where(columns.is_compute, 1000 + 2000 * (columns.microbatch % 2), 0)
    following = Following((0, 0), meets=False)
    spans = steps_in_a_row(program, np.broadcast_to(ns, (3, 2, len(ns))), 2)
    found = stragglers_of(times_of(spans, program, 2, following))
    assert (found.slowness, found.cause) == (1, None)


@pytest.mark.parametrize("seed", sampled(range(18), 6))
def test_the_cause_of_slowness_is_named_and_its_size_is_known(seed):
    rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    shape = Shape(schedule=("1f1b", "afab", "zb_h1")[seed // len(KINDS)], policy=POLICIES[seed % 4])
    job = make(shape, kind, rng)

    found = stragglers_of(times_of(job.walk.spans(), shape.lowered, shape.replicas))

    assert named(found.cause) == job.culprit
    assert found.slowness == pytest.approx(job.slowness, rel=0.01)
    assert found.wasted == pytest.approx(1 - 1 / job.slowness, abs=0.01)
    if found.cause is not None:
        assert found.cause.share == pytest.approx(job.cost, abs=0.02)
    assert (found.correlation > 0.5) == (kind == "lengths")


def test_a_slow_worker_stands_out_in_every_figure_that_it_is_part_of():
    shape = replace(SMALL, replicas=16)
    job = make(shape, "worker", np.random.default_rng(3))
    _, replica, rank = job.culprit

    found = stragglers_of(times_of(job.walk.spans(), shape.lowered, shape.replicas))

    worst = found.by_worker.nlargest(1, "slowness").iloc[0]
    assert (worst["replica"], worst["rank"]) == (replica, rank)
    assert found.by_replica.nlargest(1, "slowness").iloc[0]["replica"] == replica
    assert found.by_stage.nlargest(1, "slowness").iloc[0]["rank"] == rank
    assert worst["slowness"] == pytest.approx(found.slowness, rel=0.05)
    assert found.worst_workers > 0.7
    assert found.by_worker["share"].sum() == pytest.approx(1)


def test_a_slow_last_rank_explains_the_slowness():
    shape = replace(SMALL, noise=0.0)
    ns = durations(shape, np.random.default_rng(0))
    last = shape.ranks - 1
    walk = walked(shape, ns, lambda action, rank: 1.5 if action.op is Op.B and rank == last else 1)

    found = stragglers_of(times_of(walk.spans(), shape.lowered, shape.replicas))

    assert found.cause is not None
    assert (found.cause.kind, found.cause.index) == (Kind.STAGE, last)
    assert found.last_stage == pytest.approx(1)
    assert found.by_op.set_index("op")["slowness"].idxmax() == "B"


def test_reductions_that_are_long_now_and_then_are_named_by_their_op():
    shape, rng = replace(SMALL, num_steps=20, noise=0.01), np.random.default_rng(0)
    is_long = rng.random((shape.num_steps, 1)) < 0.3
    walk = walked(
        shape,
        durations(shape, rng),
        lambda action, _: 1 + 40 * is_long if action.op is Op.REDUCE_GRAD else 1,
    )

    found = stragglers_of(times_of(walk.spans(), shape.lowered, shape.replicas))

    assert found.cause is not None
    assert (found.cause.kind, found.cause.op) == (Kind.OP, Op.REDUCE_GRAD)


@pytest.mark.parametrize("policy", [Zero2(), Zero3(1, 0), TorchWindow(1)], ids=repr)
def test_collectives_that_a_library_placed_its_own_way_are_taken_from_the_spans(policy):
    shape = replace(SMALL, policy=policy, schedule="looped_bfs", microbatches=8)
    walk = walked(shape, durations(shape, np.random.default_rng(0)))
    expected = replace(shape, policy=DataParallel()).lowered

    times = times_of(walk.spans(), expected, shape.replicas)

    of_both = (
        [a for row in program.actions for a in row if a.op not in (Op.RESHARD, Op.NORM)]
        for program in (shape.lowered, times.columns.program)
    )
    assert len(set(map(len, of_both))) == 1
    (steps_ns,) = times.steps_ns([times.ns])
    assert steps_ns == pytest.approx(walk.step_ns, rel=1e-3)


def test_collectives_that_differ_between_steps_are_left_out():
    spans = walked(SMALL, durations(SMALL, np.random.default_rng(0))).spans()
    is_gone = (spans["op"] == "REDUCE_GRAD") & (spans["step"] == 1) & (spans["stage"] == 2)

    times = times_of(spans[~is_gone], SMALL.lowered, SMALL.replicas)

    assert not times.columns.program.has_collectives
    assert len(times.ns) == SMALL.num_steps


def test_a_step_without_a_computation_is_refused_by_its_name():
    walk = walked(SMALL, durations(SMALL, np.random.default_rng(0)))
    spans = walk.spans()
    is_gone = (spans["op"] == "F") & (spans["stage"] == 2) & (spans["replica"] == 3)

    with pytest.raises(KeyError, match="Action"):
        times_of(spans[~is_gone], SMALL.lowered, SMALL.replicas)
