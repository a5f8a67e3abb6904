"""Joined replicas with known costs, and random spans: every part is named, and they add up."""

import random

import pandas as pd
import pytest

from engine.plan.action import COMPUTE_OPS, JOINING_OPS, SEND_OPS, Op
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    Zero2,
    Zero3,
    with_collectives,
    with_sums_of_copies,
)
from engine.plan.lower import lower
from engine.plan.predict import timed
from engine.plan.program import from_csv
from engine.plan.schedules.registry import build_program
from engine.plan.spans import Lane, Span
from ppbench.analysis.attribution import PHASES, REPLICA_PARTS, attribute, figures_of, parts_in
from ppbench.analysis.collectives import collective_figures, collectives
from ppbench.analysis.job_times import times_of
from ppbench.analysis.metrics import rank_figures, step_figures, windows
from ppbench.analysis.transfers import edges, messages, waiting_ns
from ppbench.analysis.waits import Cause, Spans, gaps, waits

MS = 1_000_000
GATHER_MS, REDUCE_MS, FACTOR = 10, 20, 1.2
F_MS, B_MS = 10, 20


def lowered_of(policy, name="1f1b", world_size=4, num_microbatches=8):
    program = build_program(name, world_size, num_microbatches)
    return with_collectives(lower(program), program, policy)


def steps_of(lowered, duration_ns, moving_ns, num_replicas, num_steps=4):
    """Spans of some steps; both are asked with the action and the replica."""
    frames = []
    actions = [action for row in lowered.actions for action in row]
    for step in range(num_steps):
        times = [
            [
                duration_ns(a, d)
                if a.op in COMPUTE_OPS | SEND_OPS
                else moving_ns(a, d) * (a.op in JOINING_OPS)
                for a in actions
            ]
            for d in range(num_replicas)
        ]
        frame = pd.DataFrame(timed(lowered, times).spans())
        frames.append(frame.assign(step=step))
    return pd.concat(frames, ignore_index=True)


def step_ns_of(spans, world_size):
    numbers = dict.fromkeys(spans["step"].unique(), 1)
    steps = step_figures(spans, windows(spans, world_size), numbers)
    return steps.set_index("step")["step_ns"]


def truth(factors, gather_ms=GATHER_MS, reduce_ms=REDUCE_MS):
    """What each action takes on replicas that are this much slower, and each collective."""
    drawn = random.Random(1)

    def duration_ns(action, replica):
        ms = {Op.F: F_MS, Op.B: B_MS}.get(action.op, 0)
        return round(ms * MS * factors[replica] * drawn.uniform(0.999, 1.001))

    def moving_ns(action, _replica):
        return (gather_ms if action.op is Op.UNSHARD else reduce_ms) * MS

    return duration_ns, moving_ns, len(factors)


def test_gather_reduce_and_a_slow_replica_are_each_named_within_a_tenth():
    lowered = lowered_of(Zero3())
    mean = (3 + FACTOR) / 4

    def measured(*args):
        spans = steps_of(lowered, *truth(*args))
        return spans, step_ns_of(spans, 4)

    spans, steps = measured((1, 1, FACTOR, 1))
    alike_ns = measured((mean,) * 4)[1].mean()
    free_ns = measured((mean,) * 4, 0, 0)[1].mean()
    found = attribute(spans, lowered, windows(spans, 4))
    parts = found.rows[list(REPLICA_PARTS)].mean()
    assert parts["collective_ns"] == pytest.approx(alike_ns - free_ns, rel=0.1)
    assert parts["skew_ns"] == pytest.approx(steps.mean() - alike_ns, rel=0.1)
    assert abs(parts["launch_gap_ns"]) < 1
    figures = collective_figures(found.collectives).groupby("op")["moving_ns"].mean()
    assert figures["UNSHARD"] == pytest.approx(GATHER_MS * MS, rel=0.1)
    assert figures["REDUCE_GRAD"] == pytest.approx(REDUCE_MS * MS, rel=0.1)
    forwards = [own.by_stage[Op.F][0] / (F_MS * MS) for own in found.replicas.own]
    assert forwards == pytest.approx([1, 1, FACTOR, 1], rel=0.1)


def test_the_sums_of_copies_are_named_where_one_replica_has_each_stage_on_two_ranks():
    lowered = with_sums_of_copies(lower(build_program("chimera", 4, 8)))
    spans = steps_of(lowered, *truth((1,)))
    free = steps_of(lowered, *truth((1,), reduce_ms=0))
    found = attribute(spans, lowered, windows(spans, 4))
    assert parts_in(found.rows) == tuple(part for part in REPLICA_PARTS if part != "skew_ns")
    parts = found.rows[list(parts_in(found.rows))].mean()
    added_ns = step_ns_of(spans, 4).mean() - step_ns_of(free, 4).mean()
    assert added_ns == pytest.approx(2 * REDUCE_MS * MS, rel=0.01)
    assert parts["collective_ns"] == pytest.approx(added_ns, rel=0.02)
    assert parts.sum() == pytest.approx(found.rows["idle_ns"].mean())
    assert abs(parts["launch_gap_ns"]) < 1
    figures = collective_figures(found.collectives)
    assert sorted(figures["stage"]) == list(range(8))
    assert figures["moving_ns"].tolist() == pytest.approx([REDUCE_MS * MS] * 8, rel=0.01)
    times = times_of(spans.assign(waiting_ns=0), lowered)
    sums = times.ns[..., times.columns.of_ops([Op.REDUCE_GRAD])]
    assert sums.min() == sums.max() == REDUCE_MS * MS


def test_replicas_that_chance_alone_tells_apart_have_no_skew():
    spans = steps_of(lowered := lowered_of(DataParallel()), *truth((1, 1, 1)))
    assert attribute(spans, lowered, windows(spans, 4)).rows["skew_ns"].abs().max() == 0


@pytest.mark.parametrize("policy", [NoCollectives(), DataParallel(), Zero2(), Zero3()])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "afab"])
def test_parts_and_phases_of_random_spans_add_up_for_each_replica_rank_and_step(name, policy):
    drawn = random.Random(name)
    lowered = lowered_of(policy, name, 2, 4)
    times = (lambda _a, _d: drawn.randrange(1, 20_000), lambda _a, _d: drawn.randrange(9_000))
    spans = steps_of(lowered, *times, 3)
    spans["end_ns"] += [drawn.randrange(50) for _ in range(len(spans))]  # overlaps: no model of it
    steps = step_ns_of(spans, 2)
    of_ranks = windows(spans, 2)
    found = attribute(spans, lowered, of_ranks)
    compute = spans[spans["lane"] == "compute"]
    keys = ["step", "replica", "rank"]
    busy = (compute["end_ns"] - compute["start_ns"]).groupby([compute[key] for key in keys]).sum()
    rows = found.rows.set_index(keys).sort_index()
    idle = steps.loc[rows.index.get_level_values("step")].to_numpy() - busy.loc[rows.index]
    assert len(rows) == 4 * 3 * 2
    assert rows["idle_ns"].tolist() == idle.tolist()
    assert rows[list(REPLICA_PARTS)].sum(axis=1).tolist() == idle.tolist()
    assert rows[list(PHASES)].sum(axis=1).tolist() == idle.tolist()
    shares = figures_of(found, spans, of_ranks, steps)
    named = [shares[f"bubble_{part.removesuffix('_ns')}"] for part in REPLICA_PARTS]
    assert sum(named) == pytest.approx(shares["bubble_mean"])


def test_a_collective_waits_for_the_slowest_replica_and_then_moves():
    rows = [(0, 10, 40), (1, 25, 40), (0, 50, 60), (1, 45, 61)]
    spans = pd.DataFrame(
        Span(1, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, -1, start, end, 8, replica)
        for replica, start, end in rows
    )
    assert collectives(spans).sort_index()["number"].tolist() == [0, 0, 1, 1]
    assert waiting_ns(spans).tolist() == [15, 0, 0, 5]
    first, second = collective_figures(collectives(spans)).to_dict("records")
    assert (first["waiting_ns"], first["moving_ns"]) == (7.5, (15 + 10) / 2)
    assert (second["num_collectives"], second["bytes_per_s"]) == (2, 16 / (26 / 1e9))


def test_messages_are_matched_within_a_replica_and_figures_count_all_ranks():
    lowered = lowered_of(NoCollectives(), "1f1b", 2, 2)
    took = (lambda a, d: (100 if a.op in SEND_OPS else 1000) * (d + 1), lambda _a, _d: 0)
    spans = steps_of(lowered, *took, 2, 1)
    moved = messages(spans)
    assert (moved["moving_ns"] == 100 * (moved["replica"] + 1)).all()
    assert edges(moved)["num_messages"].tolist() == [2] * 4
    steps = step_figures(spans, windows(spans, 2), {0: 1})
    step_ns = steps["step_ns"].iloc[0]
    assert steps["bubble_fraction"].iloc[0] == pytest.approx(1 - 2 * 12_000 / (4 * step_ns))
    ranks = rank_figures(spans, windows(spans, 2))
    assert ranks["replica"].tolist() == [0, 0, 1, 1]
    assert ranks["compute_ns"].tolist() == [4000, 4000, 8000, 8000]


def gathered_steps():
    """Two replicas of one rank: the second comes to its gather 4 ms after the first."""
    rows = [
        (0, Lane.COLLECTIVE, Op.UNSHARD, -1, 0, 12),
        (1, Lane.COLLECTIVE, Op.UNSHARD, -1, 4, 12),
        *((d, Lane.COMPUTE, Op.F, 0, 13, 20) for d in (0, 1)),
        *((d, Lane.COMPUTE, Op.B, 0, 20, 34) for d in (0, 1)),
    ]
    return pd.DataFrame(
        Span(0, 0, lane, 0, op, microbatch, start * MS, end * MS, 0, replica)
        for replica, lane, op, microbatch, start, end in rows
    )


def test_a_step_begins_when_all_replicas_have_come_to_its_first_gather():
    spans = gathered_steps()
    assert step_ns_of(spans, 1).tolist() == [30 * MS]
    program = from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n", "one")
    (measured,) = times_of(spans.assign(waiting_ns=0), program, 2).measured_ns
    assert measured == 30 * MS
    found = attribute(spans, program, windows(spans, 1)).rows
    assert found["idle_ns"].tolist() == [9 * MS] * 2
    assert found["collective_ns"].tolist() == [8 * MS] * 2
    assert found["warmup_ns"].tolist() == [9 * MS] * 2
    late = spans[spans["replica"] == 1].reset_index(drop=True)
    pieces = gaps(waits(Spans.of(late), begin_ns=4 * MS))
    causes = [Cause(cause) for cause in pieces.cause]
    assert list(zip(causes, pieces.start_ns // MS, pieces.end_ns // MS, strict=True)) == [
        (Cause.GATHER, 4, 12),
        (Cause.HOST, 12, 13),
    ]
