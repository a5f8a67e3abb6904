"""Damage to files of a store: its record, and the checks of rows.

The reader leaves damaged files out and continues; each file left out is one `DamagedFile`. Rows are
checked only in files without checksums. Every check is one operation on whole columns; columns that
were not read are not checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.plan.action import OPS, Op
from engine.plan.lower import Policy
from engine.plan.program import from_json
from engine.plan.spans import Lane
from ppbench.console import warn
from ppbench.store.columns import RUN_ID, SCHEMA_VERSION, TABLES
from ppbench.store.snapshot import check_there

Skip = Callable[[str], None]
"""A function that receives a problem as a line of text."""
_MOST_RUNS_NAMED = 3
_LONGEST_REASON = 200
_FEW_ROWS = 100_000  # beyond which threads are worth their start
MEASURE_AGAIN = "remove it, and measure again with: ppbench sweep FILE"
"""The fix for a file whose rows are lost."""


class DamagedError(Exception):
    """A file of the store cannot be used; the message is the reason."""

    def __init__(self, reason: object, fix: str = MEASURE_AGAIN) -> None:
        super().__init__(brief(reason))
        self.fix = fix


@dataclass(frozen=True)
class DamagedFile:
    """A file of the store, or some rows of it, that was left out."""

    path: Path
    table: str
    reason: str
    run_ids: tuple[str, ...] = ()
    """The runs whose rows are lost; empty where that is unknown."""
    fix: str = MEASURE_AGAIN

    def __str__(self) -> str:
        return f"{self.path}: damaged, {self._lost()} left out: {self.reason}; {self.fix}"

    def _lost(self) -> str:
        rows = f"its rows of {self.table}"
        if not self.run_ids or self.run_ids == (self.path.stem,):
            return f"{rows} are"
        return f"{rows} for {names_of(self.run_ids)} are"


class DamageLog:
    """All damage that a reader found, each reported once."""

    def __init__(self, on_skip: Skip) -> None:
        self._on_skip = on_skip
        self._files: dict[str, DamagedFile] = {}

    @property
    def files(self) -> list[DamagedFile]:
        """Everything that was left out so far."""
        return list(self._files.values())

    def report(self, damage: DamagedFile) -> None:
        """Record damage, and pass it to `on_skip` if it is new."""
        text = str(damage)
        if text not in self._files:
            self._files[text] = damage
            self._on_skip(text)

    def leave_out(
        self, path: Path, name: str, error: DamagedError, run_ids: Sequence[str] = ()
    ) -> None:
        """Report a file, or some of its runs. Raises VanishedFileError if it is gone meanwhile."""
        check_there(path)
        self.report(DamagedFile(path, name, str(error), tuple(run_ids), error.fix))


def names_of(run_ids: Iterable[str]) -> str:
    """A few runs by name, and how many more there are."""
    ids = list(run_ids)
    few = ", ".join(ids[:_MOST_RUNS_NAMED])
    more = len(ids) - _MOST_RUNS_NAMED
    return f"run{'s' if len(ids) > 1 else ''} {few}" + (f" and {more} more" if more > 0 else "")


def brief(reason: object) -> str:
    """The first line of an error, of bounded length, its control characters escaped."""
    text = str(reason) or type(reason).__name__
    line = next((line for line in text.splitlines() if line.strip()), text).strip().rstrip(".")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return plain if len(plain) <= _LONGEST_REASON else f"{plain[: _LONGEST_REASON - 1]}…"


class ConsoleNote:
    """Warns once of each problem of a store."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, problem: str) -> None:
        """Warn unless that was done."""
        if problem not in self._seen:
            self._seen.add(problem)
            warn(problem)


STATUSES = ("ok", "oom", "error", "crash", "timeout", "invalid", "interrupted")
_VERSION = "schema_version"
_SPAN = ("step", "rank", "lane", "stage", "op", "microbatch", "start_ns", "end_ns")
NEEDED: dict[str, tuple[str, ...]] = {
    "runs": ("status",),
    "steps": ("step",),
    "ranks": ("rank",),
    "spans": _SPAN,
    "planned": _SPAN,
    "attribution": ("step", "rank", "idle_ns"),
    "edges": ("source", "target"),
    "collectives": ("rank", "stage", "op", "replica"),
    "memory": ("rank", "time_ns", "num_bytes"),
    "telemetry": ("time_ns", "hostname", "device"),
    "flight": ("rank",),
}
"""Columns besides `run_id` that every version of a table has and that are never null."""
_KEYS: dict[str, tuple[str, ...]] = {
    "runs": (RUN_ID,),
    "steps": (RUN_ID, "step"),
    "ranks": (RUN_ID, "replica", "rank"),
    "spans": (RUN_ID, "replica", *_SPAN),
    "planned": (RUN_ID, "replica", *_SPAN),
    "attribution": (RUN_ID, "step", "replica", "rank"),
    "edges": (RUN_ID, "replica", "source", "target"),
    "collectives": (RUN_ID, "replica", "stage", "op"),
    "memory": (),  # a sample may be recorded twice
    "telemetry": (),
    "flight": (RUN_ID, "replica", "rank"),
}
"""Columns that are unique together."""
_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "runs": {"status": STATUSES, "transfer_policy": tuple(Policy)},
    "spans": {"op": tuple(Op), "lane": tuple(Lane)},
    "collectives": {"op": (Op.UNSHARD, Op.REDUCE_GRAD)},
    "planned": {"op": tuple(Op), "lane": tuple(Lane)},
}
_LOSSES = frozenset({"loss", "first_loss", "last_loss"})  # may be infinite: training diverged
_MAY_BE_NEGATIVE = frozenset(
    {
        *("stage", "microbatch", "seq_len", "error_rank", "waits_for_rank", "model_residual"),
        *("clock_offset_ns", "clock_drift_ppb", "model_seed", "data_seed", "emulated_seed"),
        *("measure_order_seed", "time_ns", "start_ns", "end_ns", "since_ns", "until_ns"),
        *("structure_ns", "imbalance_ns", "transfer_ns", "jitter_ns", "launch_gap_ns"),
        *("collective_ns", "skew_ns", "bubble_collective", "bubble_skew"),
        *("bubble_structure", "bubble_imbalance", "bubble_transfer", "bubble_jitter"),
        *("bubble_launch_gap", "bubble_fraction", "bubble_max_stage_span", "idle_fraction"),
        *("bubble_idle_over_ideal", "bubble_mean", "bubble_fraction_theory", "idle_ns"),
        *("modelled_bubble_fraction", "warmup_ns", "steady_ns", "cooldown_ns", "temperature_c"),
        *("gpu_temperature_c", _VERSION, "waiting_ns", *_LOSSES),
    }
)
_MOST_RANKS = 2**20
_MOST_NS = 2**53  # a hundred days; larger numbers are inexact as floats
_COUNTED = (
    *("rank", "stage", "world_size", "num_stages", "stages_per_rank", "source", "target"),
    *("source_rank", "target_rank", "num_microbatches", "microbatch", "error_rank", "replica"),
)
_TIMES = ("start_ns", "end_ns", "time_ns", "step_ns", "step_with_optimizer_ns", "optimizer_ns")
_MOST = {**dict.fromkeys(_COUNTED, _MOST_RANKS), **dict.fromkeys(_TIMES, _MOST_NS)}
_LISTS_OF_NUMBERS = (
    *("warmup_step_ns", "layers_per_stage", "parameters_per_stage", "stage_shares"),
    *("cores", "stages"),
)
_LISTS = (
    "last_actions",
    "settings_told",
    "replica_costs_ns",
    "model_split_points",
    "train_recompute_stages",
    "emulated_F_ms",
    "emulated_I_ms",
    "emulated_W_ms",
    "emulated_link_ms",
    "emulated_gather_ms",
    "emulated_reduce_ms",
    "emulated_replica_factors",
)
_OF_TABLES = {name: frozenset(column.name for column in TABLES[name]) for name in TABLES}


@dataclass(frozen=True)
class Flaw:
    """Invalid rows, and the reason."""

    reason: str
    is_bad: pa.ChunkedArray  # by row


def check_columns(names: Sequence[str], table: str) -> None:
    """Raise DamagedError for a file that lacks columns of its table, or has another table's."""
    missing = [name for name in (RUN_ID, *NEEDED[table]) if name not in names]
    if missing:
        raise DamagedError(f"it has no column {missing[0]}, which every file of {table} has")
    unknown = set(names) - _OF_TABLES[table]
    if unknown:  # of a later version, or of another table
        others = [other for other, known in _OF_TABLES.items() if known.issuperset(names)]
        if others:
            raise DamagedError(f"it holds rows of {others[0]}, not of {table}")


def check_version(rows: pa.Table) -> None:
    """Raise DamagedError for rows of an unknown version, whose columns may differ in meaning."""
    if _VERSION not in rows.column_names:
        return
    newest = pc.max(rows[_VERSION]).as_py()
    if newest is None:
        return
    if not isinstance(newest, int) or newest < 1:
        raise DamagedError(f"its schema_version is {newest}, which no version of ppbench wrote")
    if newest > SCHEMA_VERSION:
        raise DamagedError(
            f"a later version of ppbench wrote it (schema {newest}; this one reads up to "
            f"{SCHEMA_VERSION})",
            fix="update ppbench to read it",
        )


def flaws_in(rows: pa.Table, table: str) -> Iterator[Flaw]:
    """All flaws in rows of a table, which have the documented types."""
    if not rows.num_rows:
        return
    columns = {field.name: rows[field.name] for field in rows.schema}
    found = [
        *_nulls(columns, table),
        *_unknown_words(columns, table),
        *_impossible_numbers(columns),
        *_backwards(columns),
        *_not_json(columns),
    ]
    yield from (flaw for flaw in found if pc.any(flaw.is_bad).as_py())
    if (again := _repeated(rows, table)) is not None:
        yield Flaw("it has the same row twice", again)


def check_text(rows: pa.Table) -> None:
    """Raise ArrowException for text that is not UTF-8, and for offsets outside the data."""
    rows.validate(full=True)


def _nulls(columns: dict[str, pa.ChunkedArray], table: str) -> Iterator[Flaw]:
    for name in NEEDED[table]:
        if name in columns and columns[name].null_count:
            yield Flaw(f"{name} is missing in some row", columns[name].is_null())


def _unknown_words(columns: dict[str, pa.ChunkedArray], table: str) -> Iterator[Flaw]:
    for name, words in _CHOICES.get(table, {}).items():
        if name in columns:
            is_known = pc.is_in(columns[name], value_set=pa.array([*words, None], pa.string()))
            yield Flaw(f"some {name} is none of {', '.join(words)}", pc.invert(is_known))


def _impossible_numbers(columns: dict[str, pa.ChunkedArray]) -> Iterator[Flaw]:
    for name, cells in columns.items():
        is_float = pa.types.is_floating(cells.type)
        if not (is_float or pa.types.is_integer(cells.type)) or cells.null_count == len(cells):
            continue
        if is_float and name not in _LOSSES:
            yield Flaw(f"some {name} is not finite", _or_false(pc.invert(pc.is_finite(cells))))
        if name not in _MAY_BE_NEGATIVE:
            yield Flaw(f"some {name} is negative", _or_false(pc.less(cells, 0)))
        if name in _MOST:
            is_bad = pc.greater(pc.abs_checked(cells), _MOST[name])
            yield Flaw(f"some {name} is beyond {_MOST[name]:,}", _or_false(is_bad))


def _backwards(columns: dict[str, pa.ChunkedArray]) -> Iterator[Flaw]:
    if "start_ns" in columns and "end_ns" in columns:
        is_bad = pc.less(columns["end_ns"], columns["start_ns"])
        yield Flaw("some action ends before it starts", _or_false(is_bad))


def _not_json(columns: dict[str, pa.ChunkedArray]) -> Iterator[Flaw]:
    for name, is_as_expected in _CONTENTS.items():
        if name not in columns or columns[name].null_count == len(columns[name]):
            continue
        texts = columns[name].unique().to_pylist()
        bad = [text for text in texts if text is not None and not _holds(text, is_as_expected)]
        if bad:
            is_bad = pc.is_in(columns[name], value_set=pa.array(bad, pa.string()))
            yield Flaw(f"{name} cannot be read", is_bad)


def _holds(text: str, is_as_expected: Callable[[str], bool]) -> bool:
    try:
        return is_as_expected(text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return False


def _is_list(text: str) -> bool:
    return isinstance(json.loads(text), list)


def _is_list_of_numbers(text: str) -> bool:
    data = json.loads(text)
    return isinstance(data, list) and all(map(_is_number, data))


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(float(str(value)))


def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _are_costs(text: str) -> bool:
    """Whether a text is an object of ops, each with the cost of every stage or null."""
    costs = json.loads(text)
    ops = set(map(OPS.index, costs))
    values = [value for by_stage in costs.values() for value in by_stage]
    return bool(ops) and all(value is None or _is_number(value) for value in values)


def _is_program(text: str) -> bool:
    """Whether a text is a valid program."""
    program = from_json(text)
    return program.num_microbatches > 0 and program.world_size > 0


_CONTENTS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(_LISTS, _is_list),
    **dict.fromkeys(_LISTS_OF_NUMBERS, _is_list_of_numbers),
    "environment": _is_object,
    "device_variables": _is_object,
    "op_costs_ns": _are_costs,
    "program": _is_program,
}
"""Checks of text columns."""


def _repeated(rows: pa.Table, table: str) -> pa.ChunkedArray | None:
    """Whether each row repeats an earlier one; None if none does."""
    keys = [name for name in _KEYS[table] if name in rows.column_names]
    if keys != list(_KEYS[table]) or not keys or rows.num_rows < 2:
        return None
    places = pa.array(np.arange(rows.num_rows))
    firsts = (
        rows.select(keys)
        .append_column("_place", places)
        .group_by(keys, use_threads=rows.num_rows > _FEW_ROWS)
        .aggregate([("_place", "min")])["_place_min"]
    )
    if len(firsts) == rows.num_rows:
        return None
    return pa.chunked_array([pc.invert(pc.is_in(places, value_set=firsts.combine_chunks()))])


def _or_false(mask: pa.ChunkedArray) -> pa.ChunkedArray:
    return mask.fill_null(False)
