"""The chart of a figure over commits: launches, medians, levels with their bands, and changes.

y   figures, not from zero: changes of a few percent are what is looked for
x   commits in equal steps, since time between commits means nothing
y2  a strip below: what did not run, and how many commits were not measured in between
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from ppbench.analysis.compare import METRICS, Metric
from ppbench.analysis.history import Point, Series, Step, Told
from ppbench.report.palette import GREEN, MEDIUM_BLUE, PURPLE, VERMILLION, translucent
from ppbench.report.panels import figure_text
from ppbench.report.style import NEUTRAL, PLAIN
from ppbench.report.units import NS_PER_MS, counted, figure, size_unit

HEIGHT_PX = 330
SHORT = 9
_STRIP, _PLOT = [0.0, 0.07], [0.1, 1.0]
_MOST_COUNTS = 20  # gaps whose number of commits is written; more would overlap
_ABOVE, _BELOW = 0.2, 0.08  # of the range of figures, left free for changes and for looks
_LEAST_SPAN = 0.02  # of the figures, or two points: what is steady shall look it
_LONGEST_SUBJECT = 60


@dataclass(frozen=True)
class _Scale:
    """In which unit figures are drawn."""

    factor: float
    title: str
    tickformat: str


def history_chart(told: Told, metric: Metric) -> go.Figure:
    """The chart of one series.

    `customdata` of what can be clicked is the place of a commit, those with uncommitted changes
    last; of a change it is `change N`.
    """
    series = told.series
    scale = _scale_of(metric, [value for one in series.points for value in one.figures])
    low, high = _range_of(series, metric, scale)
    drawn = go.Figure(layout=_layout(told, metric, scale, (low, high)))
    drawn.add_traces(
        [
            _band(told, scale),
            _levels(told, scale),
            _launches(series, scale),
            _medians(series, metric, scale),
            _dirty(series, metric, scale),
            _failures(series),
            _gaps(series),
            _changes(told, metric, high + (high - low) * _ABOVE / 2),
        ]
    )
    return drawn


def _layout(
    told: Told, metric: Metric, scale: _Scale, ends: tuple[float, float]
) -> dict[str, object]:
    low, high = ends
    span = high - low
    return {
        "template": PLAIN,
        "height": HEIGHT_PX,
        "margin": {"l": 64, "r": 14, "t": 12, "b": 34},
        "hovermode": "closest",
        "hoverdistance": 30,
        "showlegend": False,
        "shapes": [_shade(step, metric) for step in told.steps],
        "xaxis": _commit_axis(told.series),
        "yaxis": {
            "domain": _PLOT,
            "range": [low - span * _BELOW, high + span * _ABOVE],
            "title": {"text": scale.title, "standoff": 6},
            "tickformat": scale.tickformat,
            "zeroline": False,
        },
        "yaxis2": {
            "domain": _STRIP,
            "range": [0, 1],
            "fixedrange": True,
            "showticklabels": False,
            "showgrid": False,
            "zeroline": False,
        },
    }


def _scale_of(metric: Metric, values: Sequence[float]) -> _Scale:
    name = metric.name
    if name == "tokens_per_s":
        return _Scale(1.0, "tokens/s", ",~s")
    if name.endswith("_ns"):
        return _Scale(1 / NS_PER_MS, f"{_words(name.removesuffix('_ns'))}, ms", ",~r")
    if name.endswith("_bytes"):
        unit, num_bytes = size_unit(max(values, default=0.0))
        return _Scale(1 / num_bytes, f"{_words(name.removesuffix('_bytes'))}, {unit}", ",~r")
    if name.endswith("_fraction") or name.startswith("bubble_"):
        return _Scale(1.0, _words(name.removesuffix("_fraction")), ",~%")
    return _Scale(1.0, _words(name), ",~r")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _range_of(series: Series, metric: Metric, scale: _Scale) -> tuple[float, float]:
    """Of the figures drawn; wide enough that noise does not fill the chart."""
    every = (*series.points, *series.dirty)
    values = [value * scale.factor for point in every for value in point.figures] or [0.0, 1.0]
    low, high = min(values), max(values)
    least = _LEAST_SPAN * (1.0 if metric.in_points else abs(high) or 1.0)
    missing = max(0.0, least - (high - low))
    return low - missing / 2, high + missing / 2


def _commit_axis(series: Series) -> dict[str, object]:
    """Plotly chooses how many whole numbers fit; each is shown as its commit."""
    every = [*(point.commit[:7] for point in series.points), *["+"] * len(series.dirty)]
    between = {f"{place + 0.5:g}": " " for place in range(-1, len(every) + 1)}
    return {
        "range": [-0.8, max(len(every), 6) - 0.2],
        "anchor": "y2",
        "labelalias": {
            **between,
            **{str(place): name for place, name in enumerate(every)},
            **{str(place): " " for place in range(len(every), len(every) + 12)},
        },
        "tickformat": "~r",
        "showgrid": False,
        "zeroline": False,
    }


def color_of(step: Step, metric: Metric) -> str:
    """By whether it is better; where nobody knows, by itself."""
    if metric.name not in METRICS:
        return PURPLE
    return GREEN if step.is_better else VERMILLION


def size_text(step: Step, metric: Metric) -> str:
    """`-7.6 %`, or of a metric in points `+1.2 points`."""
    return f"{100 * step.size.estimate:+.1f} {'points' if metric.in_points else '%'}"


def interval_text(step: Step, metric: Metric) -> str:
    unit = "points" if metric.in_points else "%"
    return f"{100 * step.size.low:+.1f} to {100 * step.size.high:+.1f} {unit}"


def _shade(step: Step, metric: Metric) -> dict[str, object]:
    """The commits that may have made a change."""
    return {
        "type": "rect",
        "layer": "below",
        "yref": "y domain",
        "x0": step.good + 0.5,
        "x1": step.last + 0.5,
        "y0": 0,
        "y1": 1,
        "fillcolor": translucent(color_of(step, metric), 0.16),
        "line": {"width": 0},
    }


def _band(told: Told, scale: _Scale) -> go.Scatter:
    """Where each level lies with 95 %."""
    x: list[float | None] = []
    y: list[float | None] = []
    for level in told.levels:
        if level.interval is not None:
            left, right = level.first - 0.4, level.last + 0.4
            low, high = (end * scale.factor for end in level.interval)
            x += [left, right, right, left, None]
            y += [low, low, high, high, None]
    color = translucent(MEDIUM_BLUE, 0.2)
    return go.Scatter(
        name="interval",
        x=x,
        y=y,
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=color,
        hoverinfo="skip",
    )


def _levels(told: Told, scale: _Scale) -> go.Scatter:
    x: list[float | None] = []
    y: list[float | None] = []
    for level in told.levels:
        if level.estimate is not None:
            x += [level.first - 0.4, level.last + 0.4, None]
            y += [level.estimate * scale.factor] * 2 + [None]
    return go.Scatter(
        name="level",
        x=x,
        y=y,
        mode="lines",
        line={"color": MEDIUM_BLUE, "width": 2},
        hoverinfo="skip",
    )


def _launches(series: Series, scale: _Scale) -> go.Scatter:
    """Single ones, of commits that have several."""
    every = enumerate((*series.points, *series.dirty))
    drawn = [
        (place, value * scale.factor)
        for place, point in every
        if len(point.figures) > 1
        for value in point.figures
    ]
    return go.Scatter(
        name="launch",
        x=[place for place, _ in drawn],
        y=[value for _, value in drawn],
        mode="markers",
        marker={"size": 4, "color": translucent(MEDIUM_BLUE, 0.5), "line": {"width": 0}},
        hoverinfo="skip",
    )


def _medians(series: Series, metric: Metric, scale: _Scale) -> go.Scatter:
    drawn = [(n, point) for n, point in enumerate(series.points) if point.value is not None]
    symbols = ["circle" if point.is_known else "circle-open" for _, point in drawn]
    return _clickable(
        drawn,
        [(point.value or 0.0) * scale.factor for _, point in drawn],
        [_median_text(series, place, metric) for place, _ in drawn],
        name="median",
        marker={"size": 8, "color": MEDIUM_BLUE, "symbol": symbols, "line": {"width": 1}},
    )


def _dirty(series: Series, metric: Metric, scale: _Scale) -> go.Scatter:
    """Work trees with uncommitted changes, behind everything."""
    behind = enumerate(series.dirty, len(series.points))
    drawn = [(place, point) for place, point in behind if point.value is not None]
    return _clickable(
        drawn,
        [(point.value or 0.0) * scale.factor for _, point in drawn],
        [
            f"{heading(point)}<br>uncommitted changes {figure_text(point.changes)}"
            f"<br>{_figure_text(point, metric)}"
            for _, point in drawn
        ],
        name="uncommitted changes",
        marker={"size": 9, "color": PURPLE, "symbol": "diamond-open"},
    )


def _failures(series: Series) -> go.Scatter:
    drawn = [(n, point) for n, point in enumerate(series.points) if point.failures]
    return _clickable(
        drawn,
        [0.5] * len(drawn),
        [f"{heading(point)}<br>{failure_text(point)}" for _, point in drawn],
        name="did not run",
        marker={"size": 8, "color": VERMILLION, "symbol": "x", "line": {"width": 0}},
        yaxis="y2",
    )


def _gaps(series: Series) -> go.Scatter:
    """How many commits stand unseen between two points."""
    drawn = [(n, point) for n, point in enumerate(series.points) if n and point.num_before]
    is_written = len(drawn) <= _MOST_COUNTS
    return go.Scatter(
        name="not measured",
        x=[place - 0.5 for place, _ in drawn],
        y=[0.5] * len(drawn),
        yaxis="y2",
        mode="text" if is_written else "markers",
        text=[f"{point.num_before:,}" if is_written else "" for _, point in drawn],
        textfont={"size": 10, "color": NEUTRAL},
        marker={"symbol": "line-ew", "size": 5, "line": {"width": 1, "color": NEUTRAL}},
        hovertext=[f"{counted(point.num_before, 'commit')} not measured" for _, point in drawn],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _changes(told: Told, metric: Metric, height: float) -> go.Scatter:
    return go.Scatter(
        name="change",
        x=[step.first for step in told.steps],
        y=[height] * len(told.steps),
        mode="markers+text",
        marker={
            "size": 11,
            "color": [color_of(step, metric) for step in told.steps],
            "symbol": [
                "triangle-up" if step.size.estimate > 0 else "triangle-down" for step in told.steps
            ],
            "line": {"width": 0},
        },
        text=[f"<b>{size_text(step, metric)}</b>" for step in told.steps],
        textposition=[
            "middle left" if step.first > len(told.series.points) / 2 else "middle right"
            for step in told.steps
        ],
        cliponaxis=False,
        customdata=[f"change {number}" for number in range(len(told.steps))],
        hovertext=[
            f"<b>{size_text(step, metric)}</b>, {interval_text(step, metric)}"
            f"<br>most likely with {heading(told.series.points[step.first])}"
            f"<br>{_range_text(step)}"
            for step in told.steps
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _range_text(step: Step) -> str:
    if step.num_commits == 1:
        return "and no other commit"
    return f"{counted(step.num_commits, 'commit')} may have made it"


def _clickable(
    drawn: Sequence[tuple[int, Point]],
    y: Sequence[float],
    hover: Sequence[str],
    *,
    name: str,
    marker: dict[str, object],
    yaxis: str = "y",
) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=[place for place, _ in drawn],
        y=list(y),
        yaxis=yaxis,
        mode="markers",
        marker=marker,
        cliponaxis=False,
        customdata=[place for place, _ in drawn],
        hovertext=list(hover),
        hovertemplate="%{hovertext}<extra></extra>",
    )


def heading(point: Point) -> str:
    """For hovering: the commit, its day and what it says."""
    subject = point.subject or ""
    if len(subject) > _LONGEST_SUBJECT:
        subject = f"{subject[: _LONGEST_SUBJECT - 1]}…"
    parts = [f"<b>{figure_text(point.commit[:SHORT])}</b>", (point.author_date or "")[:10]]
    first = " ".join(part for part in parts if part)
    return f"{first}<br>{figure_text(subject)}" if subject else first


def _median_text(series: Series, place: int, metric: Metric) -> str:
    point = series.points[place]
    change = difference_text(series, place, metric)
    lines = [heading(point), _figure_text(point, metric), change]
    if not point.is_known:
        lines.append("not in the repository: placed by its date")
    return "<br>".join(line for line in lines if line)


def _figure_text(point: Point, metric: Metric) -> str:
    many = f", median of {len(point.figures)} launches" if len(point.figures) > 1 else ", 1 launch"
    return figure_text(figure(metric.name, point.value)) + many


def difference_text(series: Series, place: int, metric: Metric) -> str:
    """`+0.3 % on abc123456`, the one measured before; nothing where there is none."""
    before = series.before(place)
    value, other = series.points[place].value, None if before is None else series.points[before]
    if value is None or other is None or other.value is None:
        return ""
    if metric.in_points:
        return f"{100 * (value - other.value):+.2f} points on {other.commit[:SHORT]}"
    if not other.value:
        return ""
    return f"{100 * (value / other.value - 1):+.2f} % on {other.commit[:SHORT]}"


def failure_text(point: Point) -> str:
    """`3 launches did not run: error`."""
    statuses = ", ".join(dict.fromkeys(one.status for one in point.failures))
    number = len(point.failures)
    return f"{number} {'launch' if number == 1 else 'launches'} did not run: {statuses}"
