"""Notes that qualify a comparison: failures, outliers, cautions, too few launches, time between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.lines import Contrast, DiscountedLaunch, Line, listed
from ppbench.display.cases import cautions_of
from ppbench.display.changes import discount_text
from ppbench.display.fields import field_of
from ppbench.errors import first_line
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.estimates import Doubt
from ppbench.judge.evidence import UNKNOWN
from ppbench.judge.verdicts import Verdict

_USUAL_LAUNCHES = 5
_DOUBTS = {
    Doubt.two_levels: "both sides have launches on two levels, which chance may have shared out "
    "in this way",
    Doubt.lopsided: "many more launches lie apart on one side than on the other, and the change "
    "may be what slows them",
}
"""Why launches may differ for another reason than the change; `_cautioned` says cautions."""


def notes_on(
    contrasts: Sequence[Contrast],
    lines: Sequence[Line],
    failed: Mapping[str, pd.DataFrame],
    texts: Mapping[str, str],
    remedy: str,
    again: str,
) -> Iterable[str]:
    """Yield what qualifies the lines of a comparison.

    `failed` are the failed runs of each side, by ` at base` and ` at head`, or of both by an empty
    text; `texts` name their cases, `remedy` makes more launches, `again` measures both sides. An
    empty remedy is said elsewhere.
    """
    also = f"; {remedy}" if remedy else ""
    both = [side for contrast in contrasts for side in (contrast.base, contrast.head)]
    for where, rows in failed.items():
        yield from _failures(rows, texts, where)
    yield from _discounted(lines)
    if both:
        yield from cautions(pd.concat(both).drop_duplicates("run_id"))
    base, head = ("", "") if "" in failed else (" at base", " at head")
    few = dict.fromkeys(
        f"{line.series.text} ({line.change.num_base}{base}, {line.change.num_head}{head})"
        for line in lines
        if min(line.change.num_base, line.change.num_head) < FEWEST_LAUNCHES
    )
    if few:
        yield (
            f"a verdict needs {FEWEST_LAUNCHES} launches a side, better {_USUAL_LAUNCHES}: "
            f"{listed(list(few))}{also}"
        )
    for doubt, reason in _DOUBTS.items():
        names = [
            f"{field_of(line.metric.name).heading} of {line.series.text}"
            for line in lines
            if line.change.verdict is Verdict.open and line.change.doubt is doubt
        ]
        if names:
            yield f"open: {listed(names)}; {reason}{also}"
    yield from (f"{text}{also}" for text in _cautioned(lines))
    unlike = [
        f"{field_of(line.metric.name).heading} of {line.series.text}"
        for line in lines
        if line.evidence.paired and line.change.shown_otherwise
    ]
    if unlike:
        yield (
            f"the change is that of rounds in turns, base and head are medians over launches, "
            f"whose ratio is another: {listed(unlike)}"
        )
    yield from _on_sessions(lines, again)


def _failures(failed: pd.DataFrame, texts: Mapping[str, str], where: str = "") -> Iterable[str]:
    """Name the cases that failed, by their texts; `where` is ` at base`, for example."""
    for case_id, rows in failed.groupby("case_id", sort=False):
        last = rows.iloc[-1]
        at_once = "; sides that take turns are in memory at once" if where else ""
        launches = "launch" if len(rows) == 1 else "launches"
        yield (
            f"{texts[str(case_id)]}: {len(rows)} {launches} failed{where}, {last['status']}: "
            f"{first_line(last['error'] or 'no error was recorded')} (ppbench show "
            f"{last['run_id']}){at_once * (last['status'] == 'oom')}"
        )


def _discounted(lines: Sequence[Line]) -> Iterable[str]:
    """Name the launches that do not count, and why; each once, whatever the number of metrics."""
    num_series = len({line.series for line in lines})
    launches: dict[tuple[Contrast, str, str], list[tuple[DiscountedLaunch, Line]]] = {}
    for line in lines:
        for launch in line.discounted:
            key = (line.series, launch.side, launch.run_id)
            launches.setdefault(key, []).append((launch, line))
    for (series, _, _), parts in launches.items():
        where = f"{series.text}: " if num_series > 1 else ""
        num_metrics = sum(line.series == series for line in lines)
        of = [field_of(line.metric.name).label for _, line in parts]
        metrics = "" if len(parts) == num_metrics else f" in {', '.join(of)}"
        launch, _ = parts[0]
        why = discount_text(launch.reason, launch.slowdown)
        yield (
            f"{where}launch {launch.launch} of {launch.side} counts for nothing{metrics}: {why} "
            f"(run {launch.run_id})"
        )


def cautions(runs: pd.DataFrame) -> Iterable[str]:
    """Count the runs with each caution, and say its remedy."""
    counts = Counter(name for _, row in runs.iterrows() for name in cautions_of(row))
    for name, num in counts.items():
        who = "the only run" if len(runs) == 1 else f"{num} of {len(runs)} runs"
        carry = "carries" if num == 1 else "carry"
        known = Caution.__members__.get(name)  # a later version may have others
        yield f"{who} {carry} the caution {name}{f': {known.remedy}' if known else ''}"


def _cautioned(lines: Sequence[Line]) -> Iterable[str]:
    """Say which cautions forbid verdicts, and what removes them."""
    figures: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.change.doubt is Doubt.cautioned:
            text = f"{field_of(line.metric.name).heading} of {line.series.text}"
            figures.setdefault(line.evidence.cautions, []).append(text)
    for names, texts in figures.items():
        what = "; ".join(f"{name} ({Caution[name].deed})" for name in names)
        yield (
            f"open: {listed(texts)}; at least half of the launches of a side carry a caution that "
            f"forbids a verdict: {what}"
        )


def _on_sessions(lines: Sequence[Line], again: str) -> Iterable[str]:
    """Name the sides that share no session, else say that all verdicts rest on a single one."""
    known, unknown = dict[str, None](), dict[str, None]()
    for line in lines:
        base, head = line.evidence.base.sessions or (), line.evidence.head.sessions or ()
        if line.evidence.sessions_apart and not {*base} & {*head}:
            (known if line.evidence.drift else unknown)[line.series.text] = None
    begin = "base and head were never measured in one session, so the drift between sessions is in "
    if known:
        yield f"{begin}their difference and in its interval: {listed(list(known))}"
    if unknown := {name: None for name in unknown if name not in known}:
        yield (
            f"{begin}their difference, and its size is not known: {listed(list(unknown))}; it "
            f"takes launches of one commit in two sessions, or both sides in turns: {again}"
        )
    sessions = [line.evidence.sessions for line in lines if line.change.is_decided]
    if sessions and all(len(own) == 1 and UNKNOWN not in own for own in sessions):
        yield "rests on one session: what drifts between sessions is not in it"
