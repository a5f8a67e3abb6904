"""The program that a command line asks for, legal and of a size that can be planned; or why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS
from engine.plan.lower import lower
from engine.plan.program import Program, loop_placement, v_placement
from engine.plan.rules import ProgramError, check
from engine.plan.schedules.formulae import Shape
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    ShapeError,
    UnknownScheduleError,
    build_program,
    find_schedule,
    known_names,
    read_csv,
)
from ppbench.errors import UsageError, nearest
from ppbench.planning.prediction import no_garbage

MOST_ACTIONS = 20_000_000
"""Some 6 GB when simulated."""
_OPTIONS = {
    "world_size": "--ranks",
    "num_microbatches": "--microbatches",
    "stages_per_rank": "--stages-per-rank",
}


class Wanted(NamedTuple):
    """A schedule by name, or `csv:PATH`, and its shape; what is None the schedule or file knows."""

    schedule: str
    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None


def program_of(wanted: Wanted) -> Program:
    """The program, checked by all rules. Raises UsageError."""
    try:
        shape = _shape_of_file(wanted) if wanted.schedule.startswith(CSV_PREFIX) else _shape(wanted)
        with no_garbage():
            program = build_program(
                wanted.schedule, shape.world_size, shape.num_microbatches, wanted.stages_per_rank
            )
            check(program)
            if program.has_transfers:
                lower(program)
    except UnknownScheduleError:
        hint = nearest(wanted.schedule, known_names())
        raise UsageError(f'unknown schedule "{wanted.schedule}"{hint}') from None
    except ShapeError as error:
        raise UsageError(f"{_OPTIONS[error.key]}: {error}{_fix(wanted, error)}") from None
    except (ValueError, OSError) as error:
        raise _unusable(wanted.schedule, error) from None
    return program


def _shape(wanted: Wanted) -> Shape:
    """Of a registered schedule. Raises UsageError where a number is missing or out of range."""
    allowed = find_schedule(wanted.schedule).stages_per_rank
    v = allowed.default if wanted.stages_per_rank is None else wanted.stages_per_rank
    numbers = {"--ranks": wanted.ranks, "--microbatches": wanted.microbatches}
    for option, value in {**numbers, "--stages-per-rank": v}.items():
        if value is None:
            raise UsageError(f"{option}: {wanted.schedule} needs it; such as {option} 4")
        if value < 1:
            raise UsageError(f"{option}: must be at least 1, got {value}")
    shape = Shape(int(wanted.ranks or 0), v, int(wanted.microbatches or 0))
    _refuse_absurd(shape)
    return shape


def _refuse_absurd(shape: Shape) -> None:
    p, v, m = shape
    if (num_actions := 3 * p * v * m) > MOST_ACTIONS:
        shares = f"{p:,} ranks x {v:,} stages per rank x {m:,} microbatches"
        what = f"{shares} make up to {num_actions:,} actions, too many to plan"
    elif (num_places := p * p * v) > MOST_ACTIONS:
        what = f"{p:,} ranks x {p * v:,} stages = {num_places:,} are too many to plan"
    else:
        return
    raise UsageError(f"{what}; at most {MOST_ACTIONS:,}; use smaller numbers")


def _shape_of_file(wanted: Wanted) -> Shape:
    """As asked for, and as the file says where nothing is; `build_program` compares the two."""
    p, m = wanted.ranks, wanted.microbatches
    if p is None or m is None:
        program = read_csv(Path(wanted.schedule.removeprefix(CSV_PREFIX)))
        p = program.world_size if p is None else p
        m = program.num_microbatches if m is None else m
    return Shape(p, 1, m)


def _fix(wanted: Wanted, error: ShapeError) -> str:
    """What would do instead."""
    if wanted.schedule.startswith(CSV_PREFIX):
        return "; leave it out"
    if error.key == "stages_per_rank":
        allowed = find_schedule(wanted.schedule).stages_per_rank
        return f"; leave it out for {allowed.default}"
    constraint = find_schedule(wanted.schedule).constraint
    if constraint is None or wanted.ranks is None or wanted.microbatches is None:
        return ""
    p, m = wanted.ranks, wanted.microbatches
    fitting = [n for n in range(1, m + 2 * p + 1) if constraint.is_met(Shape(p, 1, n))]
    below, above = [n for n in fitting if n < m][-1:], [n for n in fitting if n > m][:1]
    return f"; {' or '.join(map(str, below + above))} would do"


def _unusable(name: str, error: ValueError | OSError) -> UsageError:
    """A file that cannot be read, or a program that breaks a rule."""
    path = Path(name.removeprefix(CSV_PREFIX))
    if isinstance(error, OSError):
        return UsageError(f"{path}: cannot be read: {error.strerror or error}")
    return UsageError(str(error))


def program_of_file(path: Path, max_held: int | None = None) -> Program:
    """A CSV file's program, as it is, checked by all rules. Raises UsageError.

    What breaks a rule is shown where it stands in the file, its transfers among it.
    """
    try:
        program = replace(read_csv(path), schedule=str(path))
        with no_garbage():
            check(program, max_held)
    except ProgramError as error:
        raise UsageError(str(_placed_in_row(error, program))) from None
    except (ValueError, OSError) as error:
        raise _unusable(str(path), error) from None
    return program


def _placed_in_row(error: ProgramError, program: Program) -> ProgramError:
    """The rules leave transfers aside, and so count positions without them."""
    row = program.actions[error.rank]
    positions = [n for n, action in enumerate(row) if action.op in COMPUTE_OPS]
    return ProgramError(program, error.rank, [*positions, len(row)][error.position], error.reason)


def placement_word(program: Program) -> str:
    """`loop`, `v`, or `own` where the stages are placed in no known way."""
    p, num_stages = program.world_size, program.num_stages
    for word, place in (("loop", loop_placement), ("v", v_placement)):
        if num_stages % p == 0 and program.placement == place(p, num_stages // p):
            return word
    return "own"
