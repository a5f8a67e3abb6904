"""The tables and lists of a report: runs, causes of idle time, failures, cautions, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas.api.types import is_bool, is_number

from ppbench.cautions import Caution
from ppbench.config.case import UNKNOWN, VARIABLE
from ppbench.display.cases import Axes, case_text, cautions_of
from ppbench.display.explanation import PART_MEANINGS, has_parts
from ppbench.display.units import (
    MIB,
    MISSING,
    NS_PER_MS,
    counted,
    held,
    held_share,
    is_missing,
    written,
)
from ppbench.errors import first_line
from ppbench.run.failures.post_mortem import in_words
from ppbench.store import Store

NOT_GIVEN = "none"
_AXIS_HEADINGS = {
    "world_size": "ranks",
    "num_microbatches": "microbatches",
    "seq_len": "seq len",
    "model_preset": "model",
}
_SHORT = 40  # characters of a value in a filter; hovering shows it in full
_FLIGHT_HEADINGS = {
    "rank": "rank",
    "hostname": "node",
    "process": "process",
    "phase": "phase",
    "step": "step",
    "action": "action",
    "waits_for": "waits for",
    "since_s": "for",
}
THEORY = "simulated with free transfers and equal stages (F = I = W) or the emulated times"


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number that it sorts by (None: by its text)."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Column:
    """A heading, its meaning, and the function that makes a run's cell."""

    heading: str
    meaning: str
    is_number: bool
    cell: Callable[[pd.Series], Cell]


@dataclass(frozen=True)
class Table:
    """Columns, and a row of cells per run, with the ids of its run and its case."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    run_ids: tuple[str, ...]
    case_ids: tuple[str, ...]


@dataclass(frozen=True)
class Cautioned:
    """A caution, its remedy, and the ids and names of the cases that carry it."""

    name: str
    remedy: str
    cases: tuple[tuple[str, str], ...]


def summary(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return a row per run: its varying settings, and the figures that any run has."""
    columns = [_setting(axis, runs) for axis in axes]
    if len(runs["launch"].unique()) > 1:
        columns.append(_figure("launch", "launch", "number of the launch of the workers", "{:.0f}"))
    columns.append(_word("status", "status", "whether the run succeeded"))
    figures = [
        f for f in _FIGURES if any(f.cell(run).number is not None for _, run in runs.iterrows())
    ]
    return _table([*columns, *figures, _CAUTIONS], runs)


def bubbles(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the three definitions of the bubble side by side."""
    return _table([*(_setting(axis, runs) for axis in axes), *_BUBBLES], runs)


def idle_parts(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the causes of idle time of the runs that store them, and the modelled step."""
    explained = runs.loc[[index for index, run in runs.iterrows() if has_parts(run)]]
    return _table([*(_setting(axis, runs) for axis in axes), *_PARTS], explained)


def cautioned(runs: pd.DataFrame, axes: Axes) -> list[Cautioned]:
    """Return every caution that a run carries, with its remedy, in order of severity."""
    carriers: dict[str, dict[tuple[str, str], None]] = {}
    for _, run in runs.iterrows():
        for name in cautions_of(run):
            case = str(run["case_id"]), case_text(run, axes)
            carriers.setdefault(name, {})[case] = None
    order = [caution.name for caution in Caution]
    names = sorted(carriers, key=lambda name: order.index(name) if name in order else len(order))
    return [Cautioned(name, _remedy(name), tuple(carriers[name])) for name in names]


def _remedy(name: str) -> str:
    known = Caution.__members__.get(name)
    return (
        known.remedy if known else "Unknown to this version of ppbench; a newer version wrote it."
    )


def _table(columns: Sequence[Column], runs: pd.DataFrame) -> Table:
    rows = tuple(tuple(column.cell(run) for column in columns) for _, run in runs.iterrows())
    ids = (tuple(runs[name].astype(str)) for name in ("run_id", "case_id"))
    return Table(tuple(columns), rows, *ids)


def _setting(axis: str, runs: pd.DataFrame) -> Column:
    has_numbers = all(place_of(value) is not None for value in runs[axis])

    def cell(run: pd.Series) -> Cell:
        return Cell(str(run[axis]), place_of(run[axis]))

    return Column(axis_heading(axis), axis, has_numbers, cell)


def _word(name: str, heading: str, meaning: str) -> Column:
    return Column(heading, meaning, False, lambda run: Cell(str(run[name])))


def _figure(name: str, heading: str, meaning: str, pattern: str, factor: float = 1.0) -> Column:
    def cell(run: pd.Series) -> Cell:
        value = run[name]
        number = None if is_missing(value) else float(value) * factor
        return Cell(written(value, pattern, factor), number)

    return Column(heading, meaning, True, cell)


def _interval(name: str, meaning: str) -> Column:
    """Return a column of 95 % intervals of the median; it sorts by their lower ends."""

    def cell(run: pd.Series) -> Cell:
        low, high = run.get(f"{name}_low"), run.get(f"{name}_high")
        if is_missing(low):
            return Cell("")
        return Cell(f"{written(low, '{:,.0f}')} to {written(high, '{:,.0f}')}", float(str(low)))

    return Column("95 %", meaning, True, cell)


_CAUTIONS = Column(
    "cautions", "reasons to doubt the figures", False, lambda run: Cell(", ".join(cautions_of(run)))
)
_HELD = Column(
    "held",
    "most microbatches whose activations one rank held, for its whole share of the model",
    True,
    lambda run: Cell(held(run), held_share(run)),
)
_FIGURES = (
    _figure("tokens_per_s", "tokens/s", "optimizer included; median over steps", "{:,.0f}"),
    _interval("tokens_per_s", "interval of the median over the run's own steps"),
    _figure(
        "step_ns", "step ms", "first to last action; median over steps", "{:,.1f}", 1 / NS_PER_MS
    ),
    _figure(
        "planned_step_ns", "planned ms", "simulated step of the emulation", "{:,.1f}", 1 / NS_PER_MS
    ),
    _figure("bubble_fraction", "bubble", "share of rank-time without compute", "{:.1f} %", 100),
    _figure("bubble_fraction_theory", "theory", THEORY, "{:.1f} %", 100),
    _figure("peak_memory_bytes", "peak MiB", "allocator peak, highest rank", "{:,.1f}", 1 / MIB),
    _HELD,
    _figure("mfu", "MFU", "model FLOPs over the devices' peak", "{:.1f} %", 100),
    _figure("energy_per_token_j", "J/token", "energy of the measured steps", "{:,.3g}"),
    _figure("last_loss", "loss", "per token, at a step that all runs reach", "{:.4f}"),
)
_BUBBLES = (
    _figure("bubble_fraction", "bubble_fraction", "share of rank-time", "{:.1f} %", 100),
    _figure("bubble_idle_over_ideal", "bubble_idle_over_ideal", "idle / compute", "{:.1f} %", 100),
    _figure(
        "bubble_max_stage_span",
        "bubble_max_stage_span",
        "relative to the longest rank",
        "{:.1f} %",
        100,
    ),
    _figure("bubble_fraction_theory", "theory", THEORY, "{:.1f} %", 100),
)
_PART_HEADINGS = {
    "structure": "structure",
    "imbalance": "imbalance",
    "transfer": "transfer",
    "jitter": "jitter",
    "launch_gap": "gaps",
}
"""Shorter than `PART_NAMES`, since nine columns beside the settings must fit a page."""
_PARTS = (
    _figure("bubble_mean", "idle", "share of rank-time, mean of all steps", "{:.1f} %", 100),
    *(
        _figure(f"bubble_{part}", heading, PART_MEANINGS[part], "{:.1f} %", 100)
        for part, heading in _PART_HEADINGS.items()
    ),
    _figure("step_ns", "step ms", "median over steps", "{:,.1f}", 1 / NS_PER_MS),
    _figure(
        "modelled_step_ns",
        "modelled",
        "replayed with its own mean costs and transfers",
        "{:,.1f}",
        1 / NS_PER_MS,
    ),
    _figure(
        "model_residual",
        "residual",
        "mean of the measured steps over the modelled step, minus 1",
        "{:+.1f} %",
        100,
    ),
)


@dataclass(frozen=True)
class Choice:
    """A value of an axis, as text, and how many cases have it."""

    text: str
    num_cases: int

    @property
    def shown(self) -> str:
        return self.text if len(self.text) <= _SHORT else f"{self.text[: _SHORT - 1]}…"


@dataclass(frozen=True)
class Filter:
    """An axis and all its values."""

    axis: str
    heading: str
    choices: tuple[Choice, ...]


def axis_heading(axis: str) -> str:
    """Return the heading of an axis, in a table or a filter."""
    return _AXIS_HEADINGS.get(axis, axis.replace("_", " "))


def value_text(value: object) -> str:
    """Format a setting's value without the name of its axis."""
    if is_bool(value):
        return "yes" if value else "no"
    text = str(value)
    return NOT_GIVEN if text in ("[]", "None", "nan") else text


def filters(runs: pd.DataFrame, axes: Axes) -> list[Filter]:
    """Return a filter per varying axis; numbers are sorted, words in the order of the runs."""
    cases = runs.drop_duplicates("case_id")
    return [Filter(axis, axis_heading(axis), _choices(cases[axis])) for axis in axes]


def case_list(runs: pd.DataFrame, axes: Axes) -> list[Mapping[str, object]]:
    """Return every case with the text of its value on each axis, for the page's script."""
    cases = runs.drop_duplicates("case_id")
    return [
        {"case_id": str(case["case_id"]), "axes": {axis: value_text(case[axis]) for axis in axes}}
        for _, case in cases.iterrows()
    ]


def _choices(values: pd.Series) -> tuple[Choice, ...]:
    distinct = list(dict.fromkeys(values))
    if all(place_of(value) is not None for value in distinct):
        distinct.sort(key=lambda value: place_of(value) or 0.0)
    counts = values.map(value_text).value_counts()
    texts = dict.fromkeys(value_text(value) for value in distinct)
    return tuple(Choice(text, int(counts[text])) for text in texts)


def place_of(value: object) -> float | None:
    """Return the number that a setting sorts by, 0 if it varies; None for words."""
    if value in (VARIABLE, UNKNOWN):
        return 0.0
    return float(str(value)) if is_number(value) and not is_bool(value) else None


@dataclass(frozen=True)
class Flight:
    """A table of what each rank was doing when it was last seen."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Failure:
    """A failed run: its headline and its full error."""

    run_id: str
    case_id: str
    case: str
    status: str
    rank: str  # `rank 1`; empty if it is unknown or in the headline
    headline: str
    error: str  # empty if the headline says it all
    flight: Flight | None


def failures(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Failure]:
    """Return the runs whose status is not `ok`."""
    return [_failure(store, run, axes) for _, run in runs[runs["status"] != "ok"].iterrows()]


def _failure(store: Store, run: pd.Series, axes: Axes) -> Failure:
    error = "" if is_missing(run["error"]) else str(run["error"]).strip()
    headline = first_line(error) or "no error was recorded"
    rank = "" if is_missing(run["error_rank"]) else f"rank {int(run['error_rank'])}"
    return Failure(
        str(run["run_id"]),
        str(run["case_id"]),
        case_text(run, axes),
        str(run["status"]),
        "" if rank in headline else rank,
        headline,
        error if error != headline else "",
        flight_of(store, run),
    )


def failure_counts(runs: pd.DataFrame) -> str:
    """Count the failures by status, as in `3 of 12 runs failed: 2 timeout, 1 oom`."""
    failed = runs.loc[runs["status"] != "ok", "status"]
    by_status = ", ".join(f"{count} {status}" for status, count in failed.value_counts().items())
    return f"{len(failed)} of {counted(len(runs), 'run')} failed: {by_status}."


def flight_of(store: Store, run: pd.Series) -> Flight | None:
    """Return what a run's ranks were doing; None if there is no record."""
    table = store.table("flight", [run["run_id"]])
    if table.empty:
        return None
    texts = in_words(table)
    rows = (
        tuple(_flight_cell(str(name), value) for name, value in row.items())
        for _, row in texts.iterrows()
    )
    return Flight(tuple(_FLIGHT_HEADINGS[str(name)] for name in texts), tuple(rows))


def _flight_cell(name: str, value: object) -> str:
    if is_missing(value) or value is pd.NA:
        return MISSING
    return f"{value:,.3f} s" if name == "since_s" else str(value)
