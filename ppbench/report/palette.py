"""Colours, the same in every figure, told apart by every kind of colour vision.

The eight colours of Okabe and Ito (2008). Chosen by hand rather than taken from plotly's default
cycle, because an op must keep its colour whichever other ops a program has. All of them read on
white and on near-black; forward work is blue, backward work is warm.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILLION, ORANGE, YELLOW = "#D55E00", "#E69F00", "#F0E442"
PURPLE, GREY = "#CC79A7", "#999999"

OP_COLORS: dict[Op, str] = {
    Op.F: BLUE,
    Op.B: ORANGE,
    Op.I: VERMILLION,
    Op.W: YELLOW,
    Op.OPT: GREEN,
    Op.SEND_F: SKY,
    Op.RECV_F: "#2A8BC4",  # sky, darker: the same message at its other end
    Op.SEND_B: PURPLE,
    Op.RECV_B: "#A8527F",  # purple, darker
}
IDLE_COLOR = "rgba(128,128,128,0.22)"
TRACK_COLOR = "rgba(128,128,128,0.09)"

SCHEDULE_CYCLE = (SKY, VERMILLION, GREEN, PURPLE, BLUE, ORANGE, GREY, YELLOW)


def schedule_colors(names: Iterable[str]) -> dict[str, str]:
    """Schedule -> colour. A registered schedule has the same colour in every report."""
    known = list(SCHEDULES)
    others = sorted(set(names) - set(known))
    cycle = len(SCHEDULE_CYCLE)
    return {name: SCHEDULE_CYCLE[i % cycle] for i, name in enumerate([*known, *others])}


def ink_on(color: str) -> str:
    """Black or white, whichever stands out more on `#rrggbb` (WCAG 2 relative luminance)."""
    red, green, blue = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _linear(channel: float) -> float:
    return float(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
