"""The heat map of a job: how much each of its workers slows it down, replicas by ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppbench.analysis.stragglers import LEAST_COST
from ppbench.report.charts.canvas import Drawing

_FRAME_PX, _ROW_PX, _LEAST_PX, _MOST_PX = 112, 18, 220, 760


def heat_map(by_worker: pd.DataFrame, title: str) -> Drawing:
    """S of each worker of `analysis.stragglers`; an even colour means that nobody stands out."""
    grid = by_worker.pivot_table(index="replica", columns="rank", values="slowness")
    axis = {"showgrid": False, "zeroline": False, "tickformat": "d"}
    cells = {
        "type": "heatmap",
        "x": grid.columns.to_list(),
        "y": grid.index.to_list(),
        "z": grid.to_numpy().tolist(),
        "zmin": 1,
        "zmax": max(float(grid.to_numpy().max()), 1 + LEAST_COST),
        "colorscale": [[0, "rgba(128,128,128,0.12)"], [0.5, "#e0a030"], [1, "#b02020"]],
        "colorbar": {"title": {"text": "S"}, "tickformat": ".3f", "thickness": 12},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "replica %{y}, rank %{x}<br><b>S = %{z:.4f}</b><extra></extra>",
    }
    layout = {
        "height": int(np.clip(_FRAME_PX + _ROW_PX * len(grid), _LEAST_PX, _MOST_PX)),
        "title": {"text": title, "font": {"size": 13}, "x": 0, "xref": "paper", "xanchor": "left"},
        "margin": {"l": 58, "r": 12, "t": 64, "b": 48},
        "xaxis": {**axis, "title": {"text": "rank of the pipeline"}, "dtick": 1},
        "yaxis": {**axis, "title": {"text": "replica"}, "autorange": "reversed"},
    }
    return Drawing([{"title": "", "data": [cells], "layout": layout}])
