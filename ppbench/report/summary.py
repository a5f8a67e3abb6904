"""The tables of a report: one row per run, with the value that each cell sorts by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.cautions import Caution
from ppbench.report.cases import Axes, case_text, cautions_of
from ppbench.report.explanation import PART_MEANINGS, has_parts
from ppbench.report.filters import axis_heading, place_of
from ppbench.report.units import MIB, NS_PER_MS, held, held_share, is_missing, written

THEORY = "simulated, free transfers: as emulated, else equal stages with F = I = W"


@dataclass(frozen=True)
class Cell:
    """Text to show, and the number that it sorts by (None: by its text)."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and how a run's cell is made."""

    heading: str
    meaning: str
    is_number: bool
    cell: Callable[[pd.Series], Cell]


@dataclass(frozen=True)
class Table:
    """Columns, and one tuple of cells per run; which run and which case each row is of."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    run_ids: tuple[str, ...]
    case_ids: tuple[str, ...]


@dataclass(frozen=True)
class Cautioned:
    """A caution, its remedy, and the cases that carry it: their ids, and what they are called."""

    name: str
    remedy: str
    cases: tuple[tuple[str, str], ...]


def summary(runs: pd.DataFrame, axes: Axes) -> Table:
    """Every run with its varying settings, and the figures that some run has."""
    columns = [_setting(axis, runs) for axis in axes]
    if len(runs["launch"].unique()) > 1:
        columns.append(_figure("launch", "launch", "which start of the workers", "{:.0f}"))
    columns.append(_word("status", "status", "whether the run succeeded"))
    told = [
        f for f in _FIGURES if any(f.cell(run).number is not None for _, run in runs.iterrows())
    ]
    return _table([*columns, *told, _CAUTIONS], runs)


def bubbles(runs: pd.DataFrame, axes: Axes) -> Table:
    """The three definitions of the bubble side by side, for the ok runs."""
    return _table([*(_setting(axis, runs) for axis in axes), *_BUBBLES], runs)


def idle_parts(runs: pd.DataFrame, axes: Axes) -> Table:
    """Where the idle time went, for the ok runs that tell; and what was predicted of each."""
    told = runs.loc[[index for index, run in runs.iterrows() if has_parts(run)]]
    return _table([*(_setting(axis, runs) for axis in axes), *_PARTS], told)


def cautioned(runs: pd.DataFrame, axes: Axes) -> list[Cautioned]:
    """Every caution that some run carries, with its remedy, in order of severity."""
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
    return known.remedy if known else "Not known to this version of ppbench; a newer one wrote it."


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
    """The 95 % interval of a figure's median; sorts by its lower end."""

    def cell(run: pd.Series) -> Cell:
        low, high = run.get(f"{name}_low"), run.get(f"{name}_high")
        if is_missing(low):
            return Cell("")
        return Cell(f"{written(low, '{:,.0f}')} to {written(high, '{:,.0f}')}", float(str(low)))

    return Column("95 %", meaning, True, cell)


_CAUTIONS = Column(
    "cautions", "what to beware of", False, lambda run: Cell(", ".join(cautions_of(run)))
)
_HELD = Column(
    "held",
    "most microbatches held by one rank, of its whole share of the model",
    True,
    lambda run: Cell(held(run), held_share(run)),
)
_FIGURES = (
    _figure("tokens_per_s", "tokens/s", "optimizer included; median over steps", "{:,.0f}"),
    _interval("tokens_per_s", "where the median lies, by the spread of the run's own steps"),
    _figure(
        "step_ns", "step ms", "first to last action; median over steps", "{:,.1f}", 1 / NS_PER_MS
    ),
    _figure(
        "planned_step_ns", "planned ms", "step, simulated as emulated", "{:,.1f}", 1 / NS_PER_MS
    ),
    _figure("bubble_fraction", "bubble", "share of rank-time without compute", "{:.1f} %", 100),
    _figure("bubble_fraction_theory", "in theory", THEORY, "{:.1f} %", 100),
    _figure("peak_memory_bytes", "peak MiB", "allocator peak, highest rank", "{:,.1f}", 1 / MIB),
    _HELD,
    _figure("mfu", "MFU", "model FLOPs over the devices' peak", "{:.1f} %", 100),
    _figure("energy_per_token_j", "J/token", "energy of the measured steps", "{:,.3g}"),
    _figure("last_loss", "loss", "per token, of a step that every run makes", "{:.4f}"),
)
_BUBBLES = (
    _figure("bubble_fraction", "bubble_fraction", "share of rank-time", "{:.1f} %", 100),
    _figure("bubble_idle_over_ideal", "bubble_idle_over_ideal", "idle / compute", "{:.1f} %", 100),
    _figure(
        "bubble_max_stage_span", "bubble_max_stage_span", "by the longest rank", "{:.1f} %", 100
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
"""Shorter than `PART_NAMES`: nine columns beside the settings have to fit a page."""
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
        "mean of the measured steps over that, less 1",
        "{:+.1f} %",
        100,
    ),
)
