"""Scaling: tokens/s per rank against the number of ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from ppbench.cautions import Caution
from ppbench.config.case import EMULATED
from ppbench.display.cases import Axes
from ppbench.display.units import counted
from ppbench.report.charts.canvas import NEUTRAL, Canvas, Chart, Measured, symbol

_KINDS = ["schedule", "runtime"]


def scaling(measured: Measured) -> Canvas | None:
    """Draw the scaling efficiency of every case that has a base to compare with."""
    if "world_size" not in measured.axes:
        return None
    cases = efficiencies(measured.cases, measured.axes).dropna(subset=["efficiency"])
    if not (cases["world_size"] > cases["base_size"]).any():
        return None
    sizes = cases["base_size"].unique()
    base = counted(int(sizes[0]), "rank") if len(sizes) == 1 else "fewest ranks"
    title = f"efficiency, {base} = 100 %"
    canvas = Canvas(cases, measured.axes, title, {"tickformat": ".0%"})
    dotted = {"color": NEUTRAL, "width": 1.5, "dash": "dot"}
    ideal = {"type": "line", "xref": "x domain", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    for panel in canvas.panels:
        panel["layout"]["shapes"] = [{**ideal, "line": dotted}]
    canvas.add_key("ideal", mode="lines", line=dotted)
    for schedule, color, own in canvas.by_schedule():
        middle = (canvas.num_slots - 1) / 2
        canvas.marks(
            [{**case, "slot": middle} for case in sorted(own, key=lambda case: case["place"])],
            "scatter",
            "efficiency",
            lambda case: (
                f"{case['efficiency']:.1%}, {counted(int(case['base_size']), 'rank')} = 100%"
            ),
            name=schedule,
            mode="lines+markers",
            cliponaxis=False,
            line={"color": color, "width": 2},
            marker={"color": color, "size": 8, "symbol": symbol, "line": {"width": 0}},
        )
    if cases["is_oversubscribed"].any():
        marker = {"symbol": "circle-open", "size": 8, "color": NEUTRAL}
        canvas.add_key("oversubscribed", mode="markers", marker=marker)
    return canvas


def efficiencies(cases: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Add `base_size` and `efficiency`: tokens/s per rank over tokens/s per rank of the base.

    The base of a case differs from it only in `world_size`, which is the smallest one measured. On
    one rank every schedule computes the same, so another schedule is the base there if the case's
    own was not measured, and the unsplit model if its runtime was not. Each emulated rank takes
    the configured time, so the model grows with the number of ranks, and total tokens/s are
    compared instead.
    """
    free = ("world_size", *_KINDS)
    others = [axis for axis in axes if axis not in free] or ["device"]
    speed = cases["tokens_per_s"].mask(cases["is_not_finite"])  # no base
    rows = cases.assign(tokens_per_s=speed).dropna(subset=others).sort_index()
    keys = list(zip(*(rows[axis] for axis in others), strict=True))
    speeds: list[Any] = list(rows[[*free, "device", "tokens_per_s"]].itertuples(index=False))
    groups = defaultdict[Any, list[Any]](list)  # of cases that differ only in what is free
    for key, own in zip(keys, speeds, strict=True):
        groups[key].append(own)
    sizes: list[int] = []
    efficiency: list[float] = []  # NaN without a base
    for key, own in zip(keys, speeds, strict=True):
        single = [other for other in groups[key] if other.world_size == 1]
        kind = own.schedule, own.runtime
        alike = [other for other in groups[key] if (other.schedule, other.runtime) == kind]
        size = 1 if single else min(other.world_size for other in alike)
        bases = [next((case.tokens_per_s for case in alike if case.world_size == size), math.nan)]
        if single:
            by_runtime = {case.runtime: case.tokens_per_s for case in reversed(single)}
            unsplit = by_runtime.get("single", single[0].tokens_per_s)
            bases += [by_runtime.get(own.runtime, math.nan), unsplit]
        base = next((base for base in bases if not math.isnan(base)), math.nan)
        growth = 1.0 if own.device == EMULATED else own.world_size / size
        sizes.append(size)
        efficiency.append(own.tokens_per_s / base / growth if base else math.nan)
    return rows.assign(base_size=sizes, efficiency=np.array(efficiency, dtype=float))


CHART = Chart(
    name="scaling",
    order=20,
    heading="Scaling efficiency",
    note="Tokens/s per rank relative to a single rank, or to the fewest ranks measured; all other "
    "settings are equal. Emulated ranks take a configured time each, so their model grows with "
    "their number; for them, total tokens/s are compared.",
    concerns=(Caution.not_finite, Caution.oversubscribed, Caution.time_sliced),
    needs="cases that differ in world_size and in nothing else",
    draw=scaling,
)
