"""Intervals of changes on one scale per metric: a forest plot, as shares of a strip's width.

    low ├───────●───────┤ high        0 and the resolution's band are on every strip

The page places the marks as parts of HTML rather than by plotly: each strip is a cell of a table,
so that it fits every width, prints, and is read aloud with the texts beside it. A terminal has the
table of the same changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppbench.display.changes import change_text, verdict_text
from ppbench.display.document import Picture, of_page
from ppbench.display.fields import field_of
from ppbench.display.units import round_step
from ppbench.judge.evidence import Metric
from ppbench.judge.verdicts import Change, Verdict

_MOST_TICKS = 4
_WIDEST = 2.5
"""Estimates that fit between zero and the end of a strip; wider intervals are cut, and say so."""
_LEAST = 2.0  # of the band's width
_PADDING = 1.08
_HEADINGS = {"peak_memory_bytes": "peak memory"}
"""Metrics whose label says too little where no figure is beside it."""
_COLORS = {Verdict.faster: "better", Verdict.slower: "worse"}
_HTML = """\
<table class="forest">
<caption class="note">{{ caption }} Shaded: the same within the resolution. \
A full mark is decided, a ring is not; all are tested together, so that an interval may leave \
zero out and still be open.\
</caption>
<thead>
<tr><th scope="col">case</th>{% for panel in panels %}<th scope="col">{{ panel.heading }} \
<span class="note">{{ panel.unit }}</span></th>{% endfor %}</tr>
<tr class="axis" aria-hidden="true"><td></td>
{% for panel in panels %}<td><span class="ticks">{% for place, text in panel.scale.ticks %}\
<i style="left: {{ place }}%">{{ text }}</i>{% endfor %}</span>\
<span class="ends"><span>← {{ panel.ends[0] }}</span><span>{{ panel.ends[1] }} →</span></span></td>
{% endfor %}</tr>
</thead>
<tbody>
{% for name, cells in rows %}<tr><th scope="row">{{ name }}</th>
{% for cell in cells %}{% set panel = panels[loop.index0] %}\
<td data-heading="{{ panel.heading }}"><span class="interval" aria-hidden="true">
<i class="band" style="left: {{ panel.band[0] }}%; right: {{ panel.band[1] }}%"></i>
<i class="zero" style="left: {{ panel.zero }}%"></i>
{% if cell and cell.mark %}<i class="range{{ " cut-low" if cell.mark.is_cut_low }}\
{{ " cut-high" if cell.mark.is_cut_high }} {{ cell.color }}" \
style="left: {{ cell.mark.low }}%; width: {{ cell.mark.width }}%"></i>
<i class="dot {{ cell.color }}" style="left: {{ cell.mark.estimate }}%"></i>{% endif %}
</span><span class="words-of">{% if cell %}<span class="change">{{ cell.change }}</span> \
<strong class="{{ cell.color }}">{{ cell.verdict }}</strong>{% else %}not measured{% endif %}\
</span></td>
{% endfor %}</tr>
{% endfor %}</tbody>
</table>"""


@dataclass(frozen=True)
class Scale:
    """The values from end to end of a picture; for a metric's strips in percent or points."""

    low: float
    high: float
    band: float = 0.0

    def share(self, value: float) -> float:
        """The place of a value in percent of the width, from 0 to 100."""
        place = 100 * (value - self.low) / (self.high - self.low)
        return round(min(max(place, 0.0), 100.0), 2)

    def round_values(self, most: int, unit: float = 1.0) -> list[float]:
        """Round values of a unit, about as many as `most`."""
        low, high = self.low / unit, self.high / unit
        step = float(round_step((high - low) / most))
        return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of round values."""
        values = self.round_values(_MOST_TICKS)
        return [(self.share(value), f"{value:+.6g}" if value else "0") for value in values]


def intervals(
    metrics: Sequence[Metric], rows: Mapping[str, Sequence[Change | None]], caption: str
) -> Picture:
    """Changes with their intervals on a page: a row for each name, a column for each metric."""
    panels, scales = [], []
    for place, metric in enumerate(metrics):
        scale = scale_of(metric, [one for changes in rows.values() if (one := changes[place])])
        low, high = (verdict_text(metric, end) for end in (Verdict.slower, Verdict.faster))
        scales.append(scale)
        panels.append(
            {
                "heading": _HEADINGS.get(metric.name, field_of(metric.name).label),
                "unit": "points" if metric.in_points else "%",
                "scale": scale,
                "band": (scale.share(-scale.band), round(100 - scale.share(scale.band), 2)),
                "zero": scale.share(0),
                "ends": (high, low) if metric.higher_is_better is False else (low, high),
            }
        )
    shown = []
    for name, changes in rows.items():
        cells = [
            change
            and {
                "change": change_text(metric, change),
                "verdict": verdict_text(metric, change.verdict),
                "color": _COLORS.get(change.verdict, str(change.verdict)),
                "mark": _mark(metric, change, scale),
            }
            for metric, change, scale in zip(metrics, changes, scales, strict=True)
        ]
        shown.append((name, cells))
    return of_page(_HTML, caption=caption, panels=panels, rows=shown)


def scale_of(metric: Metric, changes: Sequence[Change]) -> Scale:
    """Return the scale that fits the changes of a metric; zero is on it."""
    intervals = [found for change in changes if (found := interval_of(metric, change))]
    band = 100 * max((change.resolution for change in changes), default=0.0)
    far = max([abs(estimate) for estimate, _, _ in intervals] or [0.0])
    most = max(_WIDEST * far, _LEAST * band)
    lows = [max(low, -most) for _, low, _ in intervals]
    highs = [min(high, most) for _, _, high in intervals]
    low, high = min([*lows, -_LEAST * band]), max([*highs, _LEAST * band])
    if low == high:  # nothing differs, and no band is asked for
        low, high = -1.0, 1.0
    return Scale(low * _PADDING, high * _PADDING, band)


def _mark(metric: Metric, change: Change, scale: Scale) -> dict[str, object] | None:
    """Return where a change lies on its strip, in percent of the width; None if not tested."""
    found = interval_of(metric, change)
    if found is None:
        return None
    estimate, first, last = map(scale.share, found)
    ends = {"is_cut_low": found[1] < scale.low, "is_cut_high": found[2] > scale.high}
    return {"estimate": estimate, "low": first, "width": round(last - first, 2), **ends}


def interval_of(metric: Metric, change: Change) -> tuple[float, float, float] | None:
    """Estimate, low and high in percent, or in points; None where the change was not tested."""
    ratio, same = (change.difference, 0.0) if metric.in_points else (change.ratio, 1.0)
    if ratio is None:
        return None
    return tuple(100 * (end - same) for end in (ratio.estimate, ratio.low, ratio.high))  # type: ignore[return-value]  # of three
