"""A picture of throughput against memory: what was found, the front, and the limit.

    tokens/s │          ●━━━━●        points are configurations; the line goes from each point of
             │     ●━━━━┛    ┊        the front to the next, up where more memory begins to help
             │  ●━━┛         ┊ limit
             └────────────────── memory

The page places the points as parts of HTML, in percent of the picture's width and height, so that
it fits every width, prints, and needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.display.document import Picture, of_page
from ppbench.display.units import size, size_unit
from ppbench.report.charts.forest import Scale
from ppbench.report.charts.pareto import pareto_front

_PADDING = 0.06  # of the range, on each side
_MOST_TICKS = 5
_HTML = """\
<figure class="frontier" role="group" aria-label="Throughput against the memory of the fullest \
rank: {{ spots | length }} configurations">
<div class="plot">
<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">\
<polyline points="{{ line }}"/></svg>
{% if limit is not none %}<i class="limit" style="left: {{ limit }}%">\
<span>{{ limit_text }}</span></i>{% endif %}
{% for spot in spots %}<i class="spot {{ spot.kind }}" style="left: {{ spot.left }}%; \
bottom: {{ spot.bottom }}%" role="img" tabindex="0" aria-label="{{ spot.name }}: {{ spot.text }}">\
<span class="label{{ " leftwards" if spot.left > 60 }}">{{ spot.name }}<br>{{ spot.text }}</span>\
</i>
{% endfor %}
{% for place, text in speed_ticks %}<i class="tick left" style="bottom: {{ place }}%" \
aria-hidden="true">{{ text }}</i>{% endfor %}
{% for place, text in memory_ticks %}<i class="tick below" style="left: {{ place }}%" \
aria-hidden="true">{{ text }}</i>{% endfor %}
</div>
<figcaption class="note"><span>{{ memory_unit }}, fullest rank → tokens/s ↑</span>
{% for kind, words in kinds.items() %}<span class="key"><i class="spot {{ kind }}"></i>{{ words }}\
</span>
{% endfor %}</figcaption>
</figure>"""
_KINDS = {
    "chosen": "first choice",
    "baseline": "1F1B",
    "proposed": "next best",
    "found": "for other memories",
}


@dataclass(frozen=True)
class Point:
    """A configuration: the memory of its fullest rank, its throughput, and its words."""

    memory_bytes: int
    tokens_per_s: float
    name: str
    kind: str  # of `_KINDS`: how the page draws it


def frontier(points: Sequence[Point], limit_bytes: int | None) -> Picture:
    """Draw points; the front goes through those that no other equals with as little memory.

    Places are in percent from the left and from the bottom. The front is an SVG polyline, from the
    top left: a throughput holds from the memory that it needs on.
    """
    sizes, speeds = ([point.memory_bytes for point in points], [p.tokens_per_s for p in points])
    memory, speed = _scale([*sizes, limit_bytes] if limit_bytes else sizes), _scale(speeds)
    unit, unit_bytes = size_unit(max(sizes))
    line: list[tuple[float, float]] = []
    for index in pareto_front(sizes, speeds):
        left, top = memory.share(sizes[index]), round(100 - speed.share(speeds[index]), 2)
        line += [*((left, y) for _, y in line[-1:]), (left, top)]
    line += [(100.0, y) for _, y in line[-1:]]
    spots = [
        {
            "left": memory.share(point.memory_bytes),
            "bottom": speed.share(point.tokens_per_s),
            "name": point.name,
            "text": f"{point.tokens_per_s:,.0f} tokens/s, {size(point.memory_bytes)}",
            "kind": point.kind,
        }
        for point in points
    ]
    return of_page(
        _HTML,
        kinds=_KINDS,
        spots=spots,
        line=" ".join(f"{x:g},{y:g}" for x, y in line),
        memory_ticks=_ticks(memory, unit_bytes),
        speed_ticks=_ticks(speed),
        memory_unit=unit,
        limit=None if limit_bytes is None else memory.share(limit_bytes),
        limit_text=f"limit {size(limit_bytes)}",
    )


def _scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * _PADDING
    return Scale(max(0.0, low - margin), high + margin)


def _ticks(scale: Scale, unit: float = 1.0) -> tuple[tuple[float, str], ...]:
    values = scale.round_values(_MOST_TICKS, unit)
    return tuple((scale.share(value * unit), f"{value:,.10g}") for value in values)
