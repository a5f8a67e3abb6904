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
    drawn = [
        Chart(
            "throughput",
            "Throughput",
            "Tokens of a step divided by its full time, optimizer included. Lines: from the "
            "slowest to the fastest launch, or the 95 % interval of the median over the steps of a "
            "single launch.",
            charts.throughput(cases, axes),
        )
    ]
    if has_scaling(cases, axes):
        explanation = (
            "Tokens/s per rank relative to a single rank, or to the fewest ranks measured; all "
            "other settings are equal. Emulated ranks take a configured time each, so their model "
            "grows with their number; for them, total tokens/s are compared."
        )
        figure = charts.scaling(cases, axes)
        drawn.append(Chart("scaling", "Scaling efficiency", explanation, figure))
    explanation = (
        "Bars: the measured share of rank-time without compute. Diamonds: the share that the "
        "schedule leaves idle even with free transfers and equal (or the emulated) stages."
    )
    drawn.append(Chart("bubble", "Bubble", explanation, charts.bubble(cases, axes)))
    has_peak = measured["peak_memory_bytes"].notna()
    if has_peak.any():
        known = measured if has_peak.all() else measured[has_peak]
        with_peak = cases if has_peak.all() else by_case(known, axes)
        ranks = store.table("ranks", known["run_id"])
        drawn += [
            Chart(
                "memory",
                "Peak memory",
                "Bars: the rank with the highest peak. Points: every rank, rank 0 first. Diamonds: "
                "the prediction for each rank from the program and the bytes of a few of its "
                "actions.",
                charts.peak_memory(with_peak, known, ranks, axes),
            ),
            Chart(
                "pareto",
                "Throughput against memory",
                "Ringed cases are Pareto-optimal: no other case is both faster and smaller. The "
                "line is the highest throughput within a given memory. Oversubscribed cases (open "
                "markers) are ignored unless all cases are oversubscribed.",
                charts.pareto(with_peak, axes),
            ),
        ]
    if not parts_of_runs(measured).empty:
        explanation = (
            "Idle time as shares of rank-time, stacked by cause: what the schedule itself leaves "
            "idle, and what adds to it. A part to the left of zero saves time."
        )
        figure = charts.idle(cases, measured, axes)
        drawn.append(Chart("idle", "Where the idle time went", explanation, figure))
    steps = store.table("steps", measured["run_id"])
    if not steps["step_ns"].dropna().empty:
        explanation = (
            "Periods of the measured steps; fewer than 8 are drawn one by one. A box spans the "
            "middle half of the steps, its whiskers all but the outliers. Each panel has its own "
            "scale, which need not start at zero."
        )
        figure = charts.step_times(cases, measured, steps, axes)
        drawn.append(Chart("steps", "Step times", explanation, figure))
    return drawn
