"""Which charts a report has, in which order, and how to read each: one entry per chart."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from ppbench.report import charts
from ppbench.report.cases import Axes, by_case, ok_runs
from ppbench.report.charts.idleness import PART_COLUMNS
from ppbench.report.charts.speed import has_scaling
from ppbench.store import Store


@dataclass(frozen=True)
class Chart:
    """A figure over all cases, with its heading and how to read it."""

    name: str
    heading: str
    explanation: str
    figure: go.Figure


def charts_of(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    """The charts that these runs (rows of `store.runs()`) have something to show in."""
    measured = ok_runs(runs)
    if measured.empty:
        return []
    return [
        _throughput(measured, axes),
        *_scaling(measured, axes),
        _bubble(measured, axes),
        *_memory(store, measured, axes),
        *_idle(measured, axes),
        *_steps(store, measured, axes),
    ]


def _throughput(runs: pd.DataFrame, axes: Axes) -> Chart:
    return Chart(
        "throughput",
        "Throughput",
        "Tokens of a step over its full time, optimizer included. Lines: from the slowest to the "
        "fastest launch, or where the median lies (95 %) by the steps of an only launch.",
        charts.throughput(runs, axes),
    )


def _scaling(runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    cases = by_case(runs, axes)
    if not has_scaling(cases, axes):
        return []
    words = (
        "Tokens/s of each rank over those of one rank alone; where that was not measured, of the "
        "fewest ranks that were. Everything but the number of ranks is the same. Emulated ranks "
        "each take the time that was set, so their model grows with them; there, tokens/s "
        "themselves are compared."
    )
    return [Chart("scaling", "Scaling efficiency", words, charts.scaling(runs, axes))]


def _bubble(runs: pd.DataFrame, axes: Axes) -> Chart:
    return Chart(
        "bubble",
        "Bubble",
        "Bars: the share of rank-time without compute, as measured. Diamonds: what the "
        "schedule leaves idle even with free transfers and equal stages, or those emulated.",
        charts.bubble(runs, axes),
    )


def _memory(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    told = runs[runs["peak_memory_bytes"].notna()]
    if told.empty:
        return []
    ranks = store.table("ranks", told["run_id"])
    return [
        Chart(
            "memory",
            "Peak memory",
            "Bars: the rank that needs most. Points: every rank, rank 0 first. Diamonds: what the "
            "program and the bytes of a few of its actions predict of each rank.",
            charts.peak_memory(told, ranks, axes),
        ),
        Chart(
            "pareto",
            "Throughput against memory",
            "Ringed: no other case is both at least as fast and as small. The line: the most "
            "tokens/s that fit in so much memory. Oversubscribed cases (open) do not count unless "
            "all are.",
            charts.pareto(told, axes),
        ),
    ]


def _idle(runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    if runs.reindex(columns=list(PART_COLUMNS.values())).dropna().empty:
        return []
    words = (
        "Shares of rank-time, the parts of the bubble stacked: what the schedule leaves idle by "
        "itself, and what else adds to it. A part left of zero saves time."
    )
    return [Chart("idle", "Where the idle time went", words, charts.idle(runs, axes))]


def _steps(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    steps = store.table("steps", runs["run_id"])
    if steps["step_with_optimizer_ns"].dropna().empty:
        return []
    words = (
        "Full times of the measured steps; of fewer than 8, each by itself. A box holds the "
        "middle half, its whiskers the others but for outliers. Each panel has its own scale, "
        "which need not begin at zero."
    )
    return [Chart("steps", "Step times", words, charts.step_times(runs, steps, axes))]
