"""Exact times on hand-written programs; the simulator as oracle for the rest."""

import pytest
from schedule_grid import families, programs_of

from engine.plan.action import COMPUTE_OPS, SEND_OPS, Action, Op
from engine.plan.lower import Policy, lower
from engine.plan.replay import replay
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from engine.plan.spans import Lane, Span


def actions(program, ops):
    return [action for row in program.actions for action in row if action.op in ops]


def costs_of(program, durations):
    by_op = durations.by_op()
    return {a: by_op[a.op][a.stage] for a in actions(program, COMPUTE_OPS)}


@pytest.mark.parametrize(("name", "p", "v"), families(ranks=(1, 2, 3, 4)))
def test_with_free_transfers_a_replay_is_the_simulation(name, p, v):
    for program in programs_of(name, p, v).values():
        durations = uniform(program.placement, 12 * v, 18 * v, 6 * v)
        simulation = simulate(program, durations)
        replayed = replay(lower(program), costs_of(program, durations), {})
        for rank, row in enumerate(program.actions):
            times = [replayed.compute[action] for action in row]
            assert [start for start, _ in times] == simulation.start_ns[rank]
            assert [end for _, end in times] == simulation.end_ns[rank]
        assert replayed.makespan_ns == simulation.makespan_ns
        assert sum(replayed.compute_ns()) == simulation.compute_ns


@pytest.mark.parametrize("name", ["afab", "1f1b", "zb_h1"])
def test_where_receives_are_posted_long_before_equal_transfers_are_the_simulators(name):
    program = build_program(name, 4, 8)
    durations = uniform(program.placement, 12, 18, 6)
    lowered = lower(program, look_ahead=100)
    moving = dict.fromkeys(actions(lowered, SEND_OPS), 5)
    makespan_ns = simulate(program, durations, TransferModel(latency_ns=5)).makespan_ns
    assert replay(lowered, costs_of(program, durations), moving).makespan_ns == makespan_ns


AFAB = build_program("afab", 2, 2)
COSTS = dict.fromkeys(actions(AFAB, COMPUTE_OPS), 10)
SENDS = {Action(0, Op.SEND_F, 0): 25, Action(0, Op.SEND_F, 1): 1}


def test_a_message_moves_when_both_ends_are_ready_and_the_one_before_is_over():
    replayed = replay(lower(AFAB), COSTS, SENDS)
    assert replayed.messages[Action(0, Op.SEND_F, 0)] == (10, 35)
    assert replayed.messages[Action(0, Op.SEND_F, 1)] == (35, 36)
    assert replayed.compute[Action(1, Op.F, 0)] == (35, 45)
    assert replayed.compute[Action(1, Op.F, 1)] == (45, 55)
    assert replayed.makespan_ns == 85
    assert replayed.idle_ns() == [85 - 40, 85 - 40]


def test_a_receive_posted_just_in_time_exposes_its_message():
    replayed = replay(lower(AFAB, Policy.JUST_IN_TIME), COSTS, dict.fromkeys(SENDS, 3))
    assert replayed.messages[Action(0, Op.SEND_F, 0)] == (10, 13)
    assert replayed.messages[Action(0, Op.SEND_F, 1)] == (23, 26)
    assert replayed.compute[Action(1, Op.F, 1)] == (26, 36)


def test_each_action_takes_its_own_time():
    costs = {**COSTS, Action(0, Op.F, 1): 100}
    replayed = replay(lower(AFAB), costs, {})
    assert replayed.compute[Action(1, Op.F, 1)] == (110, 120)
    assert replayed.compute_ns() == [130, 40]


def test_its_spans_are_those_of_a_run():
    spans = list(replay(lower(AFAB), COSTS, SENDS).spans())
    assert Span(0, 1, Lane.COMPUTE, 1, Op.F, 0, 35, 45, 0) in spans
    assert Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 10, 35, 0) in spans
    assert Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 10, 35, 0) in spans
    assert len(spans) == 8 + 2 * 4
