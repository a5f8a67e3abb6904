"""What each rank had allocated over time."""

from __future__ import annotations

import itertools

import pandas as pd
import plotly.graph_objects as go

from ppbench.report.palette import SCHEDULE_CYCLE
from ppbench.report.style import PLAIN, legend
from ppbench.report.units import NS_PER_MS, size_unit

_MEMORY_PX, _TOP_PX, _BOTTOM_PX = 320, 38, 36


def memory(levels: pd.DataFrame) -> go.Figure:
    """What each rank had allocated over the extra step for memory, as steps.

    `levels` has the columns `rank`, `time_ns` (from when on) and `num_bytes`, at least one row.
    """
    unit, unit_bytes = size_unit(levels["num_bytes"].max())
    hover = f"rank %{{meta}}<br>%{{x:.2f}} ms<br>%{{y:,.1f}} {unit}<extra></extra>"
    lines = [
        go.Scatter(
            name=f"rank {rank}",
            meta=rank,
            x=of_rank["time_ns"] / NS_PER_MS,
            y=of_rank["num_bytes"] / unit_bytes,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": color},
            hovertemplate=hover,
        )
        for (rank, of_rank), color in zip(
            levels.groupby("rank"), itertools.cycle(SCHEDULE_CYCLE), strict=False
        )
    ]
    layout = {
        "template": PLAIN,
        "height": _MEMORY_PX,
        "margin": {"l": 58, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
        "hovermode": "closest",
        "showlegend": True,
        "legend": {**legend(), "y": 1, "yanchor": "bottom"},
        "xaxis": {"ticksuffix": " ms", "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return go.Figure(lines, layout)
