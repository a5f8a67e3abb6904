"""Peak memory of every case: the fullest rank, every rank, and the prediction for each."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.units import size_unit
from ppbench.report.charts.canvas import Canvas
from ppbench.report.charts.chart import Chart, Measured
from ppbench.report.charts.panels import arrange, figure_text

_PREDICTED = {"symbol": "diamond-open", "size": 8, "line": {"width": 1.2}}
_EACH = {"symbol": "circle", "size": 4, "line": {"width": 0}}


def peak_memory(measured: Measured) -> Canvas | None:
    """Points run from rank 0 on the left (or on top) to the last rank."""
    measured = measured.having(["peak_memory_bytes"])
    cases, ranks = measured.cases, measured.table("ranks")
    if cases.empty:
        return None
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    arranged = arrange(cases.assign(peak=cases["peak_memory_bytes"] / unit_bytes), measured.axes)
    canvas = Canvas(arranged, unit, {"rangemode": "tozero", "tickformat": ",~r"})
    shown = f"%{{value:,.1f}} {unit}"
    canvas.bars("peak", f"{shown}, highest rank")
    for column, name, marker, word in (
        ("predicted_peak_memory_bytes", "predicted", _PREDICTED, "predicted"),
        ("peak_memory_bytes", "each rank", _EACH, "measured"),
    ):
        # A row per case and rank, of replicas the fullest, spread over the width of the case's bar.
        owned = ranks.reindex(columns=["run_id", "rank", column]).merge(
            measured.runs[["run_id", "case_id"]], on="run_id"
        )
        fullest = owned.groupby(["run_id", "case_id", "rank"])[column].max()
        peaks = fullest.groupby(["case_id", "rank"]).median().reset_index()
        columns = ["case_id", "panel", "place", "slot", "text", "world_size"]
        points = peaks.merge(arranged.cases[columns], on="case_id").dropna(subset=[column])
        points = points.assign(
            within=0.74 * ((points["rank"] + 0.5) / points["world_size"] - 0.5),
            value=points[column] / unit_bytes,
            hover=points["text"].map(figure_text) + "<br>rank " + points["rank"].astype(str),
        )
        canvas.markers(points, name, marker, f" {word}: {shown}")
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="memory",
    heading="Peak memory",
    note="Bars: the rank with the highest peak. Points: every rank, rank 0 first. Diamonds: the "
    "prediction for each rank from the program and the bytes of a few of its actions.",
    concerns=(Caution.bare_stage,),
    needs="its peak memory",
    draw=peak_memory,
)
