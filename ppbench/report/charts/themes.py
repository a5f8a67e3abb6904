"""Light and dark colours for charts outside of pages: plain data becomes a figure of plotly."""

from __future__ import annotations

import plotly.graph_objects as go

from ppbench.display.formats import Theme
from ppbench.report.charts.canvas import FONT
from ppbench.report.scripts import Picture

_COLORS = {  # of the paper, the ink, quiet text and lines
    Theme.light: ("#ffffff", "#1a1c1f", "#5d636b", "#e3e5e8"),
    Theme.dark: ("#15171a", "#e6e8ea", "#9ba2ab", "#2d3136"),
}


def styled(figure: go.Figure | Picture, theme: Theme) -> go.Figure:
    """Return a figure with the colours that figures leave open, as figures.js sets them."""
    paper, ink, quiet, line = _COLORS[theme]
    axis = {"gridcolor": line, "zerolinecolor": line, "linecolor": line, "color": quiet}
    error = {"color": quiet}
    outline = {"line": {"color": paper}}
    template = {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "hoverlabel": {"bgcolor": paper, "font": {"color": ink}, "align": "left"},
            "xaxis": axis,
            "yaxis": axis,
        },
        "data": {
            "bar": [{"marker": outline, "error_x": error, "error_y": error}],
            "scatter": [{"marker": {"color": ink, **outline}, "line": {"color": ink}}],
        },
    }
    return go.Figure(figure).update_layout(template=template)
