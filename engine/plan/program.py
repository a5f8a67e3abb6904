"""A program: for each rank, the ordered actions of one step. Text in and out.

The program is the single description of a schedule. Rules check it, lowering adds its transfers,
`engine.plan.predict` predicts it and the executor runs it; none of them knows the schedule's name.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.arrays import run
from engine.plan import kernels
from engine.plan.action import (
    CODES,
    COLLECTIVE_OPS,
    COMPUTE_OPS,
    OPS,
    RECV_OPS,
    SEND_OPS,
    Action,
    Op,
    parse_action,
    parse_cell,
)
from engine.plan.table import Table

TRAIN, EVALUATE = "train", "evaluate"


@dataclass(frozen=True)
class Placement:
    """The rank that owns each stage: `ranks[stage]`.

    With two `directions`, two pipelines go over the same ranks. Each has all of the model, and the
    stages of the second are numbered after those of the first: with a `depth` of d, stages s and
    d + s are copies of one part of the model. A microbatch goes through one of them, the first half
    of a step's microbatches through the first.
    """

    ranks: tuple[int, ...]
    world_size: int
    directions: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages, each copy counted."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """The number of stages of one direction: the parts that the model is cut into."""
        return len(self.ranks) // self.directions

    def copies_of(self, part: int) -> range:
        """The stages that have one part of the model."""
        return range(part, self.num_stages, self.depth)

    def owners_of(self, stage: int) -> frozenset[int]:
        """The ranks that have a stage or a copy of it."""
        return frozenset(self.ranks[copy] for copy in self.copies_of(stage % self.depth))

    def is_last(self, stage: int) -> bool:
        """Whether a stage has the end of the model, and the loss."""
        return stage % self.depth == self.depth - 1

    def direction_of(self, microbatch: int, num_microbatches: int) -> int:
        """The direction that a microbatch goes through."""
        return microbatch * self.directions // num_microbatches

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


def loop_placement(world_size: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod p: the stages go round the ranks `stages_per_rank` times."""
    num_stages = world_size * stages_per_rank
    return Placement(tuple(stage % world_size for stage in range(num_stages)), world_size)


def v_placement(world_size: int, stages_per_rank: int = 2) -> Placement:
    """The stages go down the ranks and back up: two neighbours meet on each rank at the turns.

    p = 3, 2 stages per rank: stages 0 to 5 on ranks 0, 1, 2, 2, 1, 0.
    """
    down = tuple(range(world_size))
    ways = [down if way % 2 == 0 else down[::-1] for way in range(stages_per_rank)]
    return Placement(tuple(rank for way in ways for rank in way), world_size)


def two_way_placement(world_size: int, stages_per_rank: int = 2) -> Placement:
    """Two pipelines in opposite directions, of a stage per rank each.

    p = 4: stages 0 to 3 on ranks 0 to 3, and their copies 4 to 7 on ranks 3 to 0.
    """
    return replace(v_placement(world_size, stages_per_rank), directions=2)


@dataclass(frozen=True)
class Program:
    """The actions of one step, by rank, in the order in which each rank issues them.

    Made of rows of actions or of a table of them; kept as a table.

    `paired` has a 1 for each forward, at stage x microbatches + microbatch, that is one with the
    whole backward behind it: a pair starts when both have their input, may overlap, and hands on
    both results when it is over. It is empty where there are none.

    With `slices`, what counts as a microbatch is a slice of one of the batch's along its sequences:
    slice j of k of microbatch m has the number mk + j. `slices[j]` is the share of the microbatch's
    time that it takes; they add up to 1. Forwards come in their order, and backwards in reverse:
    attention sees what comes before. It is empty where microbatches are whole.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    actions: Sequence[tuple[Action, ...]]
    paired: bytes = b""
    slices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.actions, Table):
            object.__setattr__(self, "actions", Table.of(self.actions))

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch of the batch comes in; 1 where it is whole."""
        return max(1, len(self.slices))

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def table(self) -> Table:
        """The program as arrays; `actions` is a view of it."""
        assert isinstance(self.actions, Table)
        return self.actions

    @property
    def has_collectives(self) -> bool:
        return any(self._num_of(COLLECTIVE_OPS))

    def without_collectives(self) -> Program:
        """The same program for one replica whose parameters are whole."""
        if not self.has_collectives:
            return self
        return replace(self, actions=self._without_collectives)

    @cached_property
    def _without_collectives(self) -> Table:
        return self.table.of_ops(COMPUTE_OPS | SEND_OPS | RECV_OPS | {Op.OPT})

    @property
    def num_computations(self) -> int:
        """The number of actions that are neither transfers nor collectives."""
        return sum(self._num_of(COMPUTE_OPS))

    @cached_property
    def sums_of_copies(self) -> array[int]:
        """By index in the table: a REDUCE_GRAD has the index of its copy's, all else NONE.

        It is empty where there is one direction.
        """
        table, places, found = self.table, dict[int, list[int]](), array("q")
        if self.placement.directions > 1:
            found = array("q", [kernels.NONE]) * table.num_actions
            for at in range(table.num_actions):
                if table.op[at] == kernels.REDUCE_GRAD:
                    places.setdefault(table.stage[at] % self.placement.depth, []).append(at)
        for ends in places.values():
            if len(ends) == 2:
                found[ends[0]], found[ends[1]] = ends[1], ends[0]
        return found

    @property
    def has_backward(self) -> bool:
        return any(self._num_of((Op.B, Op.I, Op.W)))

    @property
    def mode(self) -> str:
        """The mode that it is for: a program of forwards alone evaluates."""
        return TRAIN if self.has_backward else EVALUATE

    @property
    def has_transfers(self) -> bool:
        return any(self._num_of(SEND_OPS | RECV_OPS))

    def _num_of(self, ops: Collection[Op]) -> Iterator[int]:
        """The numbers of actions of these ops, by op and stage."""
        for op in ops:
            first = CODES[op] * self.num_stages
            yield from self.num_of_kind[first : first + self.num_stages]

    @cached_property
    def num_of_kind(self) -> array[int]:
        """The number of actions by kind: of op o and stage s at o x num_stages + s."""
        counts, table = array("q", [0]) * (len(OPS) * self.num_stages), self.table
        run(table.num_actions, kernels.count_kinds, table.op, table.stage, self.num_stages, counts)
        return counts

    @cached_property
    def mates(self) -> array[int]:
        """By index in the table, that of the backward of which a forward is one; else NONE.

        Empty where the program has no pairs.
        """
        table, mates = self.table, array("q")
        if self.paired:
            mates = array("q", [kernels.NONE]) * table.num_actions
            arguments = array("q", iter(self.paired)), self.num_microbatches, mates
            run(table.num_actions, kernels.find_mates, *table.arrays, *arguments)
        return mates

    def in_order(self) -> Program:
        """The same program with the halves of each pair as two actions in order."""
        return replace(self, paired=b"") if self.paired else self

    def compute_only(self) -> Program:
        """The same program without its transfers and collectives."""
        if not self.has_transfers and not self.has_collectives:
            return self
        return replace(self, actions=self._computations)

    @cached_property
    def _computations(self) -> Table:
        return self.table.of_ops(COMPUTE_OPS)


def steps_can_overlap(program: Program) -> bool:
    """Whether the next step can begin while a rank still computes for this one.

    A step begins on the rank of stage 0, and on those of its copies. Nothing overlaps if the last
    computation there needs the last one of every other rank, as in 1F1B; where weight gradients
    come last, it does not.
    """
    rows = [program.compute_only().table.part(rank) for rank in range(program.world_size)]
    where = {action: (rank, at) for rank, row in enumerate(rows) for at, action in enumerate(row)}
    firsts = [program.placement.ranks[stage] for stage in program.placement.copies_of(0)]
    return any(_ends_early(rows, where, first) for first in firsts)


def _ends_early(
    rows: list[tuple[Action, ...]], where: dict[Action, tuple[int, int]], first: int
) -> bool:
    """Whether a rank's last computation needs less than all of the others."""
    num_needed, left = [0] * len(rows), [(first, len(rows[first]) - 1)]
    while left:
        rank, last = left.pop()
        for stage, op, microbatch in rows[rank][num_needed[rank] : last + 1]:
            step = {Op.F: -1, Op.B: 1, Op.I: 1}.get(op, 0)  # to the stage that it hears from
            ops = (Op.F,) if op is Op.F else (Op.B, Op.I)
            left += [
                where[own]
                for own in (Action(stage + step, op, microbatch) for op in ops)
                if step and own in where
            ]
        num_needed[rank] = max(num_needed[rank], last + 1)
    return num_needed != [len(row) for row in rows]


def to_csv(program: Program) -> str:
    """torch's form: a row per rank, a cell per action; a pair is one cell."""
    text, rows, mates = io.StringIO(), [], program.mates
    for begin, end in itertools.pairwise(program.table.offset):
        cells = list(map(str, program.table.those(range(begin, end))))
        for at in range(begin, end if mates else begin):
            if (mate := mates[at]) != kernels.NONE:
                cells[at - begin] = f"({cells[at - begin]};{cells[mate - begin]})OVERLAP_F_B"
                cells[mate - begin] = ""
        rows.append([cell for cell in cells if cell])
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str) -> Program:
    """The program that a CSV text describes, transfers and collectives included.

    `name` is for messages.

    The number of ranks, stages and microbatches and the placement follow from the cells that are
    not collectives; whether the program is legal is for the rules to say. A stage that has no
    microbatch in common with the one before it is the first of a second direction. Raises
    ValueError naming the row and column of a cell that is not an action, or what is missing
    altogether.
    """
    rows, forwards_of_pairs = _cells_from_csv(text)
    table = Table.of(rows)
    seen: dict[int, Counter[int]] = {}  # by stage, how often on each rank
    plain = [[a for a in row if a.op not in COLLECTIVE_OPS] for row in table]
    forwards: dict[int, set[int]] = {}  # by stage, its microbatches
    for rank, row in enumerate(plain):
        for action in row:
            seen.setdefault(action.stage, Counter())[rank] += 1
            if action.op is Op.F:
                forwards.setdefault(action.stage, set()).add(action.microbatch)
    owners = {stage: on.most_common(1)[0][0] for stage, on in seen.items()}
    if not owners:
        raise ValueError("holds no actions; expected a row per rank with cells such as 0F0")
    microbatches = {action.microbatch for row in plain for action in row}
    for what, numbers in (("stage", owners), ("microbatch", microbatches)):
        highest = max(numbers)
        for number in range(highest):
            if number not in numbers:
                raise ValueError(f"has {what} {highest} but nothing for {what} {number}")
    for rank, row in enumerate(plain):
        if not row:
            raise ValueError(f"rank {rank} has no actions; every rank needs a stage")
    own = [forwards.get(stage, set()) for stage in range(len(owners))]
    begins = [s for s, (one, two) in enumerate(itertools.pairwise(own), 1) if not one & two]
    is_two_way = 2 * begins[0] == len(own) if len(begins) == 1 and all(own) else False
    ranks = tuple(owners[stage] for stage in range(len(owners)))
    placement = Placement(ranks, len(table), 2 if is_two_way else 1)
    return with_pairs(Program(name, placement, len(microbatches), table), forwards_of_pairs)


def with_pairs(program: Program, forwards: Iterable[Action]) -> Program:
    """The program with some forwards one with the backward behind each."""
    size = program.num_microbatches
    paired = bytearray(program.num_stages * size)
    for stage, _, microbatch in forwards:
        paired[stage * size + microbatch] = 1
    return replace(program, paired=bytes(paired) if any(paired) else b"")


def actions_from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Read torch's CSV form, a row per rank; see `parse_cell` for what a cell can hold.

    Raises ValueError naming row and column of a cell that is none of it.
    """
    return _cells_from_csv(text)[0]


def _cells_from_csv(text: str) -> tuple[tuple[tuple[Action, ...], ...], list[Action]]:
    """Return the rows, and the forwards of pairs."""
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"is not CSV: {error}") from None
    rows: list[tuple[Action, ...]] = []
    forwards_of_pairs = list[Action]()
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            try:
                row += (actions := parse_cell(cell))
            except ValueError as error:
                raise ValueError(f"rank {rank}, column {column}: {error}") from None
            if "(" in cell:
                if [action.op for action in actions] != [Op.F, Op.B]:
                    reason = f"{cell.strip()[:40]} pairs others than a forward F and a backward B"
                    raise ValueError(f"rank {rank}, column {column}: {reason}")
                forwards_of_pairs.append(actions[0])
        rows.append(tuple(row))
    while rows and COLLECTIVE_OPS.issuperset(action.op for action in rows[-1]):
        rows.pop()  # a line at the end in which nothing is computed
    return tuple(rows), forwards_of_pairs


def to_json(program: Program) -> str:
    """Everything needed to rebuild the program, as one JSON object.

    It names the directions where there is more than one, and the forwards of pairs and the slices
    if there are any.
    """
    directions = program.placement.directions
    forwards = (at for at, mate in enumerate(program.mates) if mate != kernels.NONE)
    pairs = list(map(str, program.table.those(list(forwards))))
    return json.dumps(
        {
            "schedule": program.schedule,
            "num_microbatches": program.num_microbatches,
            "placement": list(program.placement.ranks),
            **({"directions": directions} if directions > 1 else {}),
            **({"pairs": pairs} if pairs else {}),
            **({"slices": program.slices} if program.slices else {}),
            "actions": [[str(action) for action in row] for row in program.actions],
        }
    )


def from_json(text: str) -> Program:
    """The inverse of `to_json`; raises ValueError or KeyError on other text."""
    data = json.loads(text)
    rows = tuple(tuple(parse_action(cell) for cell in row) for row in data["actions"])
    placement = Placement(tuple(data["placement"]), len(rows), data.get("directions", 1))
    slices = tuple(data.get("slices", ()))
    program = Program(data["schedule"], placement, data["num_microbatches"], rows, slices=slices)
    return with_pairs(program, map(parse_action, data.get("pairs", ())))
