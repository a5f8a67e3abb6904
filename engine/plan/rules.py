"""The rules of a legal program, and the reason when it breaks one.

Everything is said in facts. An action needs facts and makes facts true:

    F(s, m) needs F(s-1, m)               makes F(s, m)
    I(s, m) needs F(s, m) and I(s+1, m)   makes I(s, m)
    W(s, m) needs I(s, m)                 makes W(s, m)
    B(s, m) needs what I needs            makes I(s, m) and W(s, m)

A fact is written as the action of the same name, so schedules that split the backward and
schedules that do not obey one set of rules. Transfers in a program are left aside here; `lower`
proves them.

For one microbatch the facts form a chain, down the stages and back up, so that a fact is a number:
with S stages, link s says that the input of stage s is there, link 2S-1-s that its output gradient
is (link S is both: what the last stage's forward leaves is what its backward needs).

    F(s) needs link s         makes link s+1
    I(s) needs link 2S-1-s    makes link 2S-s
    W(s) needs link 2S-s
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from engine.plan.action import COMPUTE_OPS, NO_INDEX, Action, Op
from engine.plan.drawing import draw
from engine.plan.program import Program


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


def link_needed(op: Op, stage: int, num_stages: int) -> int:
    """The link that must be there before a compute op of a stage, for its microbatch."""
    if op is Op.F:
        return stage
    return 2 * num_stages - stage - (op is not Op.W)


def link_made(op: Op, stage: int, num_stages: int) -> int | None:
    """The link that a compute op of a stage makes; None for W, which nothing waits for."""
    if op is Op.F:
        return stage + 1
    return None if op is Op.W else 2 * num_stages - stage


def fact_needed(action: Action, num_stages: int) -> Action | None:
    """The F or I that must be done before a compute action; None before the first forward."""
    link = link_needed(action.op, action.stage, num_stages)
    if link == 0:
        return None
    if link <= num_stages:
        return Action(link - 1, Op.F, action.microbatch)
    return Action(2 * num_stages - link, Op.I, action.microbatch)


def check(program: Program, max_held: int | None = None) -> None:
    """Raise ProgramError unless each action is placed, happens once, and can run in this order.

    With `max_held`, also unless no rank ever holds more activations than that, counted in
    microbatches over all its stages. The cost grows with the length of the program.
    """
    compute = program.compute_only()
    _check_each_action_belongs(compute)
    _check_exactly_once(compute)
    _check_order(compute)
    if max_held is not None:
        _check_memory(compute, max_held)


def _check_each_action_belongs(program: Program) -> None:
    for rank, row in enumerate(program.actions):
        stages = frozenset(program.placement.stages_of(rank))
        num_microbatches = program.num_microbatches
        for position, (stage, _, microbatch) in enumerate(row):
            if stage in stages and 0 <= microbatch < num_microbatches:
                continue
            if not 0 <= stage < program.num_stages:
                reason = f"there are {program.num_stages} stages"
            elif stage not in stages:
                reason = f"stage {stage} is placed on rank {program.placement.ranks[stage]}"
            else:
                reason = f"there are {num_microbatches} microbatches"
            raise ProgramError(program, rank, position, reason)


_HALVES = {Op.F: (0,), Op.I: (1,), Op.W: (2,), Op.B: (1, 2)}
_OF_HALF = (Op.F, Op.I, Op.W)


def _check_exactly_once(program: Program) -> None:
    num_microbatches = program.num_microbatches
    num_cells = program.num_stages * num_microbatches
    made = bytearray(3 * num_cells)  # F, then I, then W of every stage and microbatch
    for rank, row in enumerate(program.actions):
        for position, (stage, op, microbatch) in enumerate(row):
            cell = stage * num_microbatches + microbatch
            for half in _HALVES[op]:
                if made[half * num_cells + cell]:
                    fact = Action(stage, _OF_HALF[half], microbatch)
                    raise ProgramError(program, rank, position, f"{fact} has been done before")
                made[half * num_cells + cell] = 1
    if (missing := made.find(0)) >= 0:
        half, cell = divmod(missing, num_cells)
        fact = Action(cell // num_microbatches, _OF_HALF[half], cell % num_microbatches)
        rank = program.placement.ranks[fact.stage]
        raise ProgramError(program, rank, len(program.actions[rank]), f"{fact} is never done")


def _check_memory(program: Program, max_held: int) -> None:
    for rank, row in enumerate(program.actions):
        held = 0
        for position, (_, op, _) in enumerate(row):
            if op is Op.F:
                held += 1
                if held > max_held:
                    reason = (
                        f"holds the activations of {held} microbatches; at most {max_held} may be"
                    )
                    raise ProgramError(program, rank, position, reason)
            elif op is not Op.I:
                held -= 1


def _check_order(program: Program) -> None:
    """Every row can be run through: nothing waits for what comes later, here or in a circle."""
    nothing = (0,) * program.num_stages
    play(program, steps_of(program, dict.fromkeys(COMPUTE_OPS, nothing), frozenset()))


Step = tuple[int, int, int, int, bool]
"""What an op of a stage needs, makes and takes: the link that it needs, the link that it makes, its
nanoseconds, the channel of the message that it makes (NO_INDEX where there is none), and whether it
waits (W does not: what it needs is its rank's own, there before any message).

Links are given for microbatch 0 in a table with a column for each microbatch. A plain tuple, since
Python takes one apart faster than one with names.
"""

Steps = Mapping[Op, Sequence[Step]]
"""By op and stage."""


def steps_of(
    program: Program, durations_ns: Mapping[Op, Sequence[int]], crossing: Container[int]
) -> Steps:
    """`durations_ns` by op and stage. A link that is `crossing` is a message on its own channel."""
    num_stages, width = program.num_stages, program.num_microbatches

    def step(op: Op, stage: int) -> Step:
        needed, made = (link(op, stage, num_stages) for link in (link_needed, link_made))
        channel = made if made is not None and made in crossing else NO_INDEX
        column = num_links(program) - 1 if made is None else made  # nothing needs the last
        assert needed is not None
        took = durations_ns[op][stage]
        return needed * width, column * width, took, channel, op is not Op.W

    return {op: [step(op, stage) for stage in range(num_stages)] for op in COMPUTE_OPS}


def num_links(program: Program) -> int:
    """One before each F and each I, one before each W, and one for what W makes."""
    return 2 * program.num_stages + 2


Times = list[list[int]]
"""By rank and position, in nanoseconds."""


def play(
    program: Program, steps: Steps, transfer_ns: int = 0, *, overlaps: bool = True
) -> tuple[Times, Times]:
    """When each action of a compute-only program starts and ends, each as soon as it can.

    A rank walks on until it waits for what is not there, and again when that has been made, so that
    each action is visited once. Raises ProgramError with the circle of waits when the rows can
    never be finished.
    """
    width, rows = program.num_microbatches, program.actions
    channel_free = [0] * num_links(program)
    link_ready = [0] * width + [-1] * (width * (len(channel_free) - 1))
    waiting: dict[int, int] = {}  # link -> the rank that stands before it: its stage's
    ready = list(range(len(rows)))[::-1]
    times: tuple[Times, Times] = [[] for _ in rows], [[] for _ in rows]

    def walk(rank: int) -> Iterator[None]:  # millions of turns: calls little, names what it uses
        free, start, end = 0, times[0][rank].append, times[1][rank].append
        for stage, op, microbatch in rows[rank]:
            needed, made, duration_ns, channel, waits = steps[op][stage]
            there = link_ready[needed + microbatch]
            if there < 0:
                waiting[needed + microbatch] = rank
                yield
                there = link_ready[needed + microbatch]
            if there > free and waits:
                free = there
            start(free)
            free += duration_ns
            end(free)
            arrival = free
            if channel >= 0:
                busy = channel_free[channel]
                arrival = (busy if busy > free else free) + transfer_ns  # noqa: FURB136  # faster
                channel_free[channel] = arrival
                if not overlaps:
                    free = arrival
            made += microbatch
            link_ready[made] = arrival
            if made in waiting:
                ready.append(waiting.pop(made))

    walks = [walk(rank) for rank in range(len(rows))]
    while ready:
        next(walks[ready.pop()], None)
    position = list(map(len, times[0]))
    if position != list(map(len, rows)):
        raise _circle_of_waits(program, position)
    return times


def _as_input(action: Action) -> Action:
    """A full backward as the I that it contains."""
    return action._replace(op=Op.I) if action.op is Op.B else action


def _circle_of_waits(program: Program, position: list[int]) -> ProgramError:
    """Follow the waits from a blocked rank until a rank comes up again: that is the circle."""
    rank = next(r for r, row in enumerate(program.actions) if position[r] < len(row))
    waits: dict[int, str] = {}
    while rank not in waits:
        blocked = program.actions[rank][position[rank]]
        needed = fact_needed(blocked, program.num_stages)
        assert needed is not None  # else it would not be blocked
        owner = program.placement.ranks[needed.stage]
        left = program.actions[owner][position[owner] :]
        if not any(needed == _as_input(action) for action in left):
            reason = f"needs {needed}, which is never done"
            return ProgramError(program, rank, position[rank], reason)
        place = "comes only later" if owner == rank else f"stands behind {left[0]} on rank {owner}"
        waits[rank] = f"{blocked} on rank {rank} needs {needed}, which {place}"
        rank = owner
    ranks = list(waits)
    circle = [waits[r] for r in ranks[ranks.index(rank) :]]
    return ProgramError(program, rank, position[rank], "can never start: " + "; ".join(circle))
