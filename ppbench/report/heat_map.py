"""The overview of a step as a heat map: its hue tells the op, its strength how busy a rank was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ppbench.report.marks import Floats, Marks
from ppbench.report.overview import Overview, overview
from ppbench.report.palette import MIXED_COLOR
from ppbench.report.units import NS_PER_MS

NUM_SLICES = 600
SEVERAL = "several"
_FAINTEST = 0.08


def heat_map(
    kinds: Sequence[Marks], num_ranks: int, end_ns: int, first_row: float, gap_px: int
) -> go.Heatmap:
    """The computations of a step from 0 to `end_ns`; its first rank stands on `first_row`."""
    seen = overview(kinds, num_ranks, 0, end_ns, NUM_SLICES)
    width_ms = end_ns / NUM_SLICES / NS_PER_MS
    names = [*(marks.kind.name for marks in kinds), SEVERAL]
    return go.Heatmap(
        z=_codes(seen),
        x0=width_ms / 2,
        dx=width_ms,
        y0=first_row,
        dy=1,
        zmin=0,
        zmax=len(names),
        colorscale=_colorscale(kinds),
        showscale=False,
        ygap=gap_px,
        customdata=np.stack([seen.busy, seen.counts], axis=-1),
        text=np.array(names, dtype=object)[seen.mostly],
        hovertemplate="<b>%{customdata[0]:.0%} computing</b>, mostly %{text}<br>"
        "around %{x:,.2f} ms<br>%{customdata[1]:,} computations begin here<extra></extra>",
    )


def _codes(seen: Overview) -> Floats:
    """The kind that took most, and as its fraction how busy the cell was; nothing where idle."""
    busy = seen.busy
    return np.where(busy > 0, seen.mostly + np.clip(busy, 0.001, 0.999), np.nan)


def _colorscale(kinds: Sequence[Marks]) -> list[list[object]]:
    """A ramp for each kind, and for several at once, from nearly clear to its colour."""
    colors = [*(marks.kind.colors[0] for marks in kinds), MIXED_COLOR]
    scale: list[list[object]] = []
    for number, color in enumerate(colors):
        channels = ",".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
        scale += [
            [number / len(colors), f"rgba({channels},{_FAINTEST})"],
            [(number + 1) / len(colors), f"rgba({channels},1)"],
        ]
    return scale
