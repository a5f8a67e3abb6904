"""The critical path of a simulated step: what would have to be faster for the step to be faster.

Walked from the last action back to the first. An action starts the moment that something else
ends: the action before it on its rank, or else what it needs. A transfer starts the moment that its
message is made or that the message before it has left their channel.
"""

from __future__ import annotations

from engine.arrays import listed, maker, run
from engine.plan import kernels
from engine.plan.action import Action
from engine.plan.messages import outgoing
from engine.plan.simulate import Simulation
from engine.plan.walk import Moving, of_kinds, walk


def critical_path(simulation: Simulation) -> list[Action]:
    """The actions that leave no slack, first to last; SEND stands for a transfer that takes time.

    Their durations add up to the makespan. Where an action's rank and its message become ready at
    once, the rank's own action is taken.
    """
    program, transfers = simulation.program, simulation.transfers
    table = program.table
    last = [(simulation.ends_ns[end - 1], -end) for end in table.offset[1:] if end > 0]
    if not table.num_actions:
        return []
    walked = simulation.walk
    if not walked.why[0]:  # it was not asked for
        moving = Moving(transfers.duration_ns, transfers.overlaps)
        walked = walk(program, [of_kinds(program, simulation.took_ns)], moving, has_why=True)
    is_large = isinstance(walked.why[0], list)
    path = (listed if is_large else maker(table.num_actions))(0, 2 * table.num_actions)
    arguments = walked.why, walked.starts_ns, -max(last)[1] - 1, path
    length = run(table.num_actions, kernels.walk_back, *arguments)
    takes_time = transfers.duration_ns > 0
    steps = [step for step in path[:length][::-1] if takes_time or step % 2 == 0]
    actions = table.those([step // 2 for step in steps])
    if not takes_time:
        return actions
    return [
        (outgoing(action, program) or action) if step % 2 else action
        for action, step in zip(actions, steps, strict=True)
    ]
