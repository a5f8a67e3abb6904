"""What makes a program legal, and the reason when it is not.

Everything is said in facts. An action needs facts and makes facts true:

    F(s, m) needs F(s-1, m)               makes F(s, m)
    I(s, m) needs F(s, m) and I(s+1, m)   makes I(s, m)
    W(s, m) needs I(s, m)                 makes W(s, m)
    B(s, m) needs what I needs            makes I(s, m) and W(s, m)

A fact is written as the action of the same name, so schedules that split the backward and
schedules that do not obey one set of rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.program import Program, draw


class ProgramError(ValueError):
    """A program that breaks a rule: which rank, position and action, and why, with the grid."""

    def __init__(self, program: Program, rank: int, position: int, reason: str) -> None:
        row = program.actions[rank]
        action = str(row[position]) if position < len(row) else "end of program"
        self.rank, self.position, self.action, self.reason = rank, position, action, reason
        super().__init__(
            f"{program.schedule}: rank {rank}, position {position}, {action}: {reason}\n"
            + draw(program, (rank, position))
        )


def facts_made(action: Action) -> tuple[Action, ...]:
    """The facts that hold once a compute action is done."""
    if action.op is Op.B:
        return (action._replace(op=Op.I), action._replace(op=Op.W))
    return (action,)


def facts_needed(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The facts that a compute action waits for."""
    stage, op, _ = action
    if op is Op.F:
        return (action._replace(stage=stage - 1),) if stage > 0 else ()
    if op is Op.W:
        return (action._replace(op=Op.I),)
    own_forward = action._replace(op=Op.F)
    if stage == num_stages - 1:
        return (own_forward,)
    return (own_forward, Action(stage + 1, Op.I, action.microbatch))


def check(program: Program) -> None:
    """Raise ProgramError unless each action is placed, happens once, and can run in this order."""
    _check_each_action_belongs(program)
    _check_exactly_once(program)
    for _ in execution_order(program):
        pass


def _positions(program: Program) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(program.actions):
        for position, action in enumerate(row):
            yield rank, position, action


def _check_each_action_belongs(program: Program) -> None:
    for rank, position, action in _positions(program):
        if action.op not in COMPUTE_OPS:
            reason = "only F, B, I and W belong here; transfers are added by lowering"
        elif not 0 <= action.stage < program.num_stages:
            reason = f"there are {program.num_stages} stages"
        elif not 0 <= action.microbatch < program.num_microbatches:
            reason = f"there are {program.num_microbatches} microbatches"
        elif (owner := program.placement.ranks[action.stage]) != rank:
            reason = f"stage {action.stage} is placed on rank {owner}"
        else:
            continue
        raise ProgramError(program, rank, position, reason)


def _check_exactly_once(program: Program) -> None:
    made: set[Action] = set()
    for rank, position, action in _positions(program):
        for fact in facts_made(action):
            if fact in made:
                raise ProgramError(program, rank, position, f"{fact} has been done before")
            made.add(fact)
    for stage, rank in enumerate(program.placement.ranks):
        for microbatch in range(program.num_microbatches):
            for op in (Op.F, Op.I, Op.W):
                fact = Action(stage, op, microbatch)
                if fact not in made:
                    end = len(program.actions[rank])
                    raise ProgramError(program, rank, end, f"{fact} is never done")


def execution_order(program: Program) -> Iterator[tuple[int, Action]]:
    """Each (rank, action) in an order that respects every row and every dependency.

    Raises ProgramError naming the first blocked action when the rows wait for each other. Visits
    each action once, so the cost grows with the length of the program.
    """
    position = [0] * len(program.actions)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(program.actions)))
    while ready:
        rank = ready.popleft()
        row = program.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            missing = next(
                (f for f in facts_needed(action, program.num_stages) if f not in done), None
            )
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            yield rank, action
            for fact in facts_made(action):
                done.add(fact)
                ready.extend(waiting.pop(fact, ()))
    _check_none_is_blocked(program, position, done)


def _check_none_is_blocked(program: Program, position: list[int], done: set[Action]) -> None:
    for rank, row in enumerate(program.actions):
        if position[rank] == len(row):
            continue
        action = row[position[rank]]
        needed = [str(f) for f in facts_needed(action, program.num_stages) if f not in done]
        reason = f"can never start: it needs {' and '.join(needed)}, which waits for it in turn"
        raise ProgramError(program, rank, position[rank], reason)
