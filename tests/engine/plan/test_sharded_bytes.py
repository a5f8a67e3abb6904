"""Bytes of replicas, against the table of ZeRO's paper and against what rows say by hand."""

import pytest

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
from engine.plan.sharded_bytes import Level, TrainingBytes, kept_along, kept_bytes

GB = 10**9
ADAM = TrainingBytes(15 * GB, 15 * GB, 90 * GB)  # mixed precision: 2, 2 and 12 bytes a parameter
POLICIES = (
    NoCollectives(),
    DataParallel(),
    Zero1(),
    Zero2(),
    Zero2(every_backward=False),
    Zero3(),
    TorchWindow(),
)


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


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_replica_keeps_everything(policy):
    assert kept_bytes(ADAM, policy, 1) == ADAM


def test_what_cannot_be_divided_is_one_more_for_each():
    assert kept_bytes(TrainingBytes(7, 7, 8), Zero3(), 4) == (2, 2, 2)


STAGES = {0: TrainingBytes(100, 40, 200), 1: TrainingBytes(60, 20, 120)}


def levels(policy, name="interleaved_1f1b"):
    row = add_collectives(build_program(name, 1, 1, 2), policy).rows[0]
    return kept_along(row, STAGES, policy, 2)


def test_whole_gradients_come_with_the_first_backward_and_stay():
    expected = [480, 480, 480, 500, 500, 540, 540]  # 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD
    assert [level.kept_bytes for level in levels(DataParallel())] == expected
    assert [level.kept_bytes for level in levels(Zero1())] == [n - 160 for n in expected]


def test_gradients_are_summed_into_a_shard_that_is_there_beside_them():
    found = levels(Zero2())
    assert found[3:5] == [Level(340, 340), Level(330, 350)]
    assert found[5:] == [Level(370, 370), Level(350, 390)]


def test_a_stage_is_whole_from_its_unshard_to_its_reshard():
    # U 0F0 R of stage 0; U F B REDUCE R of stage 1; U 0B0 REDUCE R of stage 0
    expected = [240, 340, 340, 240, 300, 300, 320, 310, 250, 350, 390, 370, 270]
    assert [level.kept_bytes for level in levels(Zero3(1, 0))] == expected


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_at_the_end_of_a_row_all_that_is_left_is_what_a_replica_keeps(name, policy):
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    for rank, row in enumerate(
        (placed := add_collectives(build_program(name, 2, 4, v), policy)).rows
    ):
        stages = {stage: TrainingBytes(100, 40, 200) for stage in placed.placement.stages_of(rank)}
        found = kept_along(row, stages, policy, 4)
        kept = sum(sum(kept_bytes(whole, policy, 4)) for whole in stages.values())
        assert found[-1].kept_bytes == kept
        if (most := most_unsharded(policy)) is not None:
            assert max(found).kept_bytes <= kept + most * 100 + len(stages) * 40
