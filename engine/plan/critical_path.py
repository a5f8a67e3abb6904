"""The critical path of a simulated step: what would have to be faster for the step to be faster.

Walked from the last action back to the first. An action starts the moment that something else
ends: the action before it on its rank, or else what it needs. A transfer starts the moment that its
message is made or that the message before it has left their channel.
"""

from __future__ import annotations

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.lower import outgoing
from engine.plan.rules import fact_needed
from engine.plan.simulate import Simulation


def critical_path(simulation: Simulation) -> list[Action]:
    """The actions that leave no slack, first to last; SEND stands for a transfer that takes time.

    Their durations add up to the makespan. Where an action's rank and its message become ready at
    once, the rank's own action is taken.
    """
    way = _WayBack(simulation)
    path: list[Action] = []
    action = way.last()
    while action is not None:
        path.append(action)
        action = way.before(action)
    return path[::-1]


class _WayBack:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._program = simulation, simulation.program
        self._positions: dict[int, dict[Action, int]] = {}  # of the ranks asked for so far
        self._sends: dict[Action, tuple[int, int]] = {}  # start and end, where transfers take time
        self._sent_before: dict[Action, Action | None] = {}  # on the same channel
        if simulation.transfers.duration_ns > 0:
            self._note_messages()

    def _note_messages(self) -> None:
        previous: dict[tuple[int, Op], Action] = {}  # by stage and direction: one channel each
        for send, start, end in self._simulation.messages():
            self._sends[send] = (start, end)
            self._sent_before[send] = previous.get(send[:2])
            previous[send[:2]] = send

    def last(self) -> Action | None:
        """The compute action that ends last; None in an empty program."""
        rows, ends = self._program.actions, self._simulation.end_ns
        done = [(row_ends[-1], -rank) for rank, row_ends in enumerate(ends) if row_ends]
        return rows[-max(done)[1]][-1] if done else None

    def before(self, action: Action) -> Action | None:
        """Return what ended for this action to start; None for the first of the step."""
        if action.op not in COMPUTE_OPS:
            return self._before_send(action)
        rank, position = self._place(action)
        start = self._simulation.start_ns[rank][position]
        if start == 0:
            return None
        if position > 0:
            own = self._program.actions[rank][position - 1]
            last, end = self._until_free(own, self._simulation.end_ns[rank][position - 1])
            if end == start:
                return last
        needed = fact_needed(action, self._program.num_stages)
        assert needed is not None  # else it would have started at 0
        maker_rank, maker_position = self._place(needed)
        maker = self._program.actions[maker_rank][maker_position]
        send = outgoing(maker, self._program)
        return send if send in self._sends else maker

    def _until_free(self, action: Action, end_ns: int) -> tuple[Action, int]:
        """Return what a rank is busy with when it has begun `action`, and until when."""
        send = outgoing(action, self._program)
        if send in self._sends and not self._simulation.transfers.overlaps:
            return send, self._sends[send][1]
        return action, end_ns

    def _before_send(self, send: Action) -> Action:
        producer = send._replace(op=Op.F if send.op is Op.SEND_F else Op.I)
        rank, position = self._place(producer)
        start, before = self._sends[send][0], self._sent_before[send]
        if self._simulation.end_ns[rank][position] == start or before is None:
            return self._program.actions[rank][position]
        return before

    def _place(self, fact: Action) -> tuple[int, int]:
        """Rank and position of the action that makes a fact."""
        rank = self._program.placement.ranks[fact.stage]
        if rank not in self._positions:
            row = self._program.actions[rank]
            self._positions[rank] = {action: position for position, action in enumerate(row)}
        positions = self._positions[rank]
        full = fact._replace(op=Op.B)
        return rank, positions[fact] if fact in positions else positions[full]
