"""Figures on a page of their own: notebooks and pictures, in light or dark.

In a report figures are colourless, and the page gives them its colours (page.css); where there is
no page, a theme does.
"""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from ppbench.format import Theme
from ppbench.report.style import FONT


@dataclass(frozen=True)
class _Colors:
    """As page.css names them."""

    paper: str
    ink: str
    quiet: str
    line: str


_COLORS = {
    Theme.light: _Colors(paper="#ffffff", ink="#1a1c1f", quiet="#5d636b", line="#e3e5e8"),
    Theme.dark: _Colors(paper="#15171a", ink="#e6e8ea", quiet="#9ba2ab", line="#2d3136"),
}


def styled(figure: go.Figure, theme: Theme) -> go.Figure:
    """The figure with a background and with text that stands out on it; the given one is kept."""
    return go.Figure(figure).update_layout(template=_template(_COLORS[theme]))


def _template(colors: _Colors) -> dict[str, object]:
    """What figures leave open, as figures.js fills it in on a page."""
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
