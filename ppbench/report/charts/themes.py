"""Light and dark colours for charts outside of pages: plain data becomes a figure of plotly."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from ppbench.display.formats import Theme
from ppbench.report.charts.canvas import FONT
from ppbench.report.scripts import Picture


@dataclass(frozen=True)
class _Colors:
    paper: str
    ink: str
    quiet: str
    line: str


_COLORS = {
    Theme.light: _Colors(paper="#ffffff", ink="#1a1c1f", quiet="#5d636b", line="#e3e5e8"),
    Theme.dark: _Colors(paper="#15171a", ink="#e6e8ea", quiet="#9ba2ab", line="#2d3136"),
}


def styled(figure: go.Figure | Picture, theme: Theme) -> go.Figure:
    """Return a figure with the background and text colours of a theme."""
    return go.Figure(figure).update_layout(template=_template(_COLORS[theme]))


def _template(colors: _Colors) -> dict[str, object]:
    """Return the settings that figures leave open, as figures.js sets them on a page."""
    axis = {"gridcolor": colors.line, "zerolinecolor": colors.line, "linecolor": colors.line}
    error = {"color": colors.quiet}
    outline = {"line": {"color": colors.paper}}
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": colors.ink},
            "paper_bgcolor": colors.paper,
            "plot_bgcolor": colors.paper,
            "hoverlabel": {"bgcolor": colors.paper, "font": {"color": colors.ink}, "align": "left"},
            "xaxis": {**axis, "color": colors.quiet},
            "yaxis": {**axis, "color": colors.quiet},
        },
        "data": {
            "bar": [{"marker": outline, "error_x": error, "error_y": error}],
            "scatter": [
                {"marker": {"color": colors.ink, **outline}, "line": {"color": colors.ink}}
            ],
        },
    }
