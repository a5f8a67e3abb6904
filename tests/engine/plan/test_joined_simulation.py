"""Replicas in time: formulae by hand, and the simulation of one as oracle."""

import pytest

from engine.plan.action import NO_INDEX, Op
from engine.plan.collectives import DataParallel, NoCollectives, Zero1, Zero2, Zero3
from engine.plan.joined_simulation import CollectiveModel, ring, simulate_joined
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.simulate import Durations, TransferModel, simulate, uniform
from engine.plan.spans import Lane, Span

FREE = CollectiveModel((0,) * 2, (0,) * 2)


def test_a_ring_sends_all_but_a_replicas_own_part_and_twice_for_a_sum_that_all_get():
    sharded = ring([1000, 2000], [4000, 8000], 4, Zero3(), bytes_per_s=1e9, latency_ns=7)
    assert sharded == CollectiveModel((757, 1507), (3007, 6007))
    assert ring([1000], [4000], 4, Zero2(), 1e9, 7).reduce_ns == (3007,)
    for policy in (DataParallel(), Zero1()):
        assert ring([1000], [4000], 4, policy, 1e9, 7).reduce_ns == (6007,)
    assert ring([1000], [4000], 1, Zero3(), 1e9) == CollectiveModel((0,), (0,))


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_replicas_with_free_collectives_are_one_simulation(name):
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    program = build_program(name, 2, 4, v)
    durations = uniform(program.placement, 12 * v, 18 * v, 6 * v)
    free = CollectiveModel((0,) * 2 * v, (0,) * 2 * v)
    alone = simulate(program, durations)
    for policy in (NoCollectives(), DataParallel(), Zero3()):
        joined = simulate_joined(program, [durations] * 3, policy, free)
        assert joined.makespan_ns == alone.makespan_ns
        assert sum(map(sum, joined.compute_ns)) == 3 * alone.compute_ns
        assert joined.bubble_fraction == alone.bubble_fraction
        assert joined.bubble_idle_over_ideal == alone.bubble_idle_over_ideal
        of_compute = {span for span in joined.spans() if span.lane is Lane.COMPUTE}
        expected = {span._replace(replica=d) for span in alone.spans() for d in range(3)}
        assert of_compute == {span for span in expected if span.lane is Lane.COMPUTE}


def test_one_slow_replica_keeps_the_others_waiting_at_the_sum():
    program = build_program("1f1b", 1, 2)
    quick, slow = Durations((10,), (10,), (10,)), Durations((12,), (12,), (12,))
    joined = simulate_joined(program, [quick, slow], DataParallel(), CollectiveModel((0,), (20,)))
    assert joined.makespan_ns == 72 + 20
    sums = [span for span in joined.spans() if span.lane is Lane.COLLECTIVE]
    assert sums == [
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 60, 92, 0, 0),
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 72, 92, 0, 1),
    ]


def test_gathers_are_hidden_by_look_ahead_and_else_exposed():
    program = build_program("interleaved_1f1b", 1, 1, 2)
    durations, model = Durations((10,) * 2, (10,) * 2, (10,) * 2), CollectiveModel((8, 8), (0, 0))
    spans = {}
    for policy in (Zero3(1, 0), Zero3(2, 0), Zero3(2, 1)):
        joined = simulate_joined(program, [durations] * 2, policy, model)
        spans[policy] = joined.makespan_ns  # 60 of computations
    assert spans == {Zero3(1, 0): 60 + 3 * 8, Zero3(2, 0): 60 + 2 * 8, Zero3(2, 1): 60 + 8}


def test_what_cannot_be_simulated_is_refused():
    program = build_program("1f1b", 2, 2)
    durations = uniform(program.placement, 1, 1, 1)
    with pytest.raises(ValueError, match="block their sender"):
        blocking = TransferModel(overlaps=False)
        simulate_joined(program, [durations], NoCollectives(), FREE, blocking)
    with pytest.raises(ValueError, match="collectives of 2 stages"):
        simulate_joined(program, [durations], NoCollectives(), CollectiveModel((1,), (1,)))
    backwards = type(program)("x", program.placement, 2, [row[::-1] for row in program.actions])
    with pytest.raises(ProgramError):
        simulate_joined(backwards, [durations], NoCollectives(), FREE)
