"""Notes that qualify a comparison: failures, outliers, cautions, too few launches, time between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.launches import FRESH_S, keys_of
from ppbench.comparison.lines import Contrast, DiscountedLaunch, Line, Pairing, listed
from ppbench.comparison.sessions import moments_of
from ppbench.display.cases import cautions_of
from ppbench.display.changes import discount_text, figure_text
from ppbench.display.fields import field_of
from ppbench.errors import first_line
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.estimates import Doubt
from ppbench.judge.evidence import UNKNOWN
from ppbench.judge.verdicts import LEVEL, SPEED, Verdict
from ppbench.statistics.step_times import is_outlier

_USUAL_LAUNCHES = 5
_DOUBTS = {
    Doubt.cautioned: "at least half of the launches of a side carry a caution that forbids a "
    "verdict",
    Doubt.two_levels: "both sides have launches on two levels, which chance may have shared out "
    "in this way",
    Doubt.lopsided: "many more launches lie apart on one side than on the other, and the change "
    "may be what slows them",
}
"""Why the launches of both sides may differ for another reason than the change."""
OUTLYING = 0.05
"""Relative distance from its side's median beyond which a launch is reported."""


def notes_on(
    pairings: Sequence[Pairing],
    lines: Sequence[Line],
    failed: Mapping[str, pd.DataFrame],
    texts: Mapping[str, str],
    remedy: str,
) -> Iterable[str]:
    """Yield what qualifies the lines of a comparison.

    `failed` are the failed runs of each side, by ` at base` and ` at head`, or of both by an empty
    text; `texts` name their cases, and `remedy` makes more launches.
    """
    known = {launch.run_id for line in lines for launch in line.discounted}
    both = [side for pairing in pairings for side in (pairing.base, pairing.head)]
    for where, rows in failed.items():
        yield from failures(rows, texts, where)
        side = where.removeprefix(" at ")
        own = [getattr(pairing, side) for pairing in pairings] if side else both
        if own:
            of = f" of {side}" if side else ""
            yield from outliers(pd.concat(own).drop_duplicates("run_id"), of, known)
    yield from discounted(lines)
    if both:
        yield from cautions(pd.concat(both).drop_duplicates("run_id"))
    yield from too_few(lines, ("", "") if "" in failed else (" at base", " at head"), remedy)
    yield from opposed(lines)
    yield from undecided(lines, remedy)
    yield from on_sessions(lines)


def failures(failed: pd.DataFrame, texts: Mapping[str, str], where: str = "") -> Iterable[str]:
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


def outliers(runs: pd.DataFrame, of: str = "", discounted: Collection[str] = ()) -> Iterable[str]:
    """Name the launches far from the others of their case: they count, and hide changes.

    `of` is ` of base`, for example; runs that are `discounted` have notes of their own.
    """
    if runs.empty:
        return
    keys = pd.Series(keys_of(runs), runs.index)
    for _, mine in runs.groupby(keys, sort=False):
        speeds = mine[SPEED]
        if len(mine) < FEWEST_LAUNCHES or speeds.isna().any():
            continue
        away = speeds / speeds.median() - 1
        is_far = np.array(is_outlier(speeds.tolist())) & (away.abs() > OUTLYING).to_numpy()
        for place in np.flatnonzero(is_far):
            if (run_id := str(mine["run_id"].iloc[place])) in discounted:
                continue
            yield (
                f"run {run_id}{of} is an outlier, "
                f"{away.iloc[place]:+.0%} from the median of its case: it counts, and may hide a "
                "change; measure more launches"
            )


def discounted(lines: Sequence[Line]) -> Iterable[str]:
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
        yield f"{who} {carry} the caution {name}: {Caution[name].remedy}"


def launches_wanted(lines: Sequence[Line]) -> int:
    """Launches of a side that are worth measuring: the usual number, or twice those there are."""
    nums = [num for line in lines for num in (line.change.num_base, line.change.num_head)]
    fewest = min(nums, default=0)
    return _USUAL_LAUNCHES if fewest < _USUAL_LAUNCHES else 2 * fewest


def too_few(lines: Sequence[Line], sides: tuple[str, str], remedy: str) -> Iterable[str]:
    """Name the series without launches enough; `sides` are ` at base` and ` at head`."""
    few = [
        line for line in lines if min(line.change.num_base, line.change.num_head) < FEWEST_LAUNCHES
    ]
    base, head = sides
    names = dict.fromkeys(
        f"{line.series.text} ({line.change.num_base}{base}, {line.change.num_head}{head})"
        for line in few
    )
    if names:
        yield (
            f"a verdict needs {FEWEST_LAUNCHES} launches a side, better {_USUAL_LAUNCHES}: "
            f"{listed(list(names))}; {remedy}"
        )


def opposed(lines: Sequence[Line]) -> Iterable[str]:
    """Name the figures whose change has the other sign than the two figures beside it."""
    names = []
    for line in lines:
        change, metric = line.change, line.metric
        estimate = change.difference if metric.in_points else change.ratio
        if estimate is None or change.base is None or change.head is None:
            continue
        if figure_text(metric, change.base) == figure_text(metric, change.head):
            continue
        middle = 0.0 if metric.in_points else 1.0
        if round((estimate.estimate - middle) * 100, 1) * (change.head - change.base) < 0:
            names.append(f"{field_of(metric.name).heading} of {line.series.text}")
    if names:
        yield (
            f"the change has another sign than the two figures: {listed(names)}; it compares means "
            "over the launches that count, each figure is the median of all, and they differ much"
        )


def undecided(lines: Sequence[Line], remedy: str) -> Iterable[str]:
    """Say why a change is open although its interval alone would decide."""
    names = []
    for line in lines:
        change, interval, middle = line.change, line.change.difference, 0.0
        if change.verdict is not Verdict.open or change.doubt is not None:
            continue
        beyond = 0.0 if interval is None else abs(interval.estimate)
        if interval is None and change.ratio is not None:
            interval, middle, beyond = change.ratio, 1.0, abs(math.log(change.ratio.estimate))
        # The estimate is beyond the resolution, and the interval leaves no change out.
        if interval and beyond > change.resolution and not interval.low <= middle <= interval.high:
            names.append(f"{field_of(line.metric.name).heading} of {line.series.text}")
    if names:
        yield (
            f"open although its 95 % interval does not contain 0: {listed(names)}; a verdict "
            f"must be sure to {1 - LEVEL:.2%} for all cases together (Holm's correction); {remedy}"
        )

    for doubt, reason in _DOUBTS.items():
        names = [
            f"{field_of(line.metric.name).heading} of {line.series.text}"
            for line in lines
            if line.change.verdict is Verdict.open and line.change.doubt is doubt
        ]
        if names:
            yield f"open: {listed(names)}; {reason}; {remedy}"


def on_sessions(lines: Sequence[Line]) -> Iterable[str]:
    """Name the sides that share no session, else the verdicts that rest on a single one."""
    if apart := [line for line in lines if line.evidence.sessions_apart]:
        alone = [
            line
            for line in apart
            if not {*(line.evidence.base.sessions or ())} & {*(line.evidence.head.sessions or ())}
        ]
        begin = "base and head were never measured in one session, so the drift between sessions "
        if known := [line for line in alone if line.evidence.drift]:
            sizes = dict.fromkeys(
                f"{line.metric.name} {drift.deviation * 100:.2g} "
                f"{'points' if line.metric.in_points else '%'} in {drift.freedom + 1:g} sessions"
                for line in known
                if (drift := line.evidence.drift)
            )
            names_known = listed(list(dict.fromkeys(line.series.text for line in known)))
            where = f"is in their difference and in its interval ({'; '.join(sizes)})"
            yield f"{begin}{where}: {names_known}"
        drifting = {line.series for line in known}
        unknown = [line.series.text for line in alone if line.series not in drifting]
        if unknown := list(dict.fromkeys(unknown)):
            yield (
                f"{begin}is in their difference, and its size is not known: {listed(unknown)}; it "
                "takes launches of one commit in two sessions, or measure both sides in turn: "
                "ppbench compare --run"
            )
        return
    decided = [line for line in lines if line.change.is_decided]
    single = {
        line.series.text
        for line in decided
        if len(line.evidence.sessions) == 1 and UNKNOWN not in line.evidence.sessions
    }
    if single:
        every = list(dict.fromkeys(line.series.text for line in decided))
        names = [name for name in every if name in single]
        which = "" if len(names) == len(every) else f" ({listed(names)})"
        yield f"rests on one session{which}: what drifts between sessions is not in it"


def gap_between(base: pd.DataFrame, head: pd.DataFrame) -> str:
    """`3 days`, if the runs of both sides were made over an hour apart; else empty."""
    times = [[moment for moment in moments_of(runs) if moment] for runs in (base, head)]
    if not all(times):
        return ""
    (first, last), (other_first, other_last) = ((min(own), max(own)) for own in times)
    between_s = max(other_first - last, first - other_last).total_seconds()
    if between_s <= FRESH_S:
        return ""
    days, hours = between_s / 86400, between_s / 3600
    return f"{days:.0f} days" if days >= 2 else f"{hours:.1f} hours"
