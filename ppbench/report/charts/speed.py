"""How fast the cases are, and what further ranks are worth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.config.case import EMULATED
from ppbench.report.cases import Axes, by_case
from ppbench.report.charts.canvas import (
    NOT_FINITE_SYMBOL,
    bars,
    blank,
    by_schedule,
    crowded_notes,
    in_panel,
    legend_key,
    of_cases,
    shared,
    with_hatch_key,
)
from ppbench.report.palette import schedule_colors
from ppbench.report.panels import Panels, arrange, figure_text
from ppbench.report.style import NEUTRAL
from ppbench.report.units import counted

_KINDS = ["schedule", "runtime"]


def throughput(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Tokens/s of every ok case, the median over its launches; `axes` are the varying settings.

    `runs` are rows of the store's `runs`. Error bars are from the slowest to the fastest launch, or
    the 95 % interval of the median over the steps of an only launch.
    """
    panels = arrange(by_case(runs, axes), axes)
    figure = blank(panels, "tokens/s", shared(panels, tickformat=",~s"))
    shown = "%{value:,.0f} tokens/s"
    figure.add_traces(list(bars(panels, "tokens_per_s", shown, with_spread=True)))
    return with_hatch_key(figure, panels)


def scaling(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Scaling efficiency of every ok case against world size; see `efficiencies`.

    `runs` are rows of the store's `runs`, `axes` the varying settings, of which `world_size` must
    be one. Cases without a base to be held against are not drawn.
    """
    cases = efficiencies(by_case(runs, axes), axes).dropna(subset=["efficiency"])
    panels = arrange(cases, axes)
    scale = shared(panels, tickformat=".0%", rangemode="normal")
    figure = blank(panels, f"efficiency, {base_text(cases)} = 100 %", scale)
    figure.add_traces([*_ideal(panels), *_lines(panels)])
    if cases["is_oversubscribed"].any():
        open_circle = {"symbol": "circle-open", "size": 8, "color": NEUTRAL}
        figure.add_trace(legend_key("oversubscribed", open_circle))
    return figure


def efficiencies(cases: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Add `base_size` and `efficiency`, tokens/s of a rank over those of a rank of its base.

    The base of a case differs from it in nothing but `world_size`, of which it has the least that
    was measured. At one rank every schedule computes the same, so any schedule will do there if the
    case's own was not measured, and the unsplit model if its runtime was not. Each emulated rank
    takes the time that was set, however many there are: the model grows with them, and it is
    tokens/s themselves that should stay the same.
    """
    free = ("world_size", *_KINDS)
    others = [axis for axis in axes if axis not in free] or ["device"]
    parts = [_of_group(group) for _, group in cases.groupby(others, sort=False)]
    return pd.concat(parts).sort_index() if parts else cases


def _of_group(group: pd.DataFrame) -> pd.DataFrame:
    """Cases that differ in schedule, runtime and world size only."""
    alone = group[group["world_size"] == 1]
    size = group.groupby(_KINDS)["world_size"].transform("min")
    if not alone.empty:
        size[:] = 1
    speed = group["tokens_per_s"].mask(group["is_not_finite"])  # what broke down is no base
    group = group.assign(tokens_per_s=speed)
    alone = group[group["world_size"] == 1]
    bases = group[group["world_size"] == size].drop_duplicates(_KINDS).set_index(_KINDS)
    base = group[_KINDS].join(bases["tokens_per_s"], on=_KINDS)["tokens_per_s"]
    if not alone.empty:
        by_runtime = alone.drop_duplicates("runtime").set_index("runtime")["tokens_per_s"]
        unsplit = by_runtime.get("single", by_runtime.iloc[0])
        base = base.fillna(group["runtime"].map(by_runtime)).fillna(unsplit)
    growth = (group["world_size"] / size).mask(group["device"] == EMULATED, 1.0)
    return group.assign(base_size=size, efficiency=group["tokens_per_s"] / base / growth)


def base_text(cases: pd.DataFrame) -> str:
    """What is 100 %: `1 rank`, or whatever is the fewest measured."""
    sizes = cases["base_size"].unique()
    return counted(int(sizes[0]), "rank") if len(sizes) == 1 else "fewest ranks"


def has_scaling(cases: pd.DataFrame, axes: Axes) -> bool:
    """Whether some case of more ranks than its base can be held against it."""
    if "world_size" not in axes or cases.empty:
        return False
    told = efficiencies(cases, axes).dropna(subset=["efficiency"])
    return bool((told["world_size"] > told["base_size"]).any())


def _lines(panels: Panels) -> Iterator[go.Scatter]:
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, panel, of_schedule, is_first in by_schedule(panels):
        cases = of_schedule.sort_values("tick")
        shapes = np.where(cases["is_oversubscribed"], "circle-open", "circle")
        symbols = np.where(cases["is_not_finite"], NOT_FINITE_SYMBOL, shapes).tolist()
        yield go.Scatter(
            **panels.at(cases["tick"], cases["efficiency"]),
            **of_cases(cases, panel),
            name=figure_text(schedule),
            legendgroup=schedule,
            showlegend=is_first,
            mode="lines+markers",
            cliponaxis=False,
            line={"color": colors[schedule], "width": 2},
            marker={"color": colors[schedule], "size": 8, "symbol": symbols, "line": {"width": 0}},
            customdata=_notes(cases),
            hovertemplate="<b>%{customdata[0]}</b><br>%{y:.1%}%{customdata[1]}<extra></extra>",
        )


def _notes(cases: pd.DataFrame) -> np.ndarray:
    base = [f", {counted(int(size), 'rank')} = 100%" for size in cases["base_size"]]
    return np.column_stack([cases["text"].map(figure_text), base + crowded_notes(cases)])


def _ideal(panels: Panels) -> Iterator[go.Scatter]:
    """A line at 100 % in each panel, from its first tick to its last."""
    for panel in range(len(panels.titles)):
        yield go.Scatter(
            **in_panel(panel),
            name="ideal",
            legendgroup="ideal",
            showlegend=panel == 0,
            x=[panels.cases["tick"].min(), panels.cases["tick"].max()],
            y=[1.0, 1.0],
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5, "dash": "dot"},
            hoverinfo="skip",
        )
