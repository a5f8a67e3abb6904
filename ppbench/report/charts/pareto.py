"""Throughput against peak memory, with the cases that no other equals in both and beats in one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from operator import itemgetter

from ppbench.cautions import Caution
from ppbench.display.cases import KNOBS, settings_text, work_axes
from ppbench.display.fields import field_of
from ppbench.display.units import counted, size_unit
from ppbench.report.charts.canvas import (
    NEUTRAL,
    NOT_FINITE_SYMBOL,
    Canvas,
    Chart,
    Measured,
    Point,
    elided,
    figure_text,
    launch_note,
    symbol,
)

_TOP_PX = 24  # room for the name of the uppermost point
MOST_LABELS = 6  # more would overlap
FRONT_PX = 300
_LINE = 32  # characters of a name
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star", "hexagram")


def pareto(measured: Measured, panel_px: int = FRONT_PX) -> Canvas | None:
    """Draw the tokens/s of every case against the peak memory of its fullest rank.

    Oversubscribed cases are on the front only if there are no others. A front compares cases that
    do the same work, so each model, length, ... has its own panel and front.

    For a page that hides cases: a trace with `meta.mostLabels` is the front of the other traces of
    its panel; their `meta.isSound` selects the points that count, their `text` names them. A front
    of more points than that shows no names.
    """
    measured = measured.having(["peak_memory_bytes"])
    cases, axes = measured.cases, measured.axes
    if cases.empty:
        return None
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    cases = cases.assign(x=cases["peak_memory_bytes"] / unit_bytes)
    title = {"title": {"text": f"{unit}, fullest rank", "standoff": 4}}
    canvas = Canvas(
        cases,
        work_axes(axes),
        field_of("tokens_per_s").heading,
        {"tickformat": ",~s"},
        across={"rangemode": "tozero", "zeroline": False, "tickformat": ",~r", **title},
        height_px=panel_px,
        top_px=_TOP_PX,
    )
    sizes = sorted(cases["world_size"].unique().tolist())

    def name(case: Point) -> str:
        knobs = [axis for axis in axes if axis in KNOBS] or ["schedule"]
        settings = (settings_text(case, [knob]) for knob in knobs)
        text = ", ".join(elided(own) for own in settings if own)
        return "<br>".join(map(figure_text, textwrap.wrap(text, _LINE)))

    for schedule, color, own in canvas.by_schedule():
        canvas.marks(
            own,
            "scatter",
            "tokens_per_s",
            lambda case: (
                f"{case['tokens_per_s']:,.0f} tokens/s"
                f"<br>{case['x']:,.1f} {unit}, fullest rank{launch_note(case)}"
            ),
            x=itemgetter("x"),
            name=schedule,
            mode="markers",
            cliponaxis=False,
            marker={
                "color": color,
                "size": 9,
                "symbol": lambda case: symbol(
                    case, _SYMBOLS[sizes.index(case["world_size"]) % len(_SYMBOLS)]
                ),
                "line": {"width": 0},
            },
            text=name,
            meta={
                "isSound": lambda case: not case["is_oversubscribed"],
                "isFinite": lambda case: not case["is_not_finite"],
            },
        )
    middle = cases["x"].max() / 2
    for panel in range(len(canvas.panels)):
        finite = [c for c in canvas.cases if c["panel"] == panel and not c["is_not_finite"]]
        sound = [case for case in finite if not case["is_oversubscribed"]]
        pool = sound or finite
        front = pareto_front([c["x"] for c in pool], [c["tokens_per_s"] for c in pool])
        drawn = [pool[index] for index in front]
        has_labels = len(drawn) <= MOST_LABELS
        canvas.add(
            panel,
            "scatter",
            x=[case["x"] for case in drawn],
            y=[case["tokens_per_s"] for case in drawn],
            name="front",
            mode="lines+markers+text" if has_labels else "lines+markers",
            cliponaxis=False,
            line={"color": NEUTRAL, "width": 1.5, "shape": "hv"},
            marker={"symbol": "circle-open", "size": 17, "color": NEUTRAL, "line": {"width": 1.5}},
            text=list(map(name, drawn)) if has_labels else [],
            # Labels point away from the nearer side, and up, where no better case can be.
            textposition=["top right" if case["x"] < middle else "top left" for case in drawn],
            textfont={"size": 11},
            meta={"mostLabels": MOST_LABELS},
            hoverinfo="skip",
        )
    # The legend names the markers' shapes, where there are several.
    names = {}
    if len(sizes) > 1:
        pairs = zip(sizes, _SYMBOLS, strict=False)
        names = {counted(int(ranks), "rank"): symbol for ranks, symbol in pairs}
    if cases["is_oversubscribed"].any():
        names["oversubscribed"] = "circle-open"
    if cases["is_not_finite"].any():
        names["not finite"] = NOT_FINITE_SYMBOL
    for text, shape in names.items():
        marker = {"symbol": shape, "size": 9, "color": NEUTRAL}
        canvas.add_key(text, mode="markers", marker=marker)
    return canvas


def pareto_front(memory: Sequence[float], speed: Sequence[float]) -> list[int]:
    """Return the indices of the Pareto-optimal points: least memory, highest speed.

    No other point is at least as good in both and better in one. They are ordered by memory, hence
    also by speed; of points that are equal in both, the first is kept.
    """
    order = sorted(range(len(memory)), key=lambda i: (memory[i], -speed[i], i))
    front: list[int] = []
    for index in order:
        if not front or speed[index] > speed[front[-1]]:
            front.append(index)
    return front


CHART = Chart(
    name="pareto",
    order=50,
    heading="Throughput against memory",
    note="Ringed cases are Pareto-optimal: no other case is both faster and smaller. The line is "
    "the highest throughput within a given memory. Oversubscribed cases (open markers) are ignored "
    "unless all cases are oversubscribed.",
    concerns=(Caution.not_finite, Caution.oversubscribed, Caution.time_sliced),
    needs="its peak memory",
    draw=pareto,
)
