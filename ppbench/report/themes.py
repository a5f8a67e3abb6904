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
    line: str


_COLORS = {
    Theme.light: _Colors(paper="#ffffff", ink="#1a1c1f", line="#e3e5e8"),
    Theme.dark: _Colors(paper="#15171a", ink="#e6e8ea", line="#2d3136"),
}


def styled(figure: go.Figure, theme: Theme) -> go.Figure:
    """The figure with a background and with text that stands out on it; the given one is kept."""
    colors = _COLORS[theme]
    axis = {"gridcolor": colors.line, "zerolinecolor": colors.line, "linecolor": colors.line}
    layout = {
        "font": {"family": FONT, "size": 12, "color": colors.ink},
        "paper_bgcolor": colors.paper,
        "plot_bgcolor": colors.paper,
        "hoverlabel": {"bgcolor": colors.paper, "font": {"color": colors.ink}},
        "xaxis": axis,
        "yaxis": axis,
    }
    data = figure.layout.template.data.to_plotly_json()
    copy = go.Figure(figure)
    return copy.update_layout(template={"layout": layout, "data": data})
