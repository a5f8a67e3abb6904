"""Allocated memory over time: a line per rank during the extra step that records memory."""

from __future__ import annotations

import pandas as pd

from ppbench.display.colors import rank_color
from ppbench.display.units import NS_PER_MS, is_missing, size_unit
from ppbench.report.charts.canvas import Drawing
from ppbench.report.scripts import Figure

_HEIGHT_PX = 300


def memory_over_time(levels: pd.DataFrame, ranks: pd.DataFrame) -> Drawing:
    """Draw the bytes allocated on each rank.

    `levels` has the columns `rank`, `time_ns` (start of the level) and `num_bytes`, and at least
    one row. `ranks` are the run's rows of the store's `ranks`; predicted peaks are dashed lines. Of
    replicas, the one that holds the most is drawn.
    """
    fullest, whose = int(levels["replica"].iloc[int(levels["num_bytes"].argmax())]), ""
    if levels["replica"].any():
        whose = f" (replica {fullest}, the fullest)"
        levels, ranks = (rows[rows["replica"] == fullest] for rows in (levels, ranks))
    unit, unit_bytes = size_unit(levels["num_bytes"].max())
    num_ranks = int(levels["rank"].max()) + 1
    end_ms = float(levels["time_ns"].max()) / NS_PER_MS
    peaks = ranks.set_index("rank")["predicted_peak_memory_bytes"]
    panel: Figure = {
        "title": "",
        "data": [],
        "layout": {
            "height": _HEIGHT_PX,
            "margin": {"l": 58, "r": 12, "t": 10, "b": 36},
            "hovermode": "closest",
            "xaxis": {"ticksuffix": " ms", "showticksuffix": "first", "rangemode": "tozero"},
            "yaxis": {"title": {"text": unit + whose}, "rangemode": "tozero"},
        },
    }
    drawing = Drawing([panel])
    for rank in sorted(levels["rank"].unique().tolist()):
        name, color = f"rank {rank}", rank_color(rank, num_ranks)
        own = levels[levels["rank"] == rank]
        drawing.add(
            0,
            "scatter",
            name=name,
            x=(own["time_ns"].astype(float) / NS_PER_MS).tolist(),
            y=(own["num_bytes"].astype(float) / unit_bytes).tolist(),
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": color},
            hovertemplate=f"{name}<br>%{{x:.2f}} ms<br>%{{y:,.1f}} {unit}<extra></extra>",
        )
        if not is_missing(peak := peaks.get(rank)):
            drawing.add(
                0,
                "scatter",
                name=name,
                x=[0, end_ms],
                y=[float(str(peak)) / unit_bytes] * 2,
                mode="lines",
                line={"width": 1, "dash": "dash", "color": color},
                hovertemplate=f"{name}, predicted peak<br>%{{y:,.1f}} {unit}<extra></extra>",
            )
    return drawing
