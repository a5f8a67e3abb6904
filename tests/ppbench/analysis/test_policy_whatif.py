"""What replicas would take under another policy, against the planned step of that policy's case."""

from dataclasses import replace

import pytest

from engine.plan.action import Op
from engine.plan.lower import Policy
from ppbench.analysis.costs import Costs
from ppbench.analysis.policy_whatif import EARLIER, other_sharing
from ppbench.analysis.replicas import ReplicaCosts
from ppbench.analysis.whatif import (
    Inapplicable,
    Modelled,
    Posting,
    as_modelled,
    other_schedules,
    same_program,
)
from ppbench.config.case import Case
from ppbench.config.programs import collective_ns_of, lowered_of, planned_step_ns, sharding_of

MS = 1_000_000
CASE = Case(
    device="emulated",
    schedule="interleaved_1f1b",
    stages_per_rank=2,
    world_size=2,
    num_microbatches=4,
    replicas=3,
    emulated_F_ms=(10.0, 12.0, 9.0, 10.0),
    emulated_I_ms=(10.0,),
    emulated_W_ms=(11.0,),
    emulated_gather_ms=(7.0,),
    emulated_reduce_ms=(13.0,),
    emulated_replica_factors=(1.0, 1.2, 1.0),
)
ZERO3 = replace(CASE, sharding_policy="zero3", sharding_residency=1, sharding_look_ahead=0)


POSTING = Posting(Policy(CASE.transfer_policy), CASE.transfer_look_ahead)


def costs_of(case, factor):
    """The costs of a replica: F of each stage as given, I and W on each half of a rank's share."""
    forward = tuple(round(round(ms * MS) * factor) for ms in case.emulated_F_ms)
    backward = (round(round(10.5 * MS) * factor),) * 4
    return Costs({Op.F: forward, Op.B: backward}, {})


COSTS = costs_of(CASE, 1.0)


def modelled(case, *, is_emulated=True):
    """What a run of an emulated case is modelled from, had it been measured without any error."""
    own = tuple(costs_of(case, factor) for factor in case.emulated_replica_factors)
    gather, reduce = collective_ns_of(case)
    given = {
        (op, stage): ns
        for op, of_stages in ((Op.UNSHARD, gather), (Op.REDUCE_GRAD, reduce))
        for stage, ns in enumerate(of_stages)
    }
    costs = ReplicaCosts(costs_of(case, 16 / 15), own, given)
    emulated = given if is_emulated else None
    return Modelled(lowered_of(case), costs, POSTING, sharding_of(case), emulated=emulated)


def answers(run):
    return {answer.question: answer for answer in other_sharing(run)}


def planned_ns(case):
    return planned_step_ns(case, lowered_of(case))


def test_the_run_itself_takes_its_planned_step():
    assert as_modelled(modelled(ZERO3)).step_ns == planned_ns(ZERO3)


@pytest.mark.parametrize(
    ("question", "settings"),
    [
        (EARLIER, {"sharding_residency": 2, "sharding_look_ahead": 1}),
        ("ZeRO-2 instead of ZeRO-3", {"sharding_policy": "zero2"}),
        ("DDP instead of ZeRO-3", {"sharding_policy": "ddp"}),
        ("free collectives", {"emulated_gather_ms": (0.0,), "emulated_reduce_ms": (0.0,)}),
        ("replicas alike", {"emulated_replica_factors": (16 / 15,) * 3}),
    ],
)
def test_a_change_is_predicted_as_the_case_that_has_it_is_planned(question, settings):
    changed = replace(ZERO3, **settings)
    given = answers(modelled(ZERO3))
    assert given[question].step_ns == planned_ns(changed)
    assert given[question].step_ns != planned_ns(ZERO3)


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_every_policy_is_told_from_every_other(policy):
    run = modelled(replace(CASE, sharding_policy=policy))
    zero3 = replace(ZERO3, sharding_residency=2, sharding_look_ahead=1)
    name = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}[policy]
    assert answers(run)[f"ZeRO-3 instead of {name}"].step_ns == planned_ns(zero3)


def test_an_all_reduce_takes_what_a_reduce_scatter_and_a_gather_take():
    sharded = modelled(ZERO3, is_emulated=False)
    longer = replace(CASE, sharding_policy="ddp", emulated_reduce_ms=(20.0,))
    assert answers(sharded)["DDP instead of ZeRO-3"].step_ns == planned_ns(longer)
    whole = modelled(replace(CASE, sharding_policy="ddp"), is_emulated=False)
    halved = replace(CASE, sharding_policy="zero2", emulated_reduce_ms=(6.5,))
    assert answers(whole)["ZeRO-2 instead of DDP"].step_ns == planned_ns(halved)


def test_a_schedule_with_other_stages_moves_the_same_bytes_in_all():
    run = modelled(replace(CASE, sharding_policy="ddp", emulated_F_ms=(10.0,) * 4))
    by_question = {answer.question: answer for answer in other_schedules(run)}
    plain = replace(
        CASE, schedule="1f1b", stages_per_rank=1, sharding_policy="ddp", emulated_F_ms=(20.0,)
    )
    assert by_question["1f1b"].step_ns == planned_ns(plain)
    scaled = modelled(
        replace(CASE, sharding_policy="ddp", emulated_F_ms=(10.0,) * 4), is_emulated=False
    )
    by_question = {answer.question: answer for answer in other_schedules(scaled)}
    twice = replace(plain, emulated_reduce_ms=(26.0,))
    assert by_question["1f1b"].step_ns == planned_ns(twice)


def test_without_a_timed_collective_no_other_policy_is_predicted():
    run = modelled(replace(CASE, sharding_policy="none"))
    run = replace(run, emulated=None, costs=run.costs.without_collectives())
    assert isinstance(answers(run)["ZeRO-2 instead of none"], Inapplicable)


def test_a_program_that_places_its_collectives_itself_is_not_asked_to_gather_earlier():
    assert EARLIER not in answers(replace(modelled(ZERO3), is_written=True))


def test_one_replica_is_asked_nothing_of_this_and_its_idle_time_is_that_of_its_ranks():
    alone = Modelled.alone(lowered_of(replace(CASE, replicas=1)), COSTS, POSTING)
    assert answers(alone) == {}
    balanced, *_ = same_program(alone)
    assert balanced.idle_ns == round(balanced.bubble_fraction * 2 * balanced.step_ns)
