"""Peak memory of every case: the fullest rank, every rank, and the prediction for each."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.units import size_unit
from ppbench.report.charts.canvas import Canvas, Chart, Measured, launch_note


def peak_memory(measured: Measured) -> Canvas | None:
    """Points run from rank 0 on the left (or on top) to the last rank."""
    measured = measured.having(["peak_memory_bytes"])
    cases, ranks = measured.cases, measured.table("ranks")
    if cases.empty:
        return None
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    cases = cases.assign(size=cases["peak_memory_bytes"] / unit_bytes)
    canvas = Canvas(cases, measured.axes, unit, {"rangemode": "tozero", "tickformat": ",~r"})
    canvas.bars("size", lambda case: f"{case['size']:,.1f} {unit}, highest rank{launch_note(case)}")
    for column, name, word, marker in (
        (
            "predicted_peak_memory_bytes",
            "predicted",
            "predicted",
            {"symbol": "diamond-open", "size": 8, "line": {"width": 1.2}},
        ),
        (
            "peak_memory_bytes",
            "each rank",
            "measured",
            {"symbol": "circle", "size": 4, "line": {"width": 0}},
        ),
    ):
        # A row per case and rank, of replicas the fullest, spread over the width of the case's bar.
        owned = ranks.reindex(columns=["run_id", "rank", column]).merge(
            measured.runs[["run_id", "case_id"]], on="run_id"
        )
        fullest = owned.groupby(["run_id", "case_id", "rank"])[column].max() / unit_bytes
        sizes = fullest.groupby(["case_id", "rank"]).median().dropna().rename("size")
        points = canvas.points(sizes.reset_index())
        for point in points:
            point["within"] = 0.74 * ((point["rank"] + 0.5) / point["world_size"] - 0.5)
        canvas.markers(
            points,
            "size",
            lambda point, word=word: f"rank {point['rank']} {word}: {point['size']:,.1f} {unit}",  # type: ignore[misc]
            name,
            **marker,
        )
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="memory",
    order=40,
    heading="Peak memory",
    note="Bars: the rank with the highest peak. Points: every rank, rank 0 first. Diamonds: the "
    "prediction for each rank from the program and the bytes of a few of its actions.",
    concerns=(Caution.bare_stage,),
    needs="its peak memory",
    draw=peak_memory,
)
