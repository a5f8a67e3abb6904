"""Runs grouped into cases: their varying settings, their names, their figures over launches.

The launch is the replicate, so the figure of a case is the median over its launches, never an
average of all their steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd
from pandas.api.types import is_bool

from ppbench.cautions import Caution
from ppbench.config.case import TIMES, Case
from ppbench.display.units import is_missing
from ppbench.runtimes import ENGINE

Axes = Sequence[str]
Row: TypeAlias = Mapping[Hashable, Any] | pd.Series
SETTINGS = tuple(field.name for field in dataclasses.fields(Case))
FIGURES = (
    "tokens_per_s",
    "step_ns",
    "bubble_fraction",
    "bubble_fraction_theory",
    "peak_memory_bytes",
)
KNOBS = (
    "schedule",
    "runtime",
    "world_size",
    "replicas",
    "num_microbatches",
    "stages_per_rank",
    "slices_number",
    "slices_lengths",
    "memory_limit",
    "program_digest",
    "model_partition",
    "model_split",
    "model_split_points",
    *("model_layers", "model_before_layers", "model_after_layers"),
    "data_num_workers",
    "train_microbatch_size",
    "train_recompute",
    "train_recompute_stages",
    "train_compile",
    "launch_threads_per_rank",
    "transfer_policy",
    "transfer_look_ahead",
    *(name for name in SETTINGS if name.startswith("sharding_")),
)
"""Settings that change how the training runs; all others change the work itself."""
INTERVAL = ("tokens_per_s_low", "tokens_per_s_high")
SPREAD_OF_LAUNCHES, SPREAD_OF_STEPS = "launches", "steps"
_COUNTED = {
    "world_size": ("rank", "ranks"),
    "replicas": ("replica", "replicas"),
    "num_microbatches": ("microbatch", "microbatches"),
    "seq_len": ("token", "tokens"),
    "stages_per_rank": ("stage per rank", "stages per rank"),
    "slices_number": ("slice", "slices"),
}
_SECTIONS = ("model_", "data_", "train_", "launch_", "transfer_", "slices_", "emulated_")
FOLLOW_SCHEDULE = ("stages_per_rank", "program_digest", "slices_number", "slices_lengths")
"""Settings that usually depend on the schedule."""
NOT_GIVEN = "[]"  # an empty list, such as the stage times of a run that is not emulated
_NAMED_BY_VALUE = ("schedule", "device", "model_preset", "model_dtype", "train_optimizer")
_USUAL = ("schedule", "world_size", "num_microbatches", "seq_len")


def varying_axes(runs: pd.DataFrame) -> tuple[str, ...]:
    """Return the settings that differ between the runs, in the order of `Case`.

    Settings that differ only because the schedules do are left out, and so are the times of
    emulated stages where the other settings say which times a case has.
    """
    varying = [name for name in SETTINGS if len(runs[name].astype(str).unique()) > 1]
    by_schedule = runs.groupby("schedule")
    implied = [n for n in FOLLOW_SCHEDULE if by_schedule[n].nunique().max() == 1]
    varying = [name for name in varying if name not in implied]
    others = [name for name in varying if name not in TIMES]
    if others and "device" in others:
        by_others = runs.groupby(others, dropna=False)
        varying = [n for n in varying if n in others or by_others[n].nunique().max() > 1]
    return tuple(varying)


def work_axes(axes: Axes) -> tuple[str, ...]:
    """Return the axes along which cases do different work, so that tokens/s do not compare."""
    return tuple(axis for axis in axes if axis not in KNOBS)


def axis_text(axis: str, value: object) -> str:
    """Format a setting: `2 ranks`, `variable length`, `1f1b`, `learning rate 0.001`."""
    if axis == "seq_len" and isinstance(value, str):
        return f"{value} length"
    if axis in _COUNTED:
        one, many = _COUNTED[axis]
        return f"{value} {one if value == 1 else many}"
    if axis in _NAMED_BY_VALUE:
        return str(value)
    section = next((s for s in _SECTIONS if axis.startswith(s)), "")
    name = axis.removeprefix(section).replace("_", " ")
    if is_bool(value) or value == "":
        return name if value else f"no {name}"
    return f"{name} {value}"


def settings_text(row: Row, axes: Iterable[str]) -> str:
    """Format the given settings of a run or case: `2 ranks, 8 microbatches, 128 tokens`."""
    given = (axis for axis in axes if row[axis] not in (NOT_GIVEN, ""))
    return ", ".join(axis_text(axis, row[axis]) for axis in given)


def case_text(row: Row, axes: Axes) -> str:
    """Name a case by its varying settings or, if there are none, by the usual ones."""
    return settings_text(row, axes or usual_axes(row, _USUAL))


def usual_axes(row: Row, axes: Axes) -> Axes:
    """Return these settings, and the runtime if it is not the engine, several slices and replicas.

    The runtime follows the first, slices, replicas and what these share come last.
    """
    first, *rest = axes
    runtime = () if row.get("runtime", ENGINE) == ENGINE else ("runtime",)
    cut = ("slices_number",) if row.get("slices_number", 1) > 1 else ()
    shared = ("replicas", "sharding_policy") if row.get("replicas", 1) > 1 else ()
    return (first, *runtime, *rest, *cut, *shared)


def cautions_of(row: Row) -> list[str]:
    """Return the names of the cautions that a run carries."""
    names = row["cautions"]
    return [] if is_missing(names) else [name for name in str(names).split(",") if name]


_SHARED = frozenset({Caution.oversubscribed.name, Caution.time_sliced.name})


def is_oversubscribed(row: Row) -> bool:
    """Whether ranks shared cores or a GPU, so that bubble and step time mean nothing."""
    return not _SHARED.isdisjoint(cautions_of(row))


def is_time_sliced(row: Row) -> bool:
    """Whether ranks shared a GPU, so that nobody can say when one of them was idle."""
    return Caution.time_sliced.name in cautions_of(row)


def is_not_finite(row: Row) -> bool:
    """Whether a loss or gradient was NaN or infinite, which makes the speed meaningless."""
    return Caution.not_finite.name in cautions_of(row)


FAILED_FINALLY = ("oom", "error", "timeout", "invalid")
"""Failures caused by the case itself: it would fail again. A crash may have another cause."""
NOT_FINITE = "not finite"
"""Replaces the status `ok` of such a run wherever a verdict would depend on its figures."""


def without_not_finite(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs, with a failed status and an error for those that are not finite.

    Columns needed: `status`, `error`, `cautions`, and if known `WHERE_NOT_FINITE`.
    """
    is_broken = [row["status"] == "ok" and is_not_finite(row) for row in runs.to_dict("records")]
    if not any(is_broken):
        return runs
    errors = []
    for row in runs[is_broken].to_dict("records"):
        step, rank, what = (row[name] for name in WHERE_NOT_FINITE)
        is_known = not (is_missing(step) or is_missing(rank))
        where = f", first in step {step:.0f} on rank {rank:.0f}" if is_known else ""
        errors.append(f"{what if is_known else 'a loss or gradient'} was NaN or infinite{where}")
    changed = runs.astype({"status": object, "error": object})
    changed.loc[is_broken, "status"] = NOT_FINITE
    changed.loc[is_broken, "error"] = errors
    return changed


WHERE_NOT_FINITE = ("not_finite_step", "not_finite_rank", "not_finite_what")


def ok_runs(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["status"] == "ok"]


def by_case(runs: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Return one row per case among the ok runs, in the order of the runs.

    Columns: `case_id`, the settings, `FIGURES` (medians over launches), the spread of
    `tokens_per_s` from `low` to `high` (over launches or, for a single launch, over its steps, as
    `spread` says), `is_oversubscribed` and `is_not_finite` (any launch), `num_launches`, and
    `text`, the name of the case.
    """
    measured = ok_runs(runs)
    groups = measured.groupby("case_id", sort=False)
    cases = groups[list(SETTINGS)].first()
    cases[list(FIGURES)] = groups[list(FIGURES)].median()
    rows = measured[["cautions"]].to_dict("records")
    for has_caution in (is_oversubscribed, is_not_finite):
        carriers = measured.loc[[has_caution(row) for row in rows], "case_id"]
        cases[has_caution.__name__] = cases.index.isin(carriers)
    cases["num_launches"] = groups.size()  # two sweeps may number launches alike
    # The range over launches or, for a single launch, its stored 95 % interval.
    speed, has_launches = groups["tokens_per_s"], groups.size() > 1
    low, high = (groups[name].first().astype(float) for name in INTERVAL)
    spread = pd.Series(SPREAD_OF_STEPS, index=low.index)
    cases["low"] = low.mask(has_launches, speed.min())
    cases["high"] = high.mask(has_launches, speed.max())
    cases["spread"] = spread.mask(has_launches, SPREAD_OF_LAUNCHES)
    cases["text"] = [case_text(row, axes) for row in cases.to_dict("records")]
    return cases.reset_index()
