"""The critical path of a simulated step: what would have to be faster for the step to be faster.

Walked from the last action back to the first. An action starts the moment that something else
ends: the action before it on its rank, or else what it needs. A transfer starts the moment that its
message is made or that the message before it has left their channel.
"""

from __future__ import annotations

from array import array

from engine.arrays import Arrays, run
from engine.plan import kernels
from engine.plan.action import Action
from engine.plan.kernels import NONE
from engine.plan.lower import outgoing
from engine.plan.rules import kinds_of, num_links
from engine.plan.simulate import Simulation


def critical_path(simulation: Simulation) -> list[Action]:
    """The actions that leave no slack, first to last; SEND stands for a transfer that takes time.

    Their durations add up to the makespan. Where an action's rank and its message become ready at
    once, the rank's own action is taken.
    """
    program, transfers = simulation.program, simulation.transfers
    table, width = program.table, program.num_microbatches
    last = [(simulation.ends_ns[end - 1], -end) for end in table.offset[1:] if end > 0]
    if not table.num_actions:
        return []
    made_by = simulation.made_by
    arrays, kinds = table.made_by(made_by), kinds_of(program.placement, width, made_by)
    maker = made_by(NONE, num_links(program) * width)
    run(table.num_actions, kernels.find_makers, arrays, kinds.made, maker)
    message: Arrays = tuple(made_by(NONE, table.num_actions) for _ in range(2))
    if transfers.duration_ns > 0:
        message = simulation.move_messages()
    path = made_by(-max(last)[1] - 1, 2 * table.num_actions)
    ranks = array("q", program.placement.ranks)
    arguments = arrays, ranks, kinds.needed, maker, message, transfers.duration_ns
    times = simulation.starts_ns, simulation.ends_ns
    length = run(table.num_actions, kernels.walk_back, *arguments, transfers.overlaps, *times, path)
    steps = [(table.at(step // 2), step % 2) for step in path[:length][::-1]]
    return [(outgoing(a, program) or a) if is_message else a for a, is_message in steps]
