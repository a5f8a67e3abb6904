"""What each rank had allocated over time, beside the peak that its program predicts."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from ppbench.report.palette import rank_color
from ppbench.report.style import PLAIN, legend
from ppbench.report.units import NS_PER_MS, is_missing, size_unit

_MEMORY_PX, _TOP_PX, _BOTTOM_PX = 320, 38, 36


def memory(levels: pd.DataFrame, ranks: pd.DataFrame) -> go.Figure:
    """What each rank had allocated over the extra step for memory, as steps.

    `levels` has the columns `rank`, `time_ns` (from when on) and `num_bytes`, at least one row;
    `ranks` the store's `ranks` rows of the run, whose predicted peaks are dashed lines.
    """
    unit, unit_bytes = size_unit(levels["num_bytes"].max())
    num_ranks = int(levels["rank"].max()) + 1
    end_ms = float(levels["time_ns"].max()) / NS_PER_MS
    peaks = ranks.set_index("rank")["predicted_peak_memory_bytes"]
    figure = go.Figure(layout=_layout(unit))
    for rank, of_rank in levels.groupby("rank"):
        color, number = rank_color(int(str(rank)), num_ranks), int(str(rank))
        figure.add_trace(_line(number, of_rank, color, unit, unit_bytes))
        peak = peaks.get(number)
        if not is_missing(peak):
            figure.add_trace(_predicted(number, float(str(peak)) / unit_bytes, end_ms, color, unit))
    return figure


def _line(rank: int, levels: pd.DataFrame, color: str, unit: str, unit_bytes: int) -> go.Scatter:
    return go.Scatter(
        name=f"rank {rank}",
        legendgroup=f"rank {rank}",
        x=levels["time_ns"].to_numpy(dtype=float) / NS_PER_MS,
        y=levels["num_bytes"].to_numpy(dtype=float) / unit_bytes,
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": color},
        hovertemplate=f"rank {rank}<br>%{{x:.2f}} ms<br>%{{y:,.1f}} {unit}<extra></extra>",
    )


def _predicted(rank: int, peak: float, end_ms: float, color: str, unit: str) -> go.Scatter:
    return go.Scatter(
        name=f"rank {rank}, predicted peak",
        legendgroup=f"rank {rank}",
        showlegend=False,
        x=[0, end_ms],
        y=[peak, peak],
        mode="lines",
        line={"width": 1, "dash": "dash", "color": color},
        hovertemplate=f"rank {rank}, predicted peak<br>%{{y:,.1f}} {unit}<extra></extra>",
    )


def _layout(unit: str) -> dict[str, object]:
    return {
        "template": PLAIN,
        "height": _MEMORY_PX,
        "margin": {"l": 58, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
        "hovermode": "closest",
        "showlegend": True,
        "legend": legend(),
        "xaxis": {"ticksuffix": " ms", "showticksuffix": "first", "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
