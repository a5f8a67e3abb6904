"""What every figure has in common: fonts, a colourless template, the legend's place."""

from __future__ import annotations

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
NEUTRAL = "#808080"  # reads on white and on near-black; a page puts its own colours instead
_FRAME = "rgba(128,128,128,0.22)"
PLAIN = {
    "layout": {
        "font": {"family": FONT, "size": 12, "color": NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
        "yaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
    },
    "data": {
        "scatter": [{"marker": {"color": NEUTRAL}, "line": {"color": NEUTRAL}}],
        "bar": [{"error_x": {"color": NEUTRAL}, "error_y": {"color": NEUTRAL}}],
    },
}


def legend() -> dict[str, object]:
    """Above the figure, from its left edge on."""
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
