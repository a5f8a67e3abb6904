"""Step times of every case: the distribution of its measured periods."""

from __future__ import annotations

import pandas as pd

from ppbench.cautions import Caution
from ppbench.display.colors import translucent
from ppbench.display.units import NS_PER_MS, counted
from ppbench.report.charts.canvas import NEUTRAL, Canvas, caution_notes, hover_texts, launch_notes
from ppbench.report.charts.chart import Chart, Measured
from ppbench.report.charts.panels import arrange_rows, figure_text

LEAST_FOR_BOX = 8
"""Quartiles of fewer steps mean little, so these are drawn one by one."""
_QUARTILES = {"fastest": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "slowest": 1.0}


def step_times(measured: Measured) -> Canvas | None:
    """Draw the periods of all steps of every case: boxes, or points for few steps.

    A box spans the first to the third quartile over the steps of all launches, with the median
    inside; its whiskers reach the fastest and the slowest step that is not an outlier; outliers are
    points.
    """
    runs = measured.runs[["run_id", "case_id", "launch"]]
    times = measured.table("steps").merge(runs, on="run_id").dropna(subset=["step_ns"])
    if times.empty:
        return None
    times = times.assign(
        ms=times["step_ns"].astype(float) / NS_PER_MS,
        is_outlier=times["is_outlier"].eq(True),  # null where it was not asked
    )
    # Quartiles over all steps, whiskers without outliers.
    by_case_id = times.groupby("case_id")["ms"]
    boxes = pd.DataFrame({name: by_case_id.quantile(q) for name, q in _QUARTILES.items()})
    usual = times[~times["is_outlier"]].groupby("case_id")["ms"]
    for name, ends in (("fastest", usual.min()), ("slowest", usual.max())):
        boxes[name] = ends.reindex(boxes.index).fillna(boxes[name])
    boxes["num_steps"] = by_case_id.size()
    arranged = arrange_rows(measured.cases.merge(boxes.reset_index(), on="case_id"), measured.axes)
    canvas = Canvas(arranged, "ms per step", {"tickformat": ",~r"}, shared="")
    cases = arranged.cases
    columns = ["case_id", "panel", "place", "slot", "schedule", "text"]
    has_box = cases["num_steps"] >= LEAST_FOR_BOX
    for schedule, color, panel, drawn in canvas.by_schedule(cases[has_box]):
        canvas.marks(
            drawn,
            None,
            panel,
            "box",
            name=figure_text(schedule),
            showlegend=False,
            orientation="h",
            **{name: drawn[name].tolist() for name in ("q1", "median", "q3")},
            lowerfence=drawn["fastest"].tolist(),
            upperfence=drawn["slowest"].tolist(),
            width=arranged.bar_width * 0.8,
            line={"color": color, "width": 1.5},
            fillcolor=translucent(color, 0.35),
            boxpoints=False,
            hoverinfo="skip",
        )
    single = times[~times["is_outlier"]].merge(cases.loc[~has_box, columns], on="case_id")
    for schedule, color, panel, points in canvas.by_schedule(single):
        canvas.marks(
            points,
            "ms",
            panel,
            "scatter",
            name=figure_text(schedule),
            showlegend=False,
            mode="markers",
            marker={"size": 7, "color": color},
            hoverinfo="skip",
        )
    # The medians are the marks to hover over: plotly would show five labels of a box at once.
    for number, drawn in cases.groupby("panel"):
        notes = launch_notes(drawn).str.replace("median of", "steps of") + caution_notes(drawn)
        canvas.marks(
            drawn,
            "median",
            int(str(number)),
            "scatter",
            name="median",
            showlegend=False,
            mode="markers",
            marker={"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": NEUTRAL}},
            customdata=hover_texts(drawn, drawn.apply(_box_text, axis=1) + notes),
            hovertemplate="<b>%{customdata[0]}</b><br>median %{x:,.1f} ms%{customdata[1]}"
            "<extra></extra>",
        )
    outliers = times[times["is_outlier"]].merge(cases[columns], on="case_id")
    for number, points in outliers.groupby("panel"):
        steps = zip(points["launch"], points["step"], strict=True)
        canvas.marks(
            points,
            "ms",
            int(str(number)),
            "scatter",
            name="outlier",
            mode="markers",
            cliponaxis=False,
            marker={"symbol": "circle-open", "size": 6, "color": NEUTRAL},
            customdata=hover_texts(points, [f"launch {of}, step {step}" for of, step in steps]),
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:,.1f} ms,"
            "<br>an outlier among the steps of its launch<extra></extra>",
        )
    return canvas


def _box_text(case: pd.Series) -> str:
    if case["num_steps"] < LEAST_FOR_BOX:
        return f" of {counted(int(case['num_steps']), 'step')}"
    return (
        f"<br>half of {counted(int(case['num_steps']), 'step')}: "
        f"{case['q1']:,.1f} to {case['q3']:,.1f} ms"
        f"<br>all but outliers: {case['fastest']:,.1f} to {case['slowest']:,.1f} ms"
    )


CHART = Chart(
    name="steps",
    heading="Step times",
    note="Periods of the measured steps; fewer than 8 are drawn one by one. A box spans the middle "
    "half of the steps, its whiskers all but the outliers. Each panel has its own scale, which "
    "need not start at zero.",
    concerns=(
        Caution.oversubscribed,
        Caution.time_sliced,
        Caution.noisy_steps,
        Caution.unsettled_steps,
        Caution.busy_machine,
        Caution.throttled,
        Caution.few_steps,
        Caution.no_warmup,
    ),
    needs="step times",
    draw=step_times,
)
