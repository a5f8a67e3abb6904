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

import itertools
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ne, sub
from typing import Any, NamedTuple

from engine.arrays import Arrays, Ints, Maker, filled, listed, maker, packed, run, run_all
from engine.plan import kernels
from engine.plan.action import CODES, OPS, Action, Op
from engine.plan.drawing import draw
from engine.plan.program import Placement, Program


class ProgramError(ValueError):
    """A program that breaks a rule: which rank, position and action, and why, with the grid."""

    def __init__(self, program: Program, rank: int, position: int, reason: str) -> None:
        found = program.part(rank, position, position + 1)
        action = str(found[0]) if found else "end of program"
        self.rank, self.position, self.action, self.reason = rank, position, action, reason
        super().__init__(
            f"{program.schedule}: rank {rank}, position {position}, {action}: {reason}\n"
            + draw(program, (rank, position))
        )


def link_needed(op: Op, stage: int, num_stages: int) -> int:
    """The link that must be there before a compute op of a stage, or that a transfer moves."""
    if op in (Op.F, Op.RECV_F, Op.SEND_F):
        return stage + (op is Op.SEND_F)
    return 2 * num_stages - stage - (op in (Op.B, Op.I, Op.RECV_B))


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
    users = [*placement.ranks, *reversed(placement.ranks), *placement.ranks[:1]]  # of each link
    crosses = [False, *(here != there for here, there in itertools.pairwise(users))]
    kinds = Kinds(*(made_by(value, num_stages * len(OPS)) for value in (0, 0, 0, kernels.NONE, 0)))
    for code, op in enumerate(OPS[: kernels.OPT]):
        for stage in range(num_stages):
            kind = code * num_stages + stage
            needed = link_needed(op, stage, num_stages)
            made = needed if code > kernels.W else link_made(op, stage, num_stages)
            kinds.needed[kind], kinds.made[kind] = needed * width, (made or 0) * width
            kinds.receives[kind] = crosses[needed] and code < kernels.W
            kinds.edge[kind] = kernels.NONE if made is None or not crosses[made] else made
            kinds.user[kind] = users[made or 0]
    return kinds


MOST_NS = 2**63 - 1


def num_links(program: Program) -> int:
    """The number of links: one before each F and each I, and one before the last W."""
    return 2 * program.num_stages + 1


def check(program: Program, max_held: int | None = None) -> None:
    """Raise ProgramError unless each action is placed, happens once, and can run in this order.

    With `max_held`, also unless no rank ever holds more activations than that, counted in
    microbatches over all its stages. The cost grows with the length of the program.
    """
    compute = program.compute_only()
    next(play([(compute, [0] * (compute.num_stages * len(OPS)))]))
    if max_held is not None:
        for rank, peak in enumerate(peak_activations(compute)):
            if peak > max_held:
                row = compute.table.part(rank)
                held = itertools.accumulate((a.op is Op.F) - (a.op in (Op.B, Op.W)) for a in row)
                position, num_held = next((at, n) for at, n in enumerate(held) if n > max_held)
                reason = (
                    f"holds the activations of {num_held} microbatches; at most {max_held} are "
                    "allowed"
                )
                raise ProgramError(compute, rank, position, reason)


def check_facts(compute: Program) -> None:
    """Raise ProgramError unless each action is placed and each fact is made once.

    What is proved of a table is proved once.
    """
    table, width = compute.table, compute.num_microbatches
    if table.legal_in == (compute.placement, width):
        return
    made_by = maker(table.num_actions)
    done = made_by(0, 3 * compute.num_stages * width)  # F, then I, then W
    index = _find_illegal(compute, table.made_by(made_by), width, done)
    if index != kernels.NONE:
        raise ProgramError(compute, *table.place(index), _why_illegal(compute, index))
    if 0 in done:
        missing = done.index(0)
        half, cell = divmod(missing, compute.num_stages * width)
        fact = Action(cell // width, (Op.F, Op.I, Op.W)[half], cell % width)
        rank = compute.placement.ranks[fact.stage]
        position = table.offset[rank + 1] - table.offset[rank]
        is_split = {CODES[Op.I], CODES[Op.W]}.intersection(table.op)
        written = fact if fact.op is Op.F or is_split else fact._replace(op=Op.B)
        raise ProgramError(compute, rank, position, f"{written} is never done")
    table.legal_in = compute.placement, width


def _find_illegal(program: Program, arrays: Arrays, width: int, done: Ints) -> int:
    num_actions, ranks = program.table.num_actions, program.placement.ranks
    given = ranks if maker(num_actions) is listed else array("q", ranks)
    return run(num_actions, kernels.find_illegal, arrays, given, width, done)


_HALVES = {Op.F: (Op.F,), Op.I: (Op.I,), Op.W: (Op.W,), Op.B: (Op.I, Op.W)}


def _why_illegal(program: Program, index: int) -> str:
    action, (rank, position) = program.table.at(index), program.table.place(index)
    if not 0 <= action.stage < program.num_stages:
        return f"there are {program.num_stages} stages"
    if (owner := program.placement.ranks[action.stage]) != rank:
        return f"stage {action.stage} is placed on rank {owner}"
    if not 0 <= action.microbatch < program.num_microbatches:
        return f"there are {program.num_microbatches} microbatches"
    before = program.table.part(rank, 0, position)
    done = {one._replace(op=half) for one in before for half in _HALVES[one.op]}
    facts = [action._replace(op=half) for half in _HALVES[action.op]]
    return f"{next(fact for fact in facts if fact in done)} has been done before"


def columns_of(program: Program, *, is_proved: bool = False) -> tuple[Arrays, int]:
    """The table of a program with columns for microbatches, and how many columns there are.

    A microbatch is its own column, unless an action is of one that there is not. Raises
    ProgramError where a stage is not on its rank, unless that is still to be proved.
    """
    program = program.without_collectives()
    table, arrays, width = program.table, program.table.arrays, program.num_microbatches
    nothing = filled(0, 0)
    if _find_illegal(program, arrays, width, nothing) != kernels.NONE:
        column = {m: column for column, m in enumerate(sorted(set(table.microbatch)))}
        columns = array("q", map(column.__getitem__, table.microbatch))
        arrays, width = (*arrays[:3], columns), len(column)
        index = _find_illegal(program, arrays, width, nothing) if is_proved else kernels.NONE
        if index != kernels.NONE:
            raise ProgramError(program, *table.place(index), _why_illegal(program, index))
    return arrays, width


def peak_activations(program: Program) -> list[int]:
    """Return the most activations that each rank holds at once, each of a stage's microbatch.

    A forward adds one; the action that makes W true (B or W) releases it.
    """
    table, peaks = program.table, filled(0, len(program.table))
    run(table.num_actions, kernels.find_peaks, table.offset, table.op, peaks)
    return peaks.tolist()


def play(
    cases: Sequence[tuple[Program, Ints]], transfer_ns: int = 0, *, overlaps: bool = True
) -> Iterator[tuple[Ints, Ints]]:
    """When each action of compute-only programs starts and ends, as soon as it can.

    Each program has its costs by kind in nanoseconds. Raises ProgramError unless each action of it
    is placed and happens once; with the circle of waits where its rows can never be finished.
    """
    for compute in {id(compute): compute for compute, _ in cases}.values():
        check_facts(compute)
    size = sum(compute.table.num_actions for compute, _ in cases)

    def call(compute: Program, took: Ints) -> tuple[Any, ...]:
        table, width, links = compute.table, compute.num_microbatches, num_links(compute)
        is_large = table.num_actions * (max(took, default=0) + transfer_ns) > MOST_NS
        made_by = listed if is_large else maker(size)
        now, blocked, stack = (made_by(value, len(table)) for value in (0, kernels.NONE, 0))
        for rank in range(len(table)):
            stack[~rank] = rank  # from the first on
        arrays, ready = table.made_by(made_by), made_by(kernels.NONE, width * links)
        ready[:width] = made_by(0, width)
        walk = arrays[0][:-1], now, blocked, stack, made_by(0, links)
        costs = list(took) if made_by is listed else array("q", took)
        times = (made_by(0, table.num_actions) for _ in "se")
        kinds = kinds_of(compute.placement, width, made_by)
        return arrays, kinds, costs, transfer_ns, overlaps, walk, ready, *times

    played = run_all(size, kernels.play, itertools.starmap(call, cases))
    for (compute, _), (*_, walk, _, start, end) in zip(cases, played, strict=True):
        offset = compute.table.offset
        if any(map(ne, walk[0], offset[1:])):
            raise _circle_of_waits(compute, list(map(sub, walk[0], offset)))
        yield packed(start), packed(end)


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
        full = needed._replace(op=Op.B) if needed.op is Op.I else needed
        if needed not in left and full not in left:
            reason = f"needs {needed}, which is never done"
            return ProgramError(program, rank, position[rank], reason)
        place = "comes only later" if owner == rank else f"stands behind {left[0]} on rank {owner}"
        maker_of = needed if needed in left else full
        waits[rank] = f"{blocked} on rank {rank} needs {maker_of}, which {place}"
        rank = owner
    ranks = list(waits)
    circle = [waits[r] for r in ranks[ranks.index(rank) :]]
    return ProgramError(program, rank, position[rank], "can never start: " + "; ".join(circle))
