"""Every schedule by name: the one place to add a line when a schedule is added.

An explicit table rather than a decorator, so that reading this file tells what exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from engine.plan.program import (
    EVALUATE,
    TRAIN,
    Placement,
    Program,
    from_csv,
    loop_placement,
    two_way_placement,
    v_placement,
)
from engine.plan.schedules.bidirectional import chimera, dualpipe
from engine.plan.schedules.breadth_first import afab, looped_bfs
from engine.plan.schedules.controlled_memory import v_half, v_min
from engine.plan.schedules.forward_only import forwards
from engine.plan.schedules.one_f_one_b import (
    interleaved_1f1b,
    interleaved_zb,
    num_rounds,
    one_f_one_b,
    seq1f1b,
    zb_h1,
    zb_h2,
)
from engine.plan.schedules.v_shaped import dualpipev, side_by_side, zbv
from engine.plan.table import Row, Table

CSV_PREFIX = "csv:"
"""`csv:PATH` is the program in that file."""


class Shape(NamedTuple):
    """The numbers of ranks, stages and microbatches that a schedule is made for."""

    world_size: int
    stages_per_rank: int
    num_microbatches: int


@dataclass(frozen=True)
class StagesPerRank:
    """The numbers of stages a rank may have (`most` None: any number), and the default."""

    least: int
    most: int | None
    default: int


ONE_STAGE = StagesPerRank(1, 1, 1)
TWO_STAGES = StagesPerRank(2, 2, 2)
ANY_STAGES = StagesPerRank(1, None, 2)


@dataclass(frozen=True)
class Constraint:
    """A schedule's condition on the number of microbatches, or on another key."""

    text: str
    is_met: Callable[[Shape], bool]
    key: str = "num_microbatches"


@dataclass(frozen=True)
class Schedule:
    """Facts of a schedule besides its rows."""

    name: str
    generate: Callable[[Placement, int], list[Row]]
    place: Callable[[int, int], Placement]  # (p, v)
    stages_per_rank: StagesPerRank
    source: str
    constraints: tuple[Constraint, ...] = ()
    pairs: Callable[[Program], Program] | None = None
    """Makes one of the forwards and backwards that stand side by side."""
    in_slices: Callable[[Placement, int, int], list[Row]] | None = None
    """Makes the rows where each microbatch comes in slices; the last number is how many."""

    def takes_slices(self, mode: str) -> bool:
        """Whether it has an order for slices of microbatches; an evaluation has one in any case."""
        return mode == EVALUATE or self.in_slices is not None

    def constraints_in(self, mode: str) -> tuple[Constraint, ...]:
        """Its conditions; of an evaluation, which takes only the placement, those of that."""
        if mode != EVALUATE:
            return self.constraints
        return (EVEN_RANKS, EVEN_MICROBATCHES) if self.is_two_way else ()

    @property
    def is_two_way(self) -> bool:
        """Whether two pipelines go over its ranks, so that each stage has two owners."""
        return self.place is two_way_placement


IN_ROUNDS = Constraint(
    "num_microbatches must be a multiple of max(1, num_microbatches // world_size)",
    lambda shape: shape.num_microbatches % num_rounds(shape[0], shape[2]) == 0,
)
TWICE_THE_RANKS = Constraint(
    "num_microbatches must be at least 2 x world_size",
    lambda shape: shape.num_microbatches >= 2 * shape.world_size,
)
EVEN_RANKS = Constraint(
    "world_size must be even",
    lambda shape: shape.world_size % 2 == 0,
    "world_size",
)
EVEN_MICROBATCHES = Constraint(
    "num_microbatches must be even",
    lambda shape: shape.num_microbatches % 2 == 0,
)
WHOLE_UNITS = Constraint(
    "num_microbatches must be a multiple of world_size",
    lambda shape: shape.num_microbatches % shape.world_size == 0,
)

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("afab", afab, loop_placement, ONE_STAGE, "arXiv 1811.06965"),
        Schedule("1f1b", one_f_one_b, loop_placement, ONE_STAGE, "arXiv 2006.09503"),
        Schedule(
            "interleaved_1f1b",
            interleaved_1f1b,
            loop_placement,
            ANY_STAGES,
            "arXiv 2104.04473",
            (IN_ROUNDS,),
        ),
        Schedule("looped_bfs", looped_bfs, loop_placement, ANY_STAGES, "arXiv 2211.05953"),
        Schedule(
            "seq1f1b",
            one_f_one_b,
            loop_placement,
            ONE_STAGE,
            "arXiv 2406.03488",
            in_slices=seq1f1b,
        ),
        Schedule("zb_h1", zb_h1, loop_placement, ONE_STAGE, "arXiv 2401.10241"),
        Schedule("zb_h2", zb_h2, loop_placement, ONE_STAGE, "arXiv 2401.10241"),
        Schedule(
            "interleaved_zb",
            interleaved_zb,
            loop_placement,
            ANY_STAGES,
            "arXiv 2401.10241; torch's InterleavedZeroBubble",
            (IN_ROUNDS,),
        ),
        Schedule("zbv", zbv, v_placement, TWO_STAGES, "arXiv 2401.10241"),
        Schedule(
            "dualpipev",
            dualpipev,
            v_placement,
            TWO_STAGES,
            "arXiv 2412.19437",
            (TWICE_THE_RANKS,),
            side_by_side,
        ),
        Schedule("v_half", v_half, v_placement, TWO_STAGES, "arXiv 2405.15362"),
        Schedule("v_min", v_min, v_placement, TWO_STAGES, "arXiv 2405.15362"),
        Schedule(
            "chimera",
            chimera,
            two_way_placement,
            TWO_STAGES,
            "arXiv 2107.06925",
            (EVEN_RANKS, WHOLE_UNITS),
        ),
        Schedule(
            "dualpipe",
            dualpipe,
            two_way_placement,
            TWO_STAGES,
            "arXiv 2412.19437",
            (EVEN_RANKS, EVEN_MICROBATCHES, TWICE_THE_RANKS),
            side_by_side,
        ),
    )
}
ALIASES = {"gpipe": "afab"}


class ScheduleError(ValueError):
    """There is no such program."""


class UnknownScheduleError(ScheduleError):
    """No schedule of that name is registered."""


class ProgramFileError(ScheduleError):
    """The file of a program cannot be read as one."""


class ShapeError(ScheduleError):
    """The schedule is not made for so many ranks, stages or microbatches. `key` is at fault."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def find_schedule(name: str) -> Schedule:
    """The schedule called `name` or aliased by it; raises UnknownScheduleError naming all known."""
    schedule = SCHEDULES.get(ALIASES.get(name, name))
    if schedule is None:
        raise UnknownScheduleError(f'unknown schedule "{name}"; known: {", ".join(known_names())}')
    return schedule


def known_names() -> list[str]:
    return [*SCHEDULES, *ALIASES, f"{CSV_PREFIX}PATH"]


def shape_of(
    name: str,
    world_size: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    mode: str = TRAIN,
) -> Shape:
    """The shape that a schedule would have; without `stages_per_rank`, the schedule's own.

    An evaluation may have shapes that it cannot train with. Raises UnknownScheduleError, or
    ShapeError where the schedule is not made for it.
    """
    schedule = find_schedule(name)
    allowed = schedule.stages_per_rank
    v = allowed.default if stages_per_rank is None else stages_per_rank
    for key, count in (("world_size", world_size), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise ShapeError(key, f"must be at least 1, got {count}")
    if not allowed.least <= v <= (allowed.most or v):
        wanted = "exactly" if allowed.least == allowed.most else "at least"
        stages = "1 stage" if allowed.least == 1 else f"{allowed.least} stages"
        raise ShapeError(
            "stages_per_rank", f"{schedule.name} needs {wanted} {stages} per rank, got {v}"
        )
    shape = Shape(world_size, v, num_microbatches)
    for constraint in schedule.constraints_in(mode):
        if not constraint.is_met(shape):
            raise ShapeError(
                constraint.key,
                f"{schedule.name}: {constraint.text}; got num_microbatches {num_microbatches}, "
                f"world_size {world_size}",
            )
    return shape


def check_slices(name: str, num_slices: int, mode: str) -> None:
    """Raise ShapeError for a schedule that cannot train in slices; all can evaluate in them."""
    if num_slices > 1 and not find_schedule(name).takes_slices(mode):
        able = ", ".join(known for known, one in SCHEDULES.items() if one.in_slices)
        reason = (
            f"{name} takes whole microbatches, got {num_slices} slices; in slices train: {able}"
        )
        raise ShapeError("slices.number", reason)


def build_program(
    name: str,
    world_size: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    is_replicated: bool = False,
    mode: str = TRAIN,
    has_pairs: bool = False,
    slices: tuple[float, ...] = (),
) -> Program:
    """The program of a registered schedule, or of a CSV file (`csv:PATH`), for p ranks.

    A file's program is as its author wrote it, and may hold transfers; `is_replicated` keeps its
    collectives too, which one replica has no use for. To evaluate, the placement is all that a
    program leaves: see `forward_only`. Pairs of a forward and a backward are two actions in order,
    unless `has_pairs`.
    With `slices`, the share of each in the time of its microbatch, the program's microbatches are
    slices (`Program.slices`), and so are those of a file.
    `check` tells whether it is legal. Raises UnknownScheduleError; ShapeError where the schedule or
    file is not made for these numbers; ProgramFileError.
    """
    if name.startswith(CSV_PREFIX):
        program = _program_of_file(name, world_size, num_microbatches, stages_per_rank, slices)
        program = program if is_replicated else program.without_collectives()
        return in_mode(program if has_pairs else program.in_order(), mode)
    schedule = find_schedule(name)
    shape = shape_of(name, world_size, num_microbatches, stages_per_rank, mode)
    placement = schedule.place(world_size, shape.stages_per_rank)
    check_slices(name, len(slices), mode)
    size = num_microbatches * max(1, len(slices))
    if mode == EVALUATE:
        rows = forwards(placement, size)
    elif slices and schedule.in_slices is not None:
        rows = schedule.in_slices(placement, size, len(slices))
    else:
        rows = schedule.generate(placement, size)
    program = Program(schedule.name, placement, size, Table.of(rows), slices=slices)
    if has_pairs and schedule.pairs is not None and mode == TRAIN:
        program = schedule.pairs(program)
    return in_mode(program, mode)


def in_mode(program: Program, mode: str) -> Program:
    """The program as it is run to train or to evaluate; one without a backward stays as it is.

    Raises ShapeError for a program that cannot train.
    """
    if mode not in (TRAIN, EVALUATE):
        raise ShapeError("mode", f'unknown mode "{mode}"; known: {TRAIN}, {EVALUATE}')
    if program.mode == mode:
        return program
    if mode == TRAIN:
        reason = f'has no backward, which mode "{TRAIN}" needs; expected mode "{EVALUATE}"'
        raise ShapeError("mode", f"{program.schedule} {reason}")
    table = Table.of(forwards(program.placement, program.num_microbatches))
    return replace(program.in_order(), actions=table)


def _program_of_file(
    name: str,
    world_size: int,
    num_microbatches: int,
    stages_per_rank: int | None,
    slices: tuple[float, ...],
) -> Program:
    program = read_csv(Path(name.removeprefix(CSV_PREFIX)), slices)
    checks: list[tuple[str, float, int | None]] = [
        ("world_size", program.world_size, world_size),
        ("stages_per_rank", program.num_stages / program.world_size, stages_per_rank),
        ("num_microbatches", program.num_microbatches / program.num_slices, num_microbatches),
    ]
    for key, value, asked in checks:
        if asked is not None and value != asked:
            raise ShapeError(key, f"{name} is for {key} {value:g}, got {asked}")
    return program


def read_csv(path: Path, slices: tuple[float, ...] = ()) -> Program:
    """A program in torch's CSV form, called `csv:PATH`; with `slices`, of microbatches in these.

    Raises ProgramFileError, which names the file, and the row and column of a bad cell, and
    ShapeError where the file has no whole number of sliced microbatches.
    """
    try:
        program = from_csv(path.read_text(encoding="utf-8-sig"), f"{CSV_PREFIX}{path}")
    except OSError as error:
        raise ProgramFileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProgramFileError(f"{path}: {error}") from None
    num_written, num_slices = program.num_microbatches, max(1, len(slices))
    if num_written % num_slices:
        reason = f"{num_written} microbatches, which is no multiple of {num_slices} slices"
        raise ShapeError("slices.number", f"{program.schedule} has {reason}")
    return replace(program, slices=slices)
