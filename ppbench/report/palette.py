"""Colours, the same in every figure, told apart by every kind of colour vision; and ops in words.

The eight colours of Okabe and Ito (2008) and, as there are more schedules than that, five that keep
the same distance from them and from each other; a test measures it. Chosen by hand rather than
taken from plotly's default cycle, because an op must keep its colour whichever other ops a program
has. Forward work is blue, backward work is warm.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES
from ppbench.analysis.gaps import Cause

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILLION, ORANGE, YELLOW = "#D55E00", "#E69F00", "#F0E442"
PURPLE, GREY = "#CC79A7", "#999999"
FOREST, MINT, INDIGO = "#117733", "#9FE2BF", "#2E2E8F"
BROWN, WINE = "#8C2D04", "#882255"
MEDIUM_BLUE = "#2A8BC4"  # for small marks: stands out on white and on near-black alike

OP_COLORS: dict[Op, str] = {
    Op.F: BLUE,
    Op.B: ORANGE,
    Op.I: VERMILLION,
    Op.W: YELLOW,
    Op.OPT: GREEN,
    Op.SEND_F: SKY,
    Op.RECV_F: MEDIUM_BLUE,  # sky, darker: the same message at its other end
    Op.SEND_B: PURPLE,
    Op.RECV_B: "#A8527F",  # purple, darker
}
OP_WORDS: dict[Op, str] = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.OPT: "optimizer",
    Op.SEND_F: "send activations",
    Op.RECV_F: "receive activations",
    Op.SEND_B: "send gradients",
    Op.RECV_B: "receive gradients",
}
PART_COLORS: dict[str, str] = {
    "structure": "#8DA0B6",
    "imbalance": "#A63D57",
    "transfer": "#4B3FA0",
    "jitter": "#D9C8B4",
    "launch_gap": "#7A7A2E",
}
"""Part of the bubble, as columns of `runs` name it -> colour. Muted: idle time is not work."""
MIXED_COLOR = "#5B6472"
"""Several ops at once, where time is too coarse to tell them apart."""
LIGHTEST = 0.45
"""How white the colour of a rank's last stage is, where it has several."""
IDLE_COLORS: dict[Cause, str] = {
    # See-through, so that they recede on light and on dark paper alike.
    Cause.STAGE: "rgba(128,136,148,0.42)",
    Cause.TRANSFER: "rgba(204,121,167,0.55)",
    Cause.HOST: "rgba(140,100,60,0.75)",
    Cause.NO_WORK: "rgba(128,136,148,0.14)",
}
OPEN_COLORS: dict[str, str] = {
    # What was never finished; hatched, so that it is told from what was without its colour too.
    "waiting": "#A7ADB6",
    "working": WINE,
    "stopped": "#B3261E",
    "dead": "#4A4F57",
}
HATCH_COLORS = {"#000000": "rgba(0,0,0,0.4)", "#ffffff": "rgba(255,255,255,0.45)"}
"""Of the lines, by the ink that can be read with them."""
TRACK_COLOR = "rgba(128,128,128,0.09)"

# In the order of the registry, relatives in kindred colours; the last two are for others, grey at
# the very end since it is close to purple for many eyes.
SCHEDULE_CYCLE = (
    SKY,
    VERMILLION,
    ORANGE,
    BLUE,
    GREEN,
    MINT,
    FOREST,
    PURPLE,
    WINE,
    YELLOW,
    BROWN,
    INDIGO,
    GREY,
)


def schedule_colors(names: Iterable[str]) -> dict[str, str]:
    """Schedule -> colour. A registered schedule has the same colour in every report."""
    known = list(SCHEDULES)
    others = sorted(set(names) - set(known))
    cycle = len(SCHEDULE_CYCLE)
    return {name: SCHEDULE_CYCLE[i % cycle] for i, name in enumerate([*known, *others])}


def rank_color(rank: int, num_ranks: int) -> str:
    """From dark to light with the rank, in one hue: ranks are an order and not a kind."""
    return tinted(INDIGO, 0.75 * rank / max(1, num_ranks - 1))


def tinted(color: str, whiteness: float) -> str:
    """`#rrggbb` mixed with so much white, 0 to 1."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * whiteness):02x}" for c in channels)


def translucent(color: str, opacity: float) -> str:
    """`#rrggbb` that lets the paper through, so that it suits light and dark."""
    channels = ",".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
    return f"rgba({channels},{opacity})"


def ink_on(color: str) -> str:
    """Black or white, whichever stands out more on `#rrggbb` (WCAG 2 relative luminance)."""
    red, green, blue = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _linear(channel: float) -> float:
    return float(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
