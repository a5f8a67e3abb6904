"""Bytes of replicas, against the table of ZeRO's paper and against what rows say by hand."""

import pytest
from drawn_programs import POLICIES, small_program

from engine.plan.action import Op
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    add_collectives,
    most_unsharded,
)
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.sharded_bytes import (
    ActionBytes,
    BucketBytes,
    SharedBytes,
    TrainingBytes,
    changes_along,
    kept_bytes,
)

GB = 10**9
ADAM = TrainingBytes(15 * GB, 15 * GB, 90 * GB)  # mixed precision: 2, 2 and 12 bytes a parameter


@pytest.mark.parametrize(
    ("policy", "gigabytes"),
    [
        (DataParallel(), 120),
        (Zero1(), 31.4),
        (Zero2(), 16.6),
        (Zero3(), 1.88),
        (TorchWindow(), 1.88),
    ],
)
def test_a_model_of_7_5_billion_on_64_replicas_takes_what_the_paper_says(policy, gigabytes):
    """Figure 1 of arXiv 1910.02054."""
    assert sum(kept_bytes(ADAM, policy, 64)) / GB == pytest.approx(gigabytes, rel=0.005)


def test_one_replica_keeps_everything_and_what_cannot_be_divided_is_one_more_for_each():
    assert {kept_bytes(ADAM, policy, 1) for policy in POLICIES} == {ADAM}
    assert kept_bytes(TrainingBytes(7, 7, 8), Zero3(), 4) == (2, 2, 2)


def buckets(policy, stages=(0, 1), replicas=2):
    """One of each stage, of 100 bytes padded, or 60; gradients as they are."""
    has_shards = isinstance(policy, Zero2) or most_unsharded(policy) is not None
    wholes = {0: (100, (50, 46)), 1: (60, (58,))}
    return [
        BucketBytes(
            frozenset([stage]), whole, whole // replicas if has_shards else whole, gradients
        )
        for stage in stages
        for whole, gradients in [wholes[stage % 2]]
    ]


def changes(policy, num_microbatches=1, waiting=()):
    """Of 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD, and of what follows."""
    program = build_program("interleaved_1f1b", 1, num_microbatches, 2)
    row = add_collectives(program, policy).actions[0]
    return changes_along(row, SharedBytes(buckets(policy), waiting))


def test_each_collective_changes_what_is_there_by_what_it_makes_and_lets_go():
    still, first, second = ActionBytes(0, 0), ActionBytes(58, 58), ActionBytes(96, 96)
    # A flat tensor is there beside gradients, and takes their place.
    summed = [still, still, first, ActionBytes(60, 2), second, ActionBytes(100, 4), still]
    assert changes(DataParallel()) == changes(Zero1()) == summed
    # Without collectives all is summed after the row.
    assert changes(NoCollectives()) == [still, still, first, second, ActionBytes(100, 4 + 2)]
    # What a shard of the sum was made of goes when the next is begun.
    after = [second, ActionBytes(100, 100 - 96 + 50 - 60), ActionBytes(0, -100)]
    assert changes(Zero2()) == [*summed[:3], ActionBytes(60, 60 - 58 + 30), *after]
    # Of two reductions the first is not done when the second begins: both go at the end.
    lagging = changes(Zero2(), waiting=(0, 1))
    assert lagging[-2:] == [ActionBytes(100, 100 - 96 + 50), ActionBytes(0, -160)]
    # U 0F0 R of stage 0; U F B REDUCE R of stage 1; U 0B0 REDUCE R
    nets = [100, 0, -100, 60, 0, 58, 32, -60, 100 - 60, 96, 54, -100, -100]
    assert [change.net_bytes for change in changes(Zero3(1, 0))] == nets


def test_what_two_stages_have_in_common_is_gathered_once_and_freed_with_the_last():
    row = add_collectives(build_program("zbv", 1, 1, 2), Zero3(2, 1)).actions[0]
    shared = [BucketBytes(frozenset([0, 1]), 100, 50, (100,))]
    gathered = [
        change.net_bytes
        for action, change in zip(row, changes_along(row, SharedBytes(shared)), strict=False)
        if action.op in (Op.UNSHARD, Op.RESHARD)
    ]
    assert sorted(gathered) == [-100, 0, 0, 100]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_after_a_row_only_the_sums_are_left(policy):
    for name in SCHEDULES:
        placed = add_collectives(small_program(name), policy)
        for rank, row in enumerate(placed.actions):
            shared = buckets(policy, placed.placement.stages_of(rank), 4)
            left = sum(change.net_bytes for change in changes_along(row, SharedBytes(shared)))
            assert left == sum(bucket.sum_bytes for bucket in shared)
