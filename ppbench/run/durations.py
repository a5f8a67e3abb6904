"""The durations that a case sets, and what the simulator makes of a case."""

from __future__ import annotations

from engine.plan.action import SEND_OPS
from engine.plan.lower import Policy, channel_of, lower
from engine.plan.program import Program
from engine.plan.replay import replay
from engine.plan.simulate import Durations, Simulation, simulate, uniform
from ppbench.config.case import Case
from ppbench.config.possible import num_stages_of, program_of

NS_PER_MS = 1_000_000


def durations_of(case: Case) -> Durations:
    """Of each stage, as an emulated case has them.

    One number is the time of a rank's whole share, of which each of its stages takes its part; a
    list is the stages' own.
    """
    times = (case.emulated_F_ms, case.emulated_I_ms, case.emulated_W_ms)
    num_stages = num_stages_of(case)
    share = case.world_size / num_stages
    forward, input_gradient, weight_gradient = (_by_stage(ms, num_stages, share) for ms in times)
    return Durations(forward, input_gradient, weight_gradient)


def _by_stage(milliseconds: tuple[float, ...], num_stages: int, share: float) -> tuple[int, ...]:
    if len(milliseconds) == num_stages:
        return tuple(round(ms * NS_PER_MS) for ms in milliseconds)
    (of_a_rank,) = milliseconds
    return (round(of_a_rank * NS_PER_MS * share),) * num_stages


def link_ns_of(case: Case) -> tuple[int, ...]:
    """By how much an emulated link holds up each message, from each stage to the next."""
    listed = tuple(round(ms * NS_PER_MS) for ms in case.emulated_link_ms)
    return listed * (num_stages_of(case) - 1) if len(listed) == 1 else listed


def lowered_of(case: Case, program: Program | None = None) -> Program:
    """The case's program, or the one that was run instead, with its transfers."""
    policy = Policy(case.transfer_policy)
    return lower(program or program_of(case), policy, case.transfer_look_ahead)


def planned_step_ns(case: Case) -> int:
    """The step of an emulated case as it was asked for, its slow links included."""
    lowered, links = lowered_of(case), link_ns_of(case)
    by_op = durations_of(case).by_op()
    actions = [action for row in lowered.actions for action in row]
    compute_ns = {a: by_op[a.op][a.stage] for a in actions if a.op in by_op}
    sends = [a for a in actions if a.op in SEND_OPS] if links else []
    moving_ns = {send: links[min(channel_of(send))] for send in sends}
    return replay(lowered, compute_ns, moving_ns).makespan_ns


def simulated(case: Case, program: Program | None = None) -> Simulation:
    """The case's program, or the one that was run instead, with free transfers.

    As emulated, else equal stages with F = I = W.
    """
    program = program or program_of(case)
    if case.is_emulated:
        return simulate(program, durations_of(case))
    unit = program.num_stages  # so that a stage's time is a whole number
    return simulate(program, uniform(program.placement, unit, unit, unit))
