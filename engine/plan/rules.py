"""The rules of a legal program, and the reason when it breaks one.

Everything is said in facts. An action needs facts and makes facts true:

    F(s, m) needs F(s-1, m)               makes F(s, m)
    I(s, m) needs F(s, m) and I(s+1, m)   makes I(s, m)
    W(s, m) needs I(s, m)                 makes W(s, m)
    B(s, m) needs what I needs            makes I(s, m) and W(s, m)

A fact is written as the action of the same name, so schedules that split the backward and
schedules that do not obey one set of rules. A program without any backward needs its F alone.
Transfers in a program are left aside here; `lower` proves them.

For one microbatch the facts form a chain, down the stages and back up, so that a fact is a number:
with S stages, link s says that the input of stage s is there, link 2S-1-s that its output gradient
is (link S is both: what the last stage's forward leaves is what its backward needs).

    F(s) needs link s         makes link s+1
    I(s) needs link 2S-1-s    makes link 2S-s
    W(s) needs link 2S-s

Where a microbatch is a slice of one of the batch's, a forward also needs that of the slice before
it on the same stage, whose keys and values it attends to, and I needs that of the slice after it,
which has gradients for them. Both are on one rank: the order of its row is all there is to check.

Two directions have no link in common: each has links of its own, those of the second after those of
the first, and its microbatches pass its stages alone.
"""

from __future__ import annotations

import itertools
from array import array
from functools import lru_cache
from typing import NamedTuple

from engine.arrays import Arrays, Ints, Maker, filled, largest, maker, run
from engine.plan import kernels
from engine.plan.action import CODES, OPS, Action, Op
from engine.plan.drawing import draw
from engine.plan.program import Placement, Program


class ProgramError(ValueError):
    """A program that breaks a rule: which rank, position and action, and why, with the grid."""

    def __init__(self, program: Program, rank: int, position: int, reason: str) -> None:
        found = program.table.part(rank, position, position + 1)
        action = str(found[0]) if found else "end of program"
        self.rank, self.position, self.action, self.reason = rank, position, action, reason
        super().__init__(
            f"{program.schedule}: rank {rank}, position {position}, {action}: {reason}\n"
            + draw(program, (rank, position))
        )


def link_needed(op: Op, stage: int, placement: Placement) -> int:
    """The link that must be there before a compute op of a stage, or that a transfer moves."""
    direction, part = divmod(stage, depth := placement.depth)
    first = direction * (2 * depth + 1)
    if op in (Op.F, Op.RECV_F, Op.SEND_F):
        return first + part + (op is Op.SEND_F)
    return first + 2 * depth - part - (op in (Op.B, Op.I, Op.RECV_B))


def link_made(op: Op, stage: int, placement: Placement) -> int | None:
    """The link that a compute op of a stage makes; None for W, which nothing waits for."""
    direction, part = divmod(stage, depth := placement.depth)
    first = direction * (2 * depth + 1)
    if op is Op.F:
        return first + part + 1
    return None if op is Op.W else first + 2 * depth - part


def fact_needed(action: Action, placement: Placement) -> Action | None:
    """The F or I that must be done before a compute action; None before the first forward."""
    depth = placement.depth
    direction, link = divmod(link_needed(action.op, action.stage, placement), 2 * depth + 1)
    first = direction * depth
    if link == 0:
        return None
    if link <= depth:
        return Action(first + link - 1, Op.F, action.microbatch)
    return Action(first + 2 * depth - link, Op.I, action.microbatch)


class Kinds(NamedTuple):
    """Arrays by kind of action: of op o and stage s, at o x S + s.

    The links of microbatch m are `width` numbers from `needed` and `made` on. A link whose maker
    and user are on different ranks is a message, on an edge of the same number.
    """

    needed: Ints  # the link before a computation; of a transfer, that which it moves
    made: Ints  # the link that a computation makes
    receives: Ints  # 1 where what a computation needs is a message
    edge: Ints  # of the message that a computation makes or a transfer moves; NONE without
    user: Ints  # the rank that needs what a computation makes or a transfer moves


@lru_cache(maxsize=64)
def kinds_of(placement: Placement, width: int, made_by: Maker = filled) -> Kinds:
    """The arrays for a placement; `width` is the number of microbatches."""
    num_stages = placement.num_stages
    users, crosses = list[int](), list[bool]()  # of each link
    for first in range(0, num_stages, placement.depth):
        ranks = placement.ranks[first : first + placement.depth]
        own = [*ranks, *reversed(ranks), *ranks[:1]]
        users += own
        crosses += [False, *(here != there for here, there in itertools.pairwise(own))]
    kinds = Kinds(*(made_by(value, num_stages * len(OPS)) for value in (0, 0, 0, kernels.NONE, 0)))
    for code, op in enumerate(OPS[: kernels.OPT]):
        for stage in range(num_stages):
            kind = code * num_stages + stage
            needed = link_needed(op, stage, placement)
            made = needed if code > kernels.W else link_made(op, stage, placement)
            kinds.needed[kind], kinds.made[kind] = needed * width, (made or 0) * width
            kinds.receives[kind] = crosses[needed] and code < kernels.W
            kinds.edge[kind] = kernels.NONE if made is None or not crosses[made] else made
            kinds.user[kind] = users[made or 0]
    return kinds


def num_links(program: Program) -> int:
    """The number of links: one before each F and each I, and one before the last W."""
    return 2 * program.num_stages + program.placement.directions


def check_facts(compute: Program) -> None:
    """Raise ProgramError unless each action is placed and each fact is made once.

    What is proved of a table is proved once.
    """
    table, width = compute.table, compute.num_microbatches
    for at, mate in enumerate(compute.mates):
        if mate != kernels.NONE:
            forward, backward = table.those([at, mate])
            is_other = (forward.stage, forward.microbatch) != (backward.stage, backward.microbatch)
            if backward.op is not Op.B or not is_other:
                reason = f"is paired with {backward}; expected the whole backward of another one"
                raise ProgramError(compute, *table.place(at), reason)
    if table.legal_in == (compute.placement, width, len(compute.slices)):
        return
    made_by = maker(table.num_actions)
    num_each = compute.num_stages * width
    left = made_by(1, num_each)  # F, then I, then W
    left.extend(made_by(int(compute.has_backward), 2 * num_each))
    if compute.placement.directions > 1:
        place = compute.placement
        ways = [place.direction_of(microbatch, width) for microbatch in range(width)]
        for at in range(len(left)):
            left[at] *= int(ways[at % width] == at // width % place.num_stages // place.depth)
    index = _find_illegal(compute, table.made_by(made_by), width, left)
    if index != kernels.NONE:
        raise ProgramError(compute, *table.place(index), _why_illegal(compute, index))
    if largest(left):
        half, cell = divmod(left.index(1), num_each)
        fact = Action(cell // width, (Op.F, Op.I, Op.W)[half], cell % width)
        rank = compute.placement.ranks[fact.stage]
        position = table.offset[rank + 1] - table.offset[rank]
        is_split = {CODES[Op.I], CODES[Op.W]}.intersection(table.op)
        written = fact if fact.op is Op.F or is_split else fact._replace(op=Op.B)
        raise ProgramError(compute, rank, position, f"{written} is never done")
    if compute.slices:
        _check_slices(compute)
    table.legal_in = compute.placement, width, len(compute.slices)


def _check_slices(compute: Program) -> None:
    """Raise ProgramError unless the slices of each microbatch come in order, then in reverse."""
    num_slices, steps = len(compute.slices), {Op.F: 1, Op.B: -1, Op.I: -1}
    for rank, row in enumerate(compute.actions):
        due: dict[tuple[int, int, int], int] = {}  # by stage, microbatch and way, the next slice
        for position, (stage, op, number) in enumerate(row):
            if (step := steps.get(op)) is None:
                continue
            microbatch, part = divmod(number, num_slices)
            key = stage, microbatch, step
            expected = due.get(key, 0 if step > 0 else num_slices - 1)
            if part != expected:
                what = "keys and values" if step > 0 else "gradients for its keys and values"
                needed = Action(stage, op, microbatch * num_slices + expected)
                reason = f"needs the {what} that slice {expected} has: {needed} comes only later"
                raise ProgramError(compute, rank, position, reason)
            due[key] = expected + step


def _find_illegal(program: Program, arrays: Arrays, width: int, left: Ints) -> int:
    num_actions, ranks = program.table.num_actions, program.placement.ranks
    given = ranks if isinstance(arrays[0], list) else array("q", ranks)
    return run(num_actions, kernels.find_illegal, arrays, given, width, left)


_HALVES = {Op.F: (Op.F,), Op.I: (Op.I,), Op.W: (Op.W,), Op.B: (Op.I, Op.W)}


def _why_illegal(program: Program, index: int) -> str:
    action, (rank, position) = program.table.at(index), program.table.place(index)
    if not 0 <= action.stage < program.num_stages:
        return f"there are {program.num_stages} stages"
    if (owner := program.placement.ranks[action.stage]) != rank:
        return f"stage {action.stage} is placed on rank {owner}"
    if not 0 <= action.microbatch < program.num_microbatches:
        return f"there are {program.num_microbatches} microbatches"
    place = program.placement
    way = place.direction_of(action.microbatch, program.num_microbatches)
    if way != action.stage // place.depth:
        stages = f"{way * place.depth} to {(way + 1) * place.depth - 1}"
        return f"microbatch {action.microbatch} goes through stages {stages}"
    before = program.table.part(rank, 0, position)
    done = {one._replace(op=half) for one in before for half in _HALVES[one.op]}
    facts = [action._replace(op=half) for half in _HALVES[action.op]]
    return f"{next(fact for fact in facts if fact in done)} has been done before"


def columns_of(program: Program, made_by: Maker = filled) -> tuple[Arrays, int]:
    """The table of a program with columns for microbatches, and how many columns there are.

    A microbatch is its own column, unless an action is of one that there is not. Raises
    ProgramError where a stage is not on its rank.
    """
    table, width = program.table, program.num_microbatches
    arrays = table.made_by(made_by)
    if table.legal_in == (program.placement, width, len(program.slices)):
        return arrays, width
    nothing = made_by(0, 0)
    if _find_illegal(program, arrays, width, nothing) != kernels.NONE:
        column = {m: column for column, m in enumerate(sorted(set(table.microbatch)))}
        columns = made_by(0, 0)
        columns.extend(map(column.__getitem__, table.microbatch))
        arrays, width = (*arrays[:3], columns), len(column)
        index = _find_illegal(program, arrays, width, nothing)
        if index != kernels.NONE:
            raise ProgramError(program, *table.place(index), _why_illegal(program, index))
    return arrays, width


def peak_activations(program: Program) -> list[int]:
    """Return the most activations that each rank holds at once, each of a stage's microbatch.

    A forward adds one; the action that makes W true (B or W) releases it. Without a backward, each
    is released when its forward ends.
    """
    table, peaks = program.table, filled(0, len(program.table))
    if not program.has_backward:
        return [min(1, last - first) for first, last in itertools.pairwise(table.offset)]
    run(table.num_actions, kernels.find_peaks, table.offset, table.op, peaks)
    return peaks.tolist()
