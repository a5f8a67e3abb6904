"""Colours of ops, schedules and idle time, distinct for every kind of colour vision; names of ops.

These are the eight colours of Okabe and Ito (2008) and, for further schedules, eight that keep the
same distance from them and from each other, as a test measures. They are chosen by hand rather than
taken from plotly's default cycle, so that an op has the same colour in every figure. Forward work
is blue, backward work is warm.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES
from ppbench.analysis.waits import Cause

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILLION, ORANGE, YELLOW = "#D55E00", "#E69F00", "#F0E442"
PURPLE, GREY = "#CC79A7", "#999999"
FOREST, MINT, INDIGO = "#117733", "#9FE2BF", "#2E2E8F"
BROWN, WINE = "#8C2D04", "#882255"
VIOLET, PLUM = "#7755DD", "#550055"
OLIVE = "#A5B469"
MEDIUM_BLUE = "#2A8BC4"  # for small marks: contrasts with white and with near-black

OP_COLORS: dict[Op, str] = {
    Op.F: BLUE,
    Op.B: ORANGE,
    Op.I: VERMILLION,
    Op.W: YELLOW,
    Op.OPT: GREEN,
    Op.SEND_F: SKY,
    Op.RECV_F: MEDIUM_BLUE,  # a darker sky: the same message at its other end
    Op.SEND_B: PURPLE,
    Op.RECV_B: "#A8527F",  # a darker purple
    Op.UNSHARD: "#8F6BD9",
    Op.RESHARD: GREY,
    Op.REDUCE_GRAD: "#D0406B",
    Op.NORM: "#6B7F2A",
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
    Op.UNSHARD: "gather parameters",
    Op.RESHARD: "free parameters",
    Op.REDUCE_GRAD: "reduce gradients",
}
PART_COLORS: dict[str, str] = {
    "structure": "#8DA0B6",
    "imbalance": "#A63D57",
    "transfer": "#4B3FA0",
    "collective": "#60A8F0",
    "skew": "#48240C",
    "jitter": "#D9C8B4",
    "launch_gap": "#7A7A2E",
    "between": "#B0EE88",
}
"""The colours of the parts of the bubble; they are muted, since idle time is not work."""
MIXED_COLOR = "#5B6472"
"""The colour of a slice of time with several ops."""
LIGHTEST = 0.45
"""The whiteness of the colour of a rank's last stage, if it has several."""
IDLE_COLORS: dict[Cause, str] = {
    # Transparent, so that they recede on light and on dark backgrounds.
    Cause.STAGE: "rgba(128,136,148,0.42)",
    Cause.TRANSFER: "rgba(204,121,167,0.55)",
    Cause.GATHER: "rgba(143,107,217,0.5)",
    Cause.HOST: "rgba(140,100,60,0.75)",
    Cause.REDUCE: "rgba(208,64,107,0.4)",
    Cause.NO_WORK: "rgba(128,136,148,0.14)",
}
OPEN_COLORS: dict[str, str] = {
    # Unfinished actions; these are also hatched, which distinguishes them without colour.
    "waiting": "#A7ADB6",
    "working": WINE,
    "stopped": "#B3261E",
    "dead": "#4A4F57",
}
HATCH_COLORS = {"#000000": "rgba(0,0,0,0.4)", "#ffffff": "rgba(255,255,255,0.45)"}
"""The colour of hatching lines, by the text colour on the same background."""
TRACK_COLOR = "rgba(128,128,128,0.09)"

# In the order of the registry, related schedules in similar colours; the last two are for others,
# grey last, since many readers confuse it with purple.
SCHEDULE_CYCLE = (
    SKY,
    VERMILLION,
    OLIVE,
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
    VIOLET,
    PLUM,
    GREY,
)


def schedule_colors(names: Iterable[str]) -> dict[str, str]:
    """Map schedules to colours; a registered schedule has the same colour in every report."""
    known = list(SCHEDULES)
    others = sorted(set(names) - set(known))
    cycle = len(SCHEDULE_CYCLE)
    return {name: SCHEDULE_CYCLE[i % cycle] for i, name in enumerate([*known, *others])}


def rank_color(rank: int, num_ranks: int) -> str:
    """Return a colour from dark to light with the rank, in one hue, since ranks are ordered."""
    return tinted(INDIGO, 0.75 * rank / max(1, num_ranks - 1))


def tinted(color: str, whiteness: float) -> str:
    """Mix `#rrggbb` with a share of white, 0 to 1."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * whiteness):02x}" for c in channels)


def translucent(color: str, opacity: float) -> str:
    """Make `#rrggbb` transparent, so that it suits light and dark backgrounds."""
    channels = ",".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
    return f"rgba({channels},{opacity})"


def ink_on(color: str) -> str:
    """Return black or white, whichever contrasts more with `#rrggbb` (WCAG 2 luminance)."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        float(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
        for channel in channels
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
