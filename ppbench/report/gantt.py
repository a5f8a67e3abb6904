"""The Gantt chart: spans in, plotly Figure out. Pure, so that notebooks and pages draw the same.

Every mark is a bar or a marker of a few traces with typed numeric arrays. Never a trace, a shape
or an annotation per span, and no `plotly.express.timeline` (dates on a categorical axis): those
turn slow at a thousand spans, these do not at many thousands.

A row of the Gantt chart, one per rank, rank 0 on top:

    compute  | 0 | 1 |   0   | 2 |   1   |      thick; the microbatch inside; idle shows behind
    send        -   -       -                   thin; forward and backward in their own colours
    recv      -   -     -                       thin; from when both ends were ready
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from engine.plan.action import RECV_OPS, SEND_OPS, Op
from engine.plan.spans import Lane, lane_of
from ppbench.analysis.metrics import compute_spans
from ppbench.analysis.transfers import moving_start_ns
from ppbench.report.palette import (
    IDLE_COLOR,
    LIGHTEST,
    OP_COLORS,
    OP_WORDS,
    TRACK_COLOR,
    ink_on,
    tinted,
)
from ppbench.report.panels import Update, figure_text
from ppbench.report.style import PLAIN, legend
from ppbench.report.units import NS_PER_MS, size_unit

LANE_CENTRES: dict[Lane, float] = {Lane.COMPUTE: -0.14, Lane.SEND: 0.24, Lane.RECV: 0.38}
LANE_HEIGHTS: dict[Lane, float] = {Lane.COMPUTE: 0.56, Lane.SEND: 0.11, Lane.RECV: 0.11}
_RANK_PX, _GANTT_TOP_PX, _GANTT_BOTTOM_PX = 96, 38, 36
_SMALL = '<span style="font-size:9px">{}</span>'
_MAX_OUTLINED = 1500  # with more compute spans than this, outlines would hide the bars
_TRANSFERS = SEND_OPS | RECV_OPS


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
        "template": PLAIN,
        "title": {"text": figure_text(title), "x": 0, "xref": "paper", "font": {"size": 15}},
        "barmode": "overlay",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "height": num_ranks * _RANK_PX + top + _GANTT_BOTTOM_PX,
        "margin": {"l": 54, "r": 12, "t": top, "b": _GANTT_BOTTOM_PX},
        "hovermode": "closest",
        "dragmode": "zoom",
        "legend": legend(),
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
