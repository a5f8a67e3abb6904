"""Figures: DataFrame in, plotly Figure out. Pure, so that notebooks and pages draw the same.

Every mark is a bar or a marker of a few traces with typed numeric arrays. Never a trace, a shape
or an annotation per span, and no `plotly.express.timeline` (dates on a categorical axis): those
turn slow at a thousand spans, these do not at many thousands.

A row of the Gantt chart, one per rank, rank 0 on top:

    compute  | 0 | 1 |   0   | 2 |   1   |      thick; the microbatch inside; idle shows behind
    send        -   -       -                   thin; forward and backward in their own colours
    recv      -   -     -                       thin; from when both ends were ready
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from engine.plan.action import RECV_OPS, SEND_OPS, Op
from engine.plan.spans import Lane, lane_of
from ppbench.analysis.metrics import compute_spans
from ppbench.analysis.transfers import moving_start_ns
from ppbench.report.cases import Axes, by_case
from ppbench.report.palette import (
    IDLE_COLOR,
    LIGHTEST,
    OP_COLORS,
    OP_WORDS,
    SCHEDULE_CYCLE,
    TRACK_COLOR,
    ink_on,
    schedule_colors,
    tinted,
)
from ppbench.report.panels import (
    BOTTOM_PX,
    TOP_PX,
    Panels,
    Update,
    arrange,
    arrangement,
    axes_of,
    axis_key,
    columns_offered,
    figure_text,
    title_annotations,
)
from ppbench.report.units import NS_PER_MS, size_unit

LANE_CENTRES: dict[Lane, float] = {Lane.COMPUTE: -0.14, Lane.SEND: 0.24, Lane.RECV: 0.38}
LANE_HEIGHTS: dict[Lane, float] = {Lane.COMPUTE: 0.56, Lane.SEND: 0.11, Lane.RECV: 0.11}
_RANK_PX, _GANTT_TOP_PX, _GANTT_BOTTOM_PX = 96, 38, 36
_MEMORY_PX = 320
_SMALL = '<span style="font-size:9px">{}</span>'
_MAX_OUTLINED = 1500  # with more compute spans than this, outlines would hide the bars
_TRANSFERS = SEND_OPS | RECV_OPS
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_NEUTRAL = "#808080"  # reads on white and on near-black; a page puts its own colours instead
_FRAME = "rgba(128,128,128,0.22)"
_PLAIN = {
    "layout": {
        "font": {"family": _FONT, "size": 12, "color": _NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
        "yaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
    },
    "data": {"scatter": [{"marker": {"color": _NEUTRAL}}]},
}


def gantt(spans: pd.DataFrame, title: str) -> go.Figure:
    """One step of one run, in ms since its first computation.

    `spans` has the columns of `engine.plan.spans.Span` for a single step, at least one span, and
    a unique index. Transfers are drawn from when both ends were ready; hovering tells how long
    the end that came first had waited.
    """
    drawn = _drawn(spans)
    unit, unit_bytes = size_unit(drawn["num_bytes"].max())
    figure = go.Figure(layout=_gantt_layout(drawn, title))
    figure.add_traces([_lane_tracks(drawn), _idle_bars(drawn)])
    for op in Op:
        bars = drawn[drawn["op"] == op.value]
        if not bars.empty:
            figure.add_trace(_op_bars(op, bars, unit, unit_bytes))
    figure.update_traces(
        marker_line_width=0.6 if len(drawn) <= _MAX_OUTLINED else 0,
        selector=lambda trace: trace.meta == Lane.COMPUTE.value,
    )
    return figure


def _drawn(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans with `begin_ms`, `width_ms` and `waited_ms`, in the order they were given.

    `way` is 0 for the first stage that a rank computes, 1 for the second, and so on.
    """
    origin_ns = compute_spans(spans)["start_ns"].min()
    moving_ns = moving_start_ns(spans)
    stages = compute_spans(spans)[["rank", "stage"]].drop_duplicates().sort_values("stage")
    ways = stages.assign(way=stages.groupby("rank").cumcount()).set_index(["rank", "stage"])["way"]
    places = pd.MultiIndex.from_frame(spans[["rank", "stage"]])
    return spans.assign(
        way=ways.reindex(places).fillna(0).to_numpy(dtype=int),
        begin_ms=(moving_ns - origin_ns) / NS_PER_MS,
        width_ms=(spans["end_ns"] - moving_ns).clip(lower=0) / NS_PER_MS,
        waited_ms=(moving_ns - spans["start_ns"]) / NS_PER_MS,
    )


def _lane_tracks(drawn: pd.DataFrame) -> go.Bar:
    """A faint track per rank for sends and for receives, so that the thin lanes can be seen."""
    ranks = np.sort(drawn["rank"].unique()).astype(float)
    lanes = [ranks + LANE_CENTRES[lane] for lane in (Lane.SEND, Lane.RECV)]
    return go.Bar(
        orientation="h",
        y=np.concatenate(lanes),
        base=np.zeros(2 * len(ranks)),
        x=np.full(2 * len(ranks), _end_ms(drawn)),
        width=LANE_HEIGHTS[Lane.SEND],
        marker={"color": TRACK_COLOR, "line": {"width": 0}},
        hoverinfo="skip",
        showlegend=False,
    )


def _end_ms(drawn: pd.DataFrame) -> float:
    return float((drawn["begin_ms"] + drawn["width_ms"]).max())


def _idle_bars(drawn: pd.DataFrame) -> go.Bar:
    """The step behind each rank's compute lane: what stays visible of it is the bubble."""
    end_ms = _end_ms(drawn[drawn["op"] != Op.OPT.value])
    ranks = np.sort(drawn["rank"].unique()).astype(float)
    return go.Bar(
        name="idle",
        orientation="h",
        y=ranks + LANE_CENTRES[Lane.COMPUTE],
        base=np.zeros(len(ranks)),
        x=np.full(len(ranks), end_ms),
        width=LANE_HEIGHTS[Lane.COMPUTE],
        marker={"color": IDLE_COLOR, "line": {"width": 0}},
        hoverinfo="skip",
        legendrank=2000,
    )


def _op_bars(op: Op, bars: pd.DataFrame, unit: str, unit_bytes: int) -> go.Bar:
    lane, is_transfer = lane_of(op), op in _TRANSFERS
    if not is_transfer:
        bars = bars.sort_values("way", kind="stable")  # the legend has the first bar's colour
    color = _colors_of(op, bars)
    details = ["rank", "stage", "microbatch", "waited_ms"]
    sizes = bars["num_bytes"].to_numpy(dtype=float) / unit_bytes
    inside = {} if is_transfer or op is Op.OPT else _inside_text(bars, color)
    return go.Bar(
        name=OP_WORDS[op],
        orientation="h",
        y=bars["rank"].to_numpy(dtype=float) + LANE_CENTRES[lane],
        base=bars["begin_ms"].to_numpy(dtype=float),
        x=bars["width_ms"].to_numpy(dtype=float),
        width=LANE_HEIGHTS[lane],
        # A transfer may last less than a pixel; an outline in its own colour keeps it visible.
        marker={"color": color, "line": {"width": 1, "color": color} if is_transfer else {}},
        customdata=np.column_stack([bars[details].to_numpy(dtype=float), sizes, bars["width_ms"]]),
        hovertemplate=_hover(op, unit),
        meta=lane.value,
        **inside,
    )


def _colors_of(op: Op, bars: pd.DataFrame) -> str | list[str]:
    """The op's colour, lighter with each further stage of a rank that computes it."""
    if op in _TRANSFERS or not bars["way"].any():
        return OP_COLORS[op]
    most = bars["way"].max()
    return [tinted(OP_COLORS[op], LIGHTEST * way / most) for way in bars["way"]]


def _inside_text(bars: pd.DataFrame, color: str | list[str]) -> Update:
    inks = ink_on(color) if isinstance(color, str) else [ink_on(one) for one in color]
    return {
        "text": bars["microbatch"].astype(str).to_list(),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "insidetextfont": {"color": inks},
    }


def _hover(op: Op, unit: str) -> str:
    where = ["microbatch %{customdata[2]}", "rank %{customdata[0]}, stage %{customdata[1]}"]
    lines = [f"<b>{OP_WORDS[op]}</b>", *(["rank %{customdata[0]}"] if op is Op.OPT else where)]
    lines += ["start %{base:,.3f} ms", "duration %{customdata[5]:,.3f} ms"]
    if op in _TRANSFERS:
        lines += [f"%{{customdata[4]:,.1f}} {unit}", "posted %{customdata[3]:,.3f} ms earlier"]
    return "<br>".join(lines) + "<extra></extra>"


def _gantt_layout(drawn: pd.DataFrame, title: str) -> Update:
    num_ranks = int(drawn["rank"].max()) + 1
    top = _GANTT_TOP_PX + (34 if title else 0)
    return {
        "template": _PLAIN,
        "title": {"text": figure_text(title), "x": 0, "xref": "paper", "font": {"size": 15}},
        "barmode": "overlay",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "height": num_ranks * _RANK_PX + top + _GANTT_BOTTOM_PX,
        "margin": {"l": 54, "r": 12, "t": top, "b": _GANTT_BOTTOM_PX},
        "hovermode": "closest",
        "dragmode": "zoom",
        "legend": _legend(),
        "xaxis": {
            "range": [0, _end_ms(drawn) * 1.005],
            "ticksuffix": " ms",
            "showticksuffix": "last",
            "zeroline": False,
        },
        "yaxis": {
            "range": [num_ranks - 0.48, -0.52],
            **_lane_ticks(num_ranks),
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
    }


def _lane_ticks(num_ranks: int) -> Update:
    """`rank 0`, and in small print `send` and `recv` under it."""
    words = {
        Lane.COMPUTE: "rank {}",
        Lane.SEND: _SMALL.format("send"),
        Lane.RECV: _SMALL.format("recv"),
    }
    places = [(rank, lane) for rank in range(num_ranks) for lane in words]
    return {
        "tickvals": np.array([rank + LANE_CENTRES[lane] for rank, lane in places]),
        "ticktext": [words[lane].format(rank) for rank, lane in places],
        "ticklabelstandoff": 4,
    }


def _legend() -> Update:
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}


def throughput(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Tokens/s of every ok case, the median over its launches; `axes` are the varying settings."""
    panels = arrange(by_case(runs, axes), axes)
    figure = _chart(panels, "tokens/s", {"tickformat": ",~s"})
    figure.add_traces(list(_bars(panels, "tokens_per_s", "%{y:,.0f} tokens/s")))
    return _with_hatch_key(figure, panels)


def bubble(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Measured `bubble_fraction` of every ok case, as bars; the schedule's theory as markers."""
    panels = arrange(by_case(runs, axes), axes)
    figure = _chart(panels, "bubble", {"tickformat": ".0%"})
    figure.add_traces(list(_bars(panels, "bubble_fraction", "%{y:.1%} measured")))
    cases = panels.cases
    marks = cases.assign(
        y=cases["bubble_fraction_theory"], hover=cases["text"].map(figure_text) + "<br>theory"
    )
    figure.add_traces(list(_markers(marks, "theory", "diamond", 8, "%{y:.1%}")))
    return _with_hatch_key(figure, panels)


def peak_memory(runs: pd.DataFrame, ranks: pd.DataFrame, axes: Axes) -> go.Figure:
    """Peak allocated memory of every ok case: the highest rank as a bar, each rank as a point.

    `ranks` holds the store's `ranks` rows of these runs. Points stand from rank 0 on the left to
    the last rank on the right of their bar.
    """
    cases = by_case(runs, axes)
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    cases["peak"] = cases["peak_memory_bytes"] / unit_bytes
    panels = arrange(cases, axes)
    figure = _chart(panels, unit, {"tickformat": ",~r"})
    figure.add_traces(list(_bars(panels, "peak", f"%{{y:,.1f}} {unit}, highest rank")))
    points = _rank_points(panels, runs, ranks, unit_bytes)
    figure.add_traces(list(_markers(points, "each rank", "circle", 5, f"%{{y:,.1f}} {unit}")))
    return _with_hatch_key(figure, panels)


def memory(levels: pd.DataFrame) -> go.Figure:
    """What each rank had allocated over the extra step for memory, as steps.

    `levels` has the columns `rank`, `time_ns` (from when on) and `num_bytes`, at least one row.
    """
    unit, unit_bytes = size_unit(levels["num_bytes"].max())
    hover = f"rank %{{meta}}<br>%{{x:.2f}} ms<br>%{{y:,.1f}} {unit}<extra></extra>"
    lines = [
        go.Scatter(
            name=f"rank {rank}",
            meta=rank,
            x=of_rank["time_ns"] / NS_PER_MS,
            y=of_rank["num_bytes"] / unit_bytes,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": color},
            hovertemplate=hover,
        )
        for (rank, of_rank), color in zip(
            levels.groupby("rank"), itertools.cycle(SCHEDULE_CYCLE), strict=False
        )
    ]
    layout = {
        "template": _PLAIN,
        "height": _MEMORY_PX,
        "margin": {"l": 58, "r": 12, "t": _GANTT_TOP_PX, "b": _GANTT_BOTTOM_PX},
        "hovermode": "closest",
        "showlegend": True,
        "legend": {**_legend(), "y": 1, "yanchor": "bottom"},
        "xaxis": {"ticksuffix": " ms", "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return go.Figure(lines, layout)


def _chart(panels: Panels, y_title: str, y_axis: Update) -> go.Figure:
    """An empty chart. `layout.meta.arrangements` holds its layout for each number of columns."""
    num_panels = len(panels.titles)
    offered = columns_offered(num_panels)
    arrangements = {columns: arrangement(num_panels, columns, y_title) for columns in offered}
    figure = go.Figure(
        layout={
            "template": _PLAIN,
            "barmode": "overlay",
            "margin": {"l": 58, "r": 12, "t": TOP_PX, "b": BOTTOM_PX},
            "hovermode": "closest",
            "legend": {**_legend(), "yref": "container", "y": 1, "yanchor": "top"},
            "annotations": title_annotations(panels),
            "meta": {"arrangements": {str(n): update for n, update in arrangements.items()}},
            **axes_of(panels, {"rangemode": "tozero", "zeroline": False, **y_axis}),
        }
    )
    return figure.update_layout(arrangements[offered[-1]])


def _bars(panels: Panels, column: str, shown: str) -> Iterator[go.Bar]:
    """One trace per schedule and panel; the legend names each schedule once."""
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, of_schedule in panels.cases.groupby("schedule", sort=False):
        for number, (panel, cases) in enumerate(of_schedule.groupby("panel")):
            key = axis_key(int(str(panel)))
            yield go.Bar(
                name=figure_text(schedule),
                legendgroup=str(schedule),
                showlegend=number == 0,
                x=cases["x"].to_numpy(dtype=float),
                y=cases[column].to_numpy(dtype=float),
                width=panels.bar_width,
                xaxis=f"x{key}",
                yaxis=f"y{key}",
                marker={
                    "color": colors[str(schedule)],
                    "line": {"width": 0},
                    "pattern": {**_HATCH, "shape": np.where(cases["is_oversubscribed"], "/", "")},
                },
                customdata=_notes(cases),
                hovertemplate=f"<b>%{{customdata[0]}}</b><br>{shown}%{{customdata[1]}}<extra></extra>",
            )


_HATCH = {"size": 6, "solidity": 0.35, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}


def _notes(cases: pd.DataFrame) -> np.ndarray:
    """For hovering: the case in words, and what must be known about its figure."""
    launches = cases["num_launches"].map(lambda n: f"<br>median of {n} launches" if n > 1 else "")
    crowded = cases["is_oversubscribed"].map(
        {
            True: "<br>oversubscribed: ranks shared cores,<br>says nothing about the schedule",
            False: "",
        }
    )
    return np.column_stack([cases["text"].map(figure_text), launches + crowded])


def _markers(
    points: pd.DataFrame, name: str, symbol: str, size_px: int, shown: str
) -> Iterator[go.Scatter]:
    """Markers at `x`, `y` of each panel, with `hover` as their heading."""
    for number, (panel, of_panel) in enumerate(points.groupby("panel")):
        key = axis_key(int(str(panel)))
        yield go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=number == 0,
            mode="markers",
            cliponaxis=False,
            x=of_panel["x"].to_numpy(dtype=float),
            y=of_panel["y"].to_numpy(dtype=float),
            xaxis=f"x{key}",
            yaxis=f"y{key}",
            marker={"symbol": symbol, "size": size_px, "line": {"width": 1, "color": "#ffffff"}},
            text=of_panel["hover"].to_list(),
            hovertemplate=f"%{{text}}: {shown}<extra></extra>",
        )


def _rank_points(
    panels: Panels, runs: pd.DataFrame, ranks: pd.DataFrame, unit_bytes: int
) -> pd.DataFrame:
    """One row per case and rank, spread over the width of the case's bar."""
    owned = ranks.merge(runs[["run_id", "case_id"]], on="run_id")
    peaks = owned.groupby(["case_id", "rank"])["peak_memory_bytes"].median().reset_index()
    columns = ["case_id", "panel", "x", "text", "world_size"]
    points = peaks.merge(panels.cases[columns], on="case_id").dropna()
    spread = (points["rank"] + 0.5) / points["world_size"] - 0.5
    text = points["text"].map(figure_text)
    return points.assign(
        x=points["x"] + spread * panels.bar_width * 0.8,
        y=points["peak_memory_bytes"] / unit_bytes,
        hover=text + "<br>rank " + points["rank"].astype(str),
    )


def _with_hatch_key(figure: go.Figure, panels: Panels) -> go.Figure:
    """Explain the hatching in the legend, where there is any."""
    if panels.cases["is_oversubscribed"].any():
        pattern = {**_HATCH, "shape": "/"}
        figure.add_trace(
            go.Bar(
                name="oversubscribed",
                x=[None],
                y=[None],
                marker={"color": _NEUTRAL, "line": {"width": 0}, "pattern": pattern},
                hoverinfo="skip",
            )
        )
    return figure
