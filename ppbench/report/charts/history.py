"""The chart of a metric over commits: launches, medians, levels with their bands, and changes.

y   values, not from zero: changes of a few percent matter
x   commits in equal steps, since the time between commits is irrelevant
y2  a strip below: failed launches, and the number of unmeasured commits in between
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.display.changes import discount_text
from ppbench.display.colors import GREEN, MEDIUM_BLUE, PURPLE, VERMILLION, translucent
from ppbench.display.fields import field_of, figure
from ppbench.display.units import MEBIBYTES, PERCENT, TOKENS_PER_S, counted, size_unit
from ppbench.errors import shortened
from ppbench.judge.evidence import Metric
from ppbench.report.charts.canvas import NEUTRAL, Drawing, figure_text
from ppbench.report.scripts import Figure
from ppbench.statistics.change_points import Step
from ppbench.statistics.series import Launch, Point, Series

HEIGHT_PX = 330
Place = tuple[float | None, float | None]
SHORT = 9
_STRIP, _PLOT = [0.0, 0.07], [0.1, 1.0]
_MOST_COUNTS = 20  # gaps that are labelled with their number of commits; more would overlap
_ABOVE, _BELOW = 0.2, 0.08  # margins, as shares of the range of values; changes are drawn above
_LEAST_SPAN = 0.02  # of the values, or two points, so that a steady series looks steady
_LONGEST_SUBJECT = 60


def history_chart(series: Series) -> Drawing:
    """Return the chart of one series.

    The `customdata` of a clickable mark is the index of its commit, or `change N`.
    """
    metric, steps = series.metric, (*series.changes.steps, *series.changes.spikes)
    # Values are drawn in the column's own unit, sizes in one that fits the largest.
    field = field_of(metric.name)
    factor, title, ticks = field.unit.factor, field.heading, ",~r"
    if field.unit == PERCENT:
        factor, ticks = 1.0, ",~%"  # d3 multiplies by 100
    elif field.unit == TOKENS_PER_S:
        ticks = ",~s"
    elif field.unit == MEBIBYTES:
        sizes = [value for point in series.points for value in point.figures]
        unit, num_bytes = size_unit(max(sizes, default=0.0))
        factor, title = 1 / num_bytes, f"{field.label} ({unit})"
    discounts, every = series.discounts, list(enumerate(series.points))
    # The range of the values is widened so that noise does not fill the chart.
    values = [value * factor for _, point in every for value in point.figures] or [0.0, 1.0]
    low, high = min(values), max(values)
    least = _LEAST_SPAN * (1.0 if metric.in_points else abs(high) or 1.0)
    missing = max(0.0, least - (high - low))
    low, high = low - missing / 2, high + missing / 2
    span = high - low
    # Plotly chooses how many ticks of the x axis fit, each is labelled with its commit.
    names = [point.commit[:7] for point in series.points]
    layout = {
        "height": HEIGHT_PX,
        "margin": {"l": 64, "r": 14, "t": 12, "b": 34},
        "hovermode": "closest",
        "hoverdistance": 30,
        "showlegend": False,
        "shapes": [  # over the commits that may have caused a change
            {
                "type": "rect",
                "layer": "below",
                "yref": "y domain",
                "x0": step.good + 0.5,
                "x1": step.last + 0.5,
                "y0": 0,
                "y1": 1,
                "fillcolor": translucent(color_of(series, step), 0.16),
                "line": {"width": 0},
            }
            for step in steps
        ],
        "xaxis": {
            "range": [-0.8, max(len(names), 6) - 0.2],
            "anchor": "y2",
            "labelalias": {
                **{f"{place + 0.5:g}": " " for place in range(-1, len(names) + 1)},
                **{str(place): name for place, name in enumerate(names)},
                **{str(place): " " for place in range(len(names), len(names) + 12)},
            },
            "tickformat": "~r",
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {
            "domain": _PLOT,
            "range": [low - span * _BELOW, high + span * _ABOVE],
            "title": {"text": title, "standoff": 6},
            "tickformat": ticks,
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
    # A line has gaps at None. Each level has its 95 % interval as a band.
    band: list[Place] = []
    lines: list[Place] = []
    for level in series.changes.levels:
        left, right = level.first - 0.4, level.last + 0.4
        if level.interval is not None:
            bottom, top = (end * factor for end in level.interval)
            band += [(left, bottom), (right, bottom), (right, top), (left, top), (None, None)]
        height = level.estimate * factor
        lines += [(left, height), (right, height), (None, None)]
    launches: list[Place] = [  # of commits that have several
        (place, value * factor)
        for place, point in every
        if len(point.figures) > 1
        for value in point.figures
    ]
    medians = [(n, point.value * factor) for n, point in every if point.value is not None]
    discounted = [
        (place, point, launch)
        for place, point in every
        for launch in point.launches
        if launch.run_id in discounts and launch.value is not None
    ]
    failed = [(place, point) for place, point in every if point.failures]
    gaps = [(place, point) for place, point in every if place and point.num_before]
    has_counts = len(gaps) <= _MOST_COUNTS

    def discount(point: Point, launch: Launch) -> str:
        why = discount_text(discounts[launch.run_id], launch.slowdown)
        text = f"run {launch.run_id} counts for no level and no change: {why}"
        return f"{heading(point)}<br>{text}"

    def cause(step: Step) -> str:
        num = step.num_commits
        last = "no other commit" if num == 1 else f"{counted(num, 'commit')} caused it"
        return (
            f"<b>{size_text(step, metric)}</b>, {interval_text(step, metric)}"
            f"<br>most likely with {heading(series.points[step.first])}"
            f"<br>{'and' if num == 1 else 'one of'} {last}"
        )

    no_line, ring = {"width": 0}, {"width": 1.5, "color": NEUTRAL}
    faint, dash = translucent(MEDIUM_BLUE, 0.5), {"width": 1, "color": NEUTRAL}
    blue = {"color": MEDIUM_BLUE, "width": 2}
    filled = {"fill": "toself", "fillcolor": translucent(MEDIUM_BLUE, 0.2)}
    is_late = [step.first > len(series.points) / 2 for step in steps]
    traces = [
        _trace("interval", band, mode="lines", line=no_line, **filled),
        _trace("level", lines, mode="lines", line=blue),
        _trace("launch", launches, marker={"size": 4, "color": faint, "line": no_line}),
        _trace(
            "median",
            medians,
            [_median_text(series, place) for place, _ in medians],
            opens=[place for place, _ in medians],
            marker={"size": 8, "color": MEDIUM_BLUE, "line": {"width": 1}},
        ),
        _trace(  # a ring around each launch that counts for no level and no change
            "discounted",
            [(place, (launch.value or 0.0) * factor) for place, _, launch in discounted],
            [discount(point, launch) for _, point, launch in discounted],
            opens=[place for place, *_ in discounted],
            marker={"size": 14, "symbol": "circle-open", "color": NEUTRAL, "line": ring},
        ),
        _trace(
            "did not run",
            [(place, 0.5) for place, _ in failed],
            [f"{heading(point)}<br>{failure_text(point)}" for _, point in failed],
            opens=[place for place, _ in failed],
            marker={"size": 8, "color": VERMILLION, "symbol": "x", "line": no_line},
            yaxis="y2",
        ),
        _trace(  # the numbers of unmeasured commits between two points
            "not measured",
            [(place - 0.5, 0.5) for place, _ in gaps],
            [f"{counted(point.num_before, 'commit')} not measured" for _, point in gaps],
            mode="text" if has_counts else "markers",
            text=[f"{point.num_before:,}" if has_counts else "" for _, point in gaps],
            textfont={"size": 10, "color": NEUTRAL},
            marker={"symbol": "line-ew", "size": 5, "line": dash},
            yaxis="y2",
        ),
        _trace(
            "change",
            [(step.first, high + span * _ABOVE / 2) for step in steps],
            [cause(step) for step in steps],
            opens=[f"change {number}" for number in range(len(steps))],
            mode="markers+text",
            marker={
                "size": 11,
                "color": [color_of(series, step) for step in steps],
                "symbol": [f"triangle-{'up' if s.size.estimate > 0 else 'down'}" for s in steps],
                "line": no_line,
            },
            text=[f"<b>{'spike ' * step.is_spike}{size_text(step, metric)}</b>" for step in steps],
            textposition=[f"middle {'left' if late else 'right'}" for late in is_late],
        ),
    ]
    return Drawing([{"title": "", "data": traces, "layout": layout}])


def _trace(
    name: str,
    places: Sequence[Place],
    hover: Sequence[str] | None = None,
    *,
    opens: Sequence[int | str] | None = None,
    **settings: object,
) -> Figure:
    """Return a trace; a click on a mark opens what `opens` names."""
    x, y = ([place[axis] for place in places] for axis in (0, 1))
    trace = {"type": "scatter", "name": name, "x": x, "y": y, "mode": "markers", **settings}
    if hover is None:
        return {**trace, "hoverinfo": "skip"}
    trace |= {"hovertext": list(hover), "hovertemplate": "%{hovertext}<extra></extra>"}
    return trace if opens is None else {**trace, "customdata": list(opens), "cliponaxis": False}


def color_of(series: Series, step: Step) -> str:
    """Return green for better, red for worse, purple for a metric without a direction."""
    return {True: GREEN, False: VERMILLION, None: PURPLE}[series.is_better(step)]


def size_text(step: Step, metric: Metric) -> str:
    """Format a change: `-7.6 %`, or `+1.2 points` for a metric in points."""
    return f"{100 * step.size.estimate:+.1f} {'points' if metric.in_points else '%'}"


def interval_text(step: Step, metric: Metric) -> str:
    unit = "points" if metric.in_points else "%"
    return f"{100 * step.size.low:+.1f} to {100 * step.size.high:+.1f} {unit}"


def heading(point: Point) -> str:
    """Return the commit, its day and its subject, as a hover text."""
    subject = shortened(point.subject or "", _LONGEST_SUBJECT)
    parts = [f"<b>{figure_text(point.commit[:SHORT])}</b>", (point.author_date or "")[:10]]
    first = " ".join(part for part in parts if part)
    return f"{first}<br>{figure_text(subject)}" if subject else first


def _median_text(series: Series, place: int) -> str:
    point = series.points[place]
    num = len(point.figures)
    many = f", median of {num} launches" if num > 1 else ", 1 launch"
    value = figure_text(figure(series.metric.name, point.value)) + many
    lines = [heading(point), value, difference_text(series, place)]
    if num := sum(launch.run_id in series.discounts for launch in point.launches):
        lines.append(f"{counted(num, 'launch')} discounted")
    return "<br>".join(line for line in lines if line)


def difference_text(series: Series, place: int) -> str:
    """Format the change since the commit measured before: `+0.3 % on abc123456`, or nothing."""
    value, other = series.points[place].value, series.before(place)
    if value is None or other is None or other.value is None:
        return ""
    if series.metric.in_points:
        return f"{100 * (value - other.value):+.2f} points on {other.commit[:SHORT]}"
    if not other.value:
        return ""
    return f"{100 * (value / other.value - 1):+.2f} % on {other.commit[:SHORT]}"


def failure_text(point: Point) -> str:
    """Format the failures: `3 launches did not run: error`."""
    statuses = ", ".join(dict.fromkeys(failure.status for failure in point.failures))
    number = len(point.failures)
    return f"{number} {'launch' if number == 1 else 'launches'} did not run: {statuses}"
