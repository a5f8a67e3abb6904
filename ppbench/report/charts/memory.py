"""Charts of memory: peak by rank beside its prediction, speed against memory, and over time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ppbench.display.cases import KNOBS, Axes, settings_text, work_axes
from ppbench.display.colors import rank_color, schedule_colors
from ppbench.display.fields import field_of
from ppbench.display.units import NS_PER_MS, counted, is_missing, size_unit
from ppbench.report.charts.canvas import (
    NEUTRAL,
    NOT_FINITE_SYMBOL,
    PLAIN,
    bars,
    blank,
    by_schedule,
    caution_notes,
    hover_texts,
    ids_in_panel,
    in_panel,
    launch_notes,
    legend,
    legend_key,
    markers,
    scatter,
    shared_axis,
    with_hatch_key,
)
from ppbench.report.charts.panels import (
    AXIS_TITLE_PX,
    BOTTOM_PX,
    Panels,
    arrange,
    elided,
    figure_lines,
    figure_text,
    in_panels,
)
from ppbench.report.scripts import Picture

MOST_LABELS = 6  # more would overlap
FRONT_PX = 300
_MEMORY_PX, _TOP_PX, _BOTTOM_PX = 320, 38, 36
_PREDICTED = {"symbol": "diamond-open", "size": 8, "line": {"width": 1.2}}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star", "hexagram")


def peak_memory(
    cases: pd.DataFrame, runs: pd.DataFrame, ranks: pd.DataFrame, axes: Axes
) -> Picture:
    """Draw the peak allocated memory of every ok case: the highest rank as a bar, each as a point.

    Points run from rank 0 on the left (or on top) to the last rank; diamonds are the predictions.
    `cases` are rows of `by_case`, `runs` and `ranks` of the store's tables, `axes` the varying
    settings.
    """
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    panels = arrange(cases.assign(peak=cases["peak_memory_bytes"] / unit_bytes), axes)
    figure = blank(panels, unit, shared_axis(panels, tickformat=",~r"))
    shown = f"%{{value:,.1f}} {unit}"
    figure["data"] += bars(panels, "peak", f"{shown}, highest rank")
    for column, name, marker, word in (
        ("predicted_peak_memory_bytes", "predicted", _PREDICTED, "predicted"),
        (
            "peak_memory_bytes",
            "each rank",
            {"symbol": "circle", "size": 4, "line": {"width": 0}},
            "measured",
        ),
    ):
        # A row per case and rank, of replicas the fullest, spread over the width of the case's bar.
        owned = ranks.reindex(columns=["run_id", "rank", column]).merge(
            runs[["run_id", "case_id"]], on="run_id"
        )
        fullest = owned.groupby(["run_id", "case_id", "rank"])[column].max()
        peaks = fullest.groupby(["case_id", "rank"]).median().reset_index()
        columns = ["case_id", "panel", "x", "text", "world_size"]
        points = peaks.merge(panels.cases[columns], on="case_id").dropna(subset=[column])
        spread = (points["rank"] + 0.5) / points["world_size"] - 0.5
        text = points["text"].map(figure_text)
        points = points.assign(
            x=points["x"] + spread * panels.bar_width * 0.8,
            value=points[column] / unit_bytes,
            hover=text + "<br>rank " + points["rank"].astype(str),
        )
        figure["data"] += markers(panels, points, name, marker, f" {word}: {shown}")
    return with_hatch_key(figure, panels)


def pareto(cases: pd.DataFrame, axes: Axes, panel_px: int = FRONT_PX) -> Picture:
    """Draw the tokens/s of every ok case against the peak memory of its fullest rank.

    The Pareto front holds the cases that no other equals in both and beats in one. Oversubscribed
    cases count only if there are no others. A front compares cases that do the same work, so each
    model, length, ... has its own panel and front. `cases` are rows of `by_case`, `axes` the
    varying settings.

    For a page that hides cases: a trace with `meta.isFront` is the front of the other traces of its
    panel; their `meta.isSound` selects the points that count, their `text` names them. A front of
    more than `layout.meta.mostLabels` points shows no names.
    """
    cases = cases.dropna(subset=["peak_memory_bytes"])
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    cases = cases.assign(x=cases["peak_memory_bytes"] / unit_bytes)
    cases, titles = in_panels(cases, work_axes(axes))
    memory = {"rangemode": "tozero", "matches": "x", "zeroline": False, "tickformat": ",~r"}
    title = {"title": {"text": f"{unit}, fullest rank", "standoff": 4}}
    panels = Panels(
        cases, titles, {**memory, **title}, panel_px=panel_px, bottom_px=BOTTOM_PX + AXIS_TITLE_PX
    )
    figure = blank(panels, field_of("tokens_per_s").heading, {"matches": "y", "tickformat": ",~s"})
    figure["layout"]["meta"]["mostLabels"] = MOST_LABELS
    colors = schedule_colors(cases["schedule"])
    sizes = sorted(cases["world_size"].unique())
    for schedule, panel, drawn, is_first in by_schedule(panels):
        symbols = []
        for case in drawn[["world_size", "is_oversubscribed", "is_not_finite"]].to_dict("records"):
            symbol = _SYMBOLS[sizes.index(case["world_size"]) % len(_SYMBOLS)]
            shape = f"{symbol}-open" if case["is_oversubscribed"] else symbol
            symbols.append(NOT_FINITE_SYMBOL if case["is_not_finite"] else shape)
        points = scatter(
            x=drawn["x"].to_list(),  # plain: the page computes the front of some of them
            y=drawn["tokens_per_s"].to_list(),
            **ids_in_panel(drawn, panel),
            name=figure_text(schedule),
            legendgroup=schedule,
            showlegend=is_first,
            mode="markers",
            cliponaxis=False,
            marker={"color": colors[schedule], "size": 9, "symbol": symbols, "line": {"width": 0}},
            text=_labels(drawn, axes),
            meta={
                "isSound": (~drawn["is_oversubscribed"] & ~drawn["is_not_finite"]).to_list(),
                "isFinite": (~drawn["is_not_finite"]).to_list(),
            },
            customdata=hover_texts(drawn, launch_notes(drawn) + caution_notes(drawn)),
            hovertemplate="<b>%{customdata[0]}</b><br>%{y:,.0f} tokens/s"
            f"<br>%{{x:,.1f}} {unit}, fullest rank%{{customdata[1]}}<extra></extra>",
        )
        figure["data"].append(points)
    # A stepped line per panel is the highest tokens/s within a given memory.
    middle = cases["x"].max() / 2
    for panel in range(len(titles)):
        own = cases[cases["panel"] == panel]
        finite = own[~own["is_not_finite"]]
        sound = finite[~finite["is_oversubscribed"]]
        pool = finite if sound.empty else sound
        drawn = pool.iloc[pareto_front(pool["x"].tolist(), pool["tokens_per_s"].tolist())]
        has_labels = len(drawn) <= MOST_LABELS
        front = scatter(
            x=drawn["x"].to_list(),
            y=drawn["tokens_per_s"].to_list(),
            **in_panel(panel),
            name="front",
            legendgroup="front",
            showlegend=panel == 0,
            mode="lines+markers+text" if has_labels else "lines+markers",
            cliponaxis=False,
            line={"color": NEUTRAL, "width": 1.5, "shape": "hv"},
            marker={"symbol": "circle-open", "size": 17, "color": NEUTRAL, "line": {"width": 1.5}},
            text=_labels(drawn, axes) if has_labels else [],
            # Labels point away from the nearer side, and up, where no better case can be.
            textposition=["top right" if x < middle else "top left" for x in drawn["x"]],
            textfont={"size": 11},
            meta={"isFront": True},
            hoverinfo="skip",
        )
        figure["data"].append(front)
    # The legend names the markers' shapes, where there are several.
    names = {}
    if len(sizes) > 1:
        pairs = zip(sizes, _SYMBOLS, strict=False)
        names = {counted(int(size), "rank"): symbol for size, symbol in pairs}
    if cases["is_oversubscribed"].any():
        names["oversubscribed"] = "circle-open"
    if cases["is_not_finite"].any():
        names["not finite"] = NOT_FINITE_SYMBOL
    figure["data"] += [
        legend_key(name, {"symbol": symbol, "size": 9, "color": NEUTRAL})
        for name, symbol in names.items()
    ]
    return figure


def _labels(cases: pd.DataFrame, axes: Axes) -> list[str]:
    knobs = [axis for axis in axes if axis in KNOBS] or ["schedule"]
    settings = (
        [settings_text(case, [knob]) for knob in knobs] for case in cases[knobs].to_dict("records")
    )
    return [figure_lines(", ".join(elided(one) for one in own if one)) for own in settings]


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


def memory_over_time(levels: pd.DataFrame, ranks: pd.DataFrame) -> Picture:
    """Draw the bytes allocated on each rank during the extra step that records memory.

    `levels` has the columns `rank`, `time_ns` (start of the level) and `num_bytes`, and at least
    one row. `ranks` are the run's rows of the store's `ranks`; predicted peaks are dashed lines. Of
    replicas, the one that holds the most is drawn.
    """
    fullest, whose = int(levels["replica"].iloc[int(levels["num_bytes"].argmax())]), ""
    if levels["replica"].any():
        whose = f" (replica {fullest}, the fullest)"
        levels, ranks = (rows[rows["replica"] == fullest] for rows in (levels, ranks))
    unit, unit_bytes = size_unit(levels["num_bytes"].max())
    num_ranks = int(levels["rank"].max()) + 1
    end_ms = float(levels["time_ns"].max()) / NS_PER_MS
    peaks = ranks.set_index("rank")["predicted_peak_memory_bytes"]
    figure: Picture = {
        "data": [],
        "layout": {
            "template": PLAIN,
            "height": _MEMORY_PX,
            "margin": {"l": 58, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
            "hovermode": "closest",
            "showlegend": True,
            "legend": legend(),
            "xaxis": {"ticksuffix": " ms", "showticksuffix": "first", "rangemode": "tozero"},
            "yaxis": {"title": {"text": unit + whose}, "rangemode": "tozero"},
        },
    }
    for rank in sorted(levels["rank"].unique().tolist()):
        color, own = rank_color(rank, num_ranks), levels[levels["rank"] == rank]
        allocated = scatter(
            name=f"rank {rank}",
            legendgroup=f"rank {rank}",
            x=own["time_ns"].to_numpy(dtype=float) / NS_PER_MS,
            y=own["num_bytes"].to_numpy(dtype=float) / unit_bytes,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": color},
            hovertemplate=f"rank {rank}<br>%{{x:.2f}} ms<br>%{{y:,.1f}} {unit}<extra></extra>",
        )
        figure["data"].append(allocated)
        if not is_missing(peak := peaks.get(rank)):
            predicted = scatter(
                name=f"rank {rank}, predicted peak",
                legendgroup=f"rank {rank}",
                showlegend=False,
                x=[0, end_ms],
                y=[float(str(peak)) / unit_bytes] * 2,
                mode="lines",
                line={"width": 1, "dash": "dash", "color": color},
                hovertemplate=f"rank {rank}, predicted peak<br>%{{y:,.1f}} {unit}<extra></extra>",
            )
            figure["data"].append(predicted)
    return figure
