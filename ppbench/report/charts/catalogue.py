"""The charts of a report in their order, each with a note on how to read it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ppbench.display.cases import Axes, by_case, ok_runs
from ppbench.report import charts
from ppbench.report.charts.speed import has_scaling, parts_of_runs
from ppbench.report.scripts import Picture
from ppbench.store import Store


@dataclass(frozen=True)
class Chart:
    """A figure over all cases, with its heading and a note on how to read it."""

    name: str
    heading: str
    explanation: str
    figure: Picture


def charts_of(store: Store, runs: pd.DataFrame, cases: pd.DataFrame, axes: Axes) -> list[Chart]:
    """Return the charts for which these runs (rows of `store.runs()`) have data.

    `cases` are their rows of `by_case`.
    """
    measured = ok_runs(runs)
    if measured.empty:
        return []
    return [
        _throughput(cases, axes),
        *_scaling(cases, axes),
        _bubble(cases, axes),
        *_memory(store, measured, cases, axes),
        *_idle(measured, cases, axes),
        *_steps(store, measured, cases, axes),
    ]


def _throughput(cases: pd.DataFrame, axes: Axes) -> Chart:
    return Chart(
        "throughput",
        "Throughput",
        "Tokens of a step divided by its full time, optimizer included. Lines: from the slowest to "
        "the fastest launch, or the 95 % interval of the median over the steps of a single launch.",
        charts.throughput(cases, axes),
    )


def _scaling(cases: pd.DataFrame, axes: Axes) -> list[Chart]:
    if not has_scaling(cases, axes):
        return []
    explanation = (
        "Tokens/s per rank relative to a single rank, or to the fewest ranks measured; all other "
        "settings are equal. Emulated ranks take a configured time each, so their model grows "
        "with their number; for them, total tokens/s are compared."
    )
    return [Chart("scaling", "Scaling efficiency", explanation, charts.scaling(cases, axes))]


def _bubble(cases: pd.DataFrame, axes: Axes) -> Chart:
    return Chart(
        "bubble",
        "Bubble",
        "Bars: the measured share of rank-time without compute. Diamonds: the share that the "
        "schedule leaves idle even with free transfers and equal (or the emulated) stages.",
        charts.bubble(cases, axes),
    )


def _memory(store: Store, runs: pd.DataFrame, cases: pd.DataFrame, axes: Axes) -> list[Chart]:
    has_peak = runs["peak_memory_bytes"].notna()
    if not has_peak.any():
        return []
    if not has_peak.all():
        runs, cases = runs[has_peak], by_case(runs[has_peak], axes)
    ranks = store.table("ranks", runs["run_id"])
    return [
        Chart(
            "memory",
            "Peak memory",
            "Bars: the rank with the highest peak. Points: every rank, rank 0 first. Diamonds: the "
            "prediction for each rank from the program and the bytes of a few of its actions.",
            charts.peak_memory(cases, runs, ranks, axes),
        ),
        Chart(
            "pareto",
            "Throughput against memory",
            "Ringed cases are Pareto-optimal: no other case is both faster and smaller. The line "
            "is the highest throughput within a given memory. Oversubscribed cases (open markers) "
            "are ignored unless all cases are oversubscribed.",
            charts.pareto(cases, axes),
        ),
    ]


def _idle(runs: pd.DataFrame, cases: pd.DataFrame, axes: Axes) -> list[Chart]:
    if parts_of_runs(runs).empty:
        return []
    explanation = (
        "Idle time as shares of rank-time, stacked by cause: what the schedule itself leaves idle, "
        "and what adds to it. A part to the left of zero saves time."
    )
    drawn = charts.idle(cases, runs, axes)
    return [Chart("idle", "Where the idle time went", explanation, drawn)]


def _steps(store: Store, runs: pd.DataFrame, cases: pd.DataFrame, axes: Axes) -> list[Chart]:
    steps = store.table("steps", runs["run_id"])
    if steps["step_with_optimizer_ns"].dropna().empty:
        return []
    explanation = (
        "Full times of the measured steps; fewer than 8 are drawn one by one. A box spans the "
        "middle half of the steps, its whiskers all but the outliers. Each panel has its own "
        "scale, which need not start at zero."
    )
    drawn = charts.step_times(cases, runs, steps, axes)
    return [Chart("steps", "Step times", explanation, drawn)]
