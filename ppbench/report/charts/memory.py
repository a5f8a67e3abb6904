"""How big the cases are: each rank beside its prediction, and what speed costs in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.analysis.front import pareto_front
from ppbench.report.cases import KNOBS, Axes, by_case, settings_text, work_axes
from ppbench.report.charts.canvas import (
    NOT_FINITE_SYMBOL,
    bars,
    blank,
    by_schedule,
    crowded_notes,
    in_panel,
    launch_notes,
    legend_key,
    markers,
    of_cases,
    shared,
    with_hatch_key,
)
from ppbench.report.palette import schedule_colors
from ppbench.report.panels import (
    AXIS_TITLE_PX,
    BOTTOM_PX,
    Panels,
    arrange,
    elided,
    figure_lines,
    figure_text,
    titles_and_panels,
)
from ppbench.report.style import NEUTRAL
from ppbench.report.units import counted, size_unit

MOST_LABELS = 6  # more would lie on each other
_FRONT_PX = 300
_PREDICTED = {"symbol": "diamond-open", "size": 8, "line": {"width": 1.2}}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star", "hexagram")


def peak_memory(runs: pd.DataFrame, ranks: pd.DataFrame, axes: Axes) -> go.Figure:
    """Peak allocated memory of every ok case: the highest rank as a bar, each rank as a point.

    `runs` and `ranks` are rows of the store's tables, `axes` the varying settings. Points stand
    from rank 0 on the left (or on top) to the last rank; a diamond is what was predicted of each.
    """
    cases = by_case(runs, axes)
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    panels = arrange(cases.assign(peak=cases["peak_memory_bytes"] / unit_bytes), axes)
    figure = blank(panels, unit, shared(panels, tickformat=",~r"))
    shown = f"%{{value:,.1f}} {unit}"
    figure.add_traces(list(bars(panels, "peak", f"{shown}, highest rank")))
    for column, name, marker, word in (
        ("predicted_peak_memory_bytes", "predicted", _PREDICTED, "predicted"),
        (
            "peak_memory_bytes",
            "each rank",
            {"symbol": "circle", "size": 4, "line": {"width": 0}},
            "measured",
        ),
    ):
        points = _rank_points(panels, runs, ranks, column, unit_bytes)
        figure.add_traces(list(markers(panels, points, name, marker, f" {word}: {shown}")))
    return with_hatch_key(figure, panels)


def pareto(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Tokens/s of every ok case against the peak memory of its fullest rank, with the front.

    `runs` are rows of the store's `runs`, `axes` the varying settings. On the front is a case that
    no other is both at least as fast and as small as. Oversubscribed cases count only where there
    are no others. A front compares cases that do the same work: each model, length, ... has a
    panel and a front of its own.

    For a page that hides cases: a trace with `meta.isFront` is the front of the other traces of its
    panel, whose `meta.isSound` tells which points count and `text` what each is called; names are
    shown of `layout.meta.mostLabels` at most.
    """
    cases = by_case(runs, axes).dropna(subset=["peak_memory_bytes"])
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    titles, numbers = titles_and_panels(cases, work_axes(axes))
    cases = cases.assign(panel=numbers, x=cases["peak_memory_bytes"] / unit_bytes)
    memory = {"rangemode": "tozero", "matches": "x", "zeroline": False, "tickformat": ",~r"}
    title = {"title": {"text": f"{unit}, fullest rank", "standoff": 4}}
    panels = Panels(
        cases, titles, {**memory, **title}, panel_px=_FRONT_PX, bottom_px=BOTTOM_PX + AXIS_TITLE_PX
    )
    figure = blank(panels, "tokens/s", {"matches": "y", "tickformat": ",~s"})
    figure.add_traces([*_points(panels, unit, axes), *_fronts(panels, axes), *_keys(cases)])
    return figure.update_layout(meta={**figure.layout.meta, "mostLabels": MOST_LABELS})


def _rank_points(
    panels: Panels, runs: pd.DataFrame, ranks: pd.DataFrame, column: str, unit_bytes: int
) -> pd.DataFrame:
    """One row per case and rank, spread over the width of the case's bar."""
    owned = ranks.reindex(columns=["run_id", "rank", column]).merge(
        runs[["run_id", "case_id"]], on="run_id"
    )
    peaks = owned.groupby(["case_id", "rank"])[column].median().reset_index()
    columns = ["case_id", "panel", "x", "text", "world_size"]
    points = peaks.merge(panels.cases[columns], on="case_id").dropna(subset=[column])
    spread = (points["rank"] + 0.5) / points["world_size"] - 0.5
    text = points["text"].map(figure_text)
    return points.assign(
        x=points["x"] + spread * panels.bar_width * 0.8,
        value=points[column] / unit_bytes,
        hover=text + "<br>rank " + points["rank"].astype(str),
    )


def _points(panels: Panels, unit: str, axes: Axes) -> Iterator[go.Scatter]:
    colors, sizes = schedule_colors(panels.cases["schedule"]), _sizes(panels.cases)
    for schedule, panel, cases, is_first in by_schedule(panels):
        notes = launch_notes(cases) + crowded_notes(cases)
        symbols = [_symbol(sizes, case) for _, case in cases.iterrows()]
        yield go.Scatter(
            x=cases["x"].to_list(),  # plain, for the page that seeks the front of some of them
            y=cases["tokens_per_s"].to_list(),
            **of_cases(cases, panel),
            name=figure_text(schedule),
            legendgroup=schedule,
            showlegend=is_first,
            mode="markers",
            cliponaxis=False,
            marker={"color": colors[schedule], "size": 9, "symbol": symbols, "line": {"width": 0}},
            text=_labels(cases, axes),
            meta={
                "isSound": (~cases["is_oversubscribed"] & ~cases["is_not_finite"]).to_list(),
                "isFinite": (~cases["is_not_finite"]).to_list(),
            },
            customdata=np.column_stack([cases["text"].map(figure_text), notes]),
            hovertemplate="<b>%{customdata[0]}</b><br>%{y:,.0f} tokens/s"
            f"<br>%{{x:,.1f}} {unit}, fullest rank%{{customdata[1]}}<extra></extra>",
        )


def _fronts(panels: Panels, axes: Axes) -> Iterator[go.Scatter]:
    """A stepped line in each panel: the most tokens/s that fit in so much memory."""
    for panel in range(len(panels.titles)):
        cases = _front(panels.cases[panels.cases["panel"] == panel])
        has_labels = len(cases) <= MOST_LABELS
        yield go.Scatter(
            x=cases["x"].to_list(),
            y=cases["tokens_per_s"].to_list(),
            **in_panel(panel),
            name="front",
            legendgroup="front",
            showlegend=panel == 0,
            mode="lines+markers+text" if has_labels else "lines+markers",
            cliponaxis=False,
            line={"color": NEUTRAL, "width": 1.5, "shape": "hv"},
            marker={"symbol": "circle-open", "size": 17, "color": NEUTRAL, "line": {"width": 1.5}},
            text=_labels(cases, axes) if has_labels else [],
            textposition=_beside(cases["x"], panels.cases["x"].max()),
            textfont={"size": 11},
            meta={"isFront": True},
            hoverinfo="skip",
        )


def _beside(memory: pd.Series, largest: float) -> list[str]:
    """Labels point away from the nearer side; up, where no case is that is faster and smaller."""
    return ["top right" if x < largest / 2 else "top left" for x in memory]


def _front(cases: pd.DataFrame) -> pd.DataFrame:
    finite = cases[~cases["is_not_finite"]]
    sound = finite[~finite["is_oversubscribed"]]
    pool = finite if sound.empty else sound
    return pool.iloc[pareto_front(pool["x"].tolist(), pool["tokens_per_s"].tolist())]


def _labels(cases: pd.DataFrame, axes: Axes) -> list[str]:
    knobs = [axis for axis in axes if axis in KNOBS] or ["schedule"]
    return [_label(case, knobs) for _, case in cases.iterrows()]


def _label(case: pd.Series, knobs: Sequence[str]) -> str:
    settings = [settings_text(case, [knob]) for knob in knobs]
    return figure_lines(", ".join(elided(setting) for setting in settings if setting))


def _sizes(cases: pd.DataFrame) -> list[int]:
    return sorted(cases["world_size"].unique())


def _symbol(sizes: list[int], case: pd.Series) -> str:
    symbol = _SYMBOLS[sizes.index(case["world_size"]) % len(_SYMBOLS)]
    if case["is_not_finite"]:
        return NOT_FINITE_SYMBOL
    return f"{symbol}-open" if case["is_oversubscribed"] else symbol


def _keys(cases: pd.DataFrame) -> Iterator[go.Scatter]:
    """What the markers' shapes mean, where there are several."""
    sizes = _sizes(cases)
    if len(sizes) > 1:
        for size, symbol in zip(sizes, _SYMBOLS, strict=False):
            name = counted(int(size), "rank")
            yield legend_key(name, {"symbol": symbol, "size": 9, "color": NEUTRAL})
    if cases["is_oversubscribed"].any():
        yield legend_key("oversubscribed", {"symbol": "circle-open", "size": 9, "color": NEUTRAL})
    if cases["is_not_finite"].any():
        yield legend_key("not finite", {"symbol": NOT_FINITE_SYMBOL, "size": 9, "color": NEUTRAL})
