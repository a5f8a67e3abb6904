"""Step times of every case: the distribution of its measured periods."""

from __future__ import annotations

from operator import itemgetter

import pandas as pd

from ppbench.cautions import Caution
from ppbench.display.colors import translucent
from ppbench.display.units import NS_PER_MS, counted
from ppbench.report.charts.canvas import (
    NEUTRAL,
    Canvas,
    Chart,
    Measured,
    Point,
    launch_note,
)

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
    cases = measured.cases.merge(boxes.reset_index(), on="case_id")
    axis = {"tickformat": ",~r"}
    title = "ms per step"
    canvas = Canvas(cases, measured.axes, title, axis, has_rows=True, is_shared=False)
    look = {"orientation": "h", "boxpoints": False, "width": canvas.bar_width * 0.8}
    boxed = [case for case in canvas.cases if case["num_steps"] >= LEAST_FOR_BOX]
    for schedule, color, own in canvas.by_schedule(boxed):
        canvas.marks(
            own,
            "box",
            None,
            None,
            name=schedule,
            showlegend=False,
            **{name: itemgetter(name) for name in ("q1", "median", "q3")},
            lowerfence=itemgetter("fastest"),
            upperfence=itemgetter("slowest"),
            line={"color": color, "width": 1.5},
            fillcolor=translucent(color, 0.35),
            **look,
        )
    columns = ["case_id", "launch", "step", "ms"]
    few = cases.loc[cases["num_steps"] < LEAST_FOR_BOX, "case_id"]
    single = times.loc[~times["is_outlier"] & times["case_id"].isin(few), columns]
    for schedule, color, own in canvas.by_schedule(canvas.points(single)):
        marker = {"size": 7, "color": color}
        look = {"showlegend": False, "mode": "markers", "marker": marker}
        canvas.marks(own, "scatter", "ms", None, name=schedule, **look)
    # The medians are the marks to hover over: plotly would show five labels of a box at once.
    canvas.marks(
        canvas.cases,
        "scatter",
        "median",
        _box_text,
        name="median",
        showlegend=False,
        mode="markers",
        marker={"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": NEUTRAL}},
    )
    canvas.marks(
        canvas.points(times.loc[times["is_outlier"], columns]),
        "scatter",
        "ms",
        lambda point: (
            f"launch {point['launch']}, step {point['step']}: {point['ms']:,.1f} ms,"
            "<br>an outlier among the steps of its launch"
        ),
        name="outlier",
        mode="markers",
        cliponaxis=False,
        marker={"symbol": "circle-open", "size": 6, "color": NEUTRAL},
    )
    return canvas


def _box_text(case: Point) -> str:
    many = counted(int(case["num_steps"]), "step")
    launches = launch_note(case).replace("median of", "steps of")
    if case["num_steps"] < LEAST_FOR_BOX:
        return f"median {case['median']:,.1f} ms of {many}{launches}"
    return (
        f"median {case['median']:,.1f} ms"
        f"<br>half of {many}: {case['q1']:,.1f} to {case['q3']:,.1f} ms"
        f"<br>all but outliers: {case['fastest']:,.1f} to {case['slowest']:,.1f} ms{launches}"
    )


CHART = Chart(
    name="steps",
    order=70,
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
