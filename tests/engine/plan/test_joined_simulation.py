"""Replicas in time: formulae by hand, and the simulation of one as oracle."""

import pytest

from engine.plan.action import NO_INDEX, Op
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    leaves_whole_sums,
    ring_ns,
)
from engine.plan.predict import Durations, predict, predict_replicas, uniform
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.spans import Lane, Span
from engine.plan.walk import TransferModel


def collectives(gather_ns, reduce_ns):
    return {Op.UNSHARD: gather_ns, Op.REDUCE_GRAD: reduce_ns}


FREE = collectives((0,) * 2, (0,) * 2)


def test_a_ring_sends_all_but_a_replicas_own_part_and_twice_for_a_sum_that_all_get():
    assert ring_ns(1000, 4, 1e9, 7, is_summed_whole=False) == 757
    assert ring_ns(4000, 4, 1e9, 7, is_summed_whole=True) == 6007
    assert ring_ns(1000, 1, 1e9, is_summed_whole=True) == 0
    assert all(map(leaves_whole_sums, (NoCollectives(), DataParallel(), Zero1())))
    assert not any(map(leaves_whole_sums, (Zero2(), Zero3(), TorchWindow())))


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_replicas_with_free_collectives_are_one_simulation(name):
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    program = build_program(name, 2, 4, v)
    durations = uniform(program.placement, 12 * v, 18 * v, 6 * v)
    free = collectives((0,) * 2 * v, (0,) * 2 * v)
    alone = predict(program, durations)
    for policy in (NoCollectives(), DataParallel(), Zero3()):
        joined = predict_replicas(program, [durations] * 3, policy, free)
        assert joined.makespan_ns == alone.makespan_ns
        assert joined.compute_ns == alone.compute_ns * 3
        assert joined.bubble_fraction == alone.bubble_fraction
        assert joined.bubble_idle_over_ideal == alone.bubble_idle_over_ideal
        of_compute = {span for span in joined.spans() if span.lane is Lane.COMPUTE}
        expected = {span._replace(replica=d) for span in alone.spans() for d in range(3)}
        assert of_compute == {span for span in expected if span.lane is Lane.COMPUTE}


def test_one_slow_replica_keeps_the_others_waiting_at_the_sum():
    program = build_program("1f1b", 1, 2)
    quick, slow = Durations((10,), (10,), (10,)), Durations((12,), (12,), (12,))
    joined = predict_replicas(program, [quick, slow], DataParallel(), collectives((0,), (20,)))
    assert joined.makespan_ns == 72 + 20
    sums = [span for span in joined.spans() if span.lane is Lane.COLLECTIVE]
    assert sums == [
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 60, 92, 0, 0),
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 72, 92, 0, 1),
    ]


def test_gathers_are_hidden_by_look_ahead_and_else_exposed():
    program = build_program("interleaved_1f1b", 1, 1, 2)
    durations, model = Durations((10,) * 2, (10,) * 2, (10,) * 2), collectives((8, 8), (0, 0))
    spans = {}
    for policy in (Zero3(1, 0), Zero3(2, 0), Zero3(2, 1)):
        joined = predict_replicas(program, [durations] * 2, policy, model)
        spans[policy] = joined.makespan_ns  # 60 of computations
    assert spans == {Zero3(1, 0): 60 + 3 * 8, Zero3(2, 0): 60 + 2 * 8, Zero3(2, 1): 60 + 8}


def test_what_cannot_be_simulated_is_refused():
    program = build_program("1f1b", 2, 2)
    durations = uniform(program.placement, 1, 1, 1)
    with pytest.raises(ValueError, match="block their sender"):
        blocking = TransferModel(overlaps=False)
        predict_replicas(program, [durations], NoCollectives(), FREE, blocking)
    with pytest.raises(ValueError, match=r"UNSHARD, REDUCE_GRAD.* of 2"):
        predict_replicas(program, [durations], NoCollectives(), collectives((1,), (1,)))
    backwards = type(program)("x", program.placement, 2, [row[::-1] for row in program.actions])
    with pytest.raises(ProgramError):
        predict_replicas(backwards, [durations], NoCollectives(), FREE)
