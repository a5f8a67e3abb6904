"""Notes that qualify a comparison: failures, outliers, cautions, too few launches, time between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.launches import keys_of
from ppbench.comparison.lines import Contrast, DiscountedLaunch, Line, Pairing, listed
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
    again: str,
) -> Iterable[str]:
    """Yield what qualifies the lines of a comparison.

    `failed` are the failed runs of each side, by ` at base` and ` at head`, or of both by an empty
    text; `texts` name their cases, `remedy` makes more launches, `again` measures both sides.
    """
    known = {launch.run_id for line in lines for launch in line.discounted}
    both = [side for pairing in pairings for side in (pairing.base, pairing.head)]
    for where, rows in failed.items():
        yield from _failures(rows, texts, where)
        side = where.removeprefix(" at ")
        own = [getattr(pairing, side) for pairing in pairings] if side else both
        if own:
            of = f" of {side}" if side else ""
            yield from _outliers(pd.concat(own).drop_duplicates("run_id"), of, known)
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
            f"{listed(list(few))}; {remedy}"
        )
    for begin, is_so, end in _ODDITIES:
        names = [
            f"{field_of(line.metric.name).heading} of {line.series.text}"
            for line in lines
            if is_so(line)
        ]
        if names:
            yield f"{begin}: {listed(names)}; {end}{remedy if end.endswith('; ') else ''}"
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


def _outliers(runs: pd.DataFrame, of: str = "", discounted: Collection[str] = ()) -> Iterable[str]:
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
        yield f"{who} {carry} the caution {name}: {Caution[name].remedy}"


def launches_wanted(lines: Sequence[Line]) -> int:
    """Launches of a side that are worth measuring: the usual number, or twice those there are."""
    nums = [num for line in lines for num in (line.change.num_base, line.change.num_head)]
    fewest = min(nums, default=0)
    return _USUAL_LAUNCHES if fewest < _USUAL_LAUNCHES else 2 * fewest


def _is_opposed(line: Line) -> bool:
    """Whether the change has the other sign than the two figures beside it."""
    change, metric = line.change, line.metric
    estimate = change.difference if metric.in_points else change.ratio
    if estimate is None or change.base is None or change.head is None:
        return False
    if figure_text(metric, change.base) == figure_text(metric, change.head):
        return False
    middle = 0.0 if metric.in_points else 1.0
    return round((estimate.estimate - middle) * 100, 1) * (change.head - change.base) < 0


def _is_held_back(line: Line) -> bool:
    """Whether it is open although its interval leaves no change out, and beyond the resolution."""
    change, interval, middle = line.change, line.change.difference, 0.0
    if change.verdict is not Verdict.open or change.doubt is not None:
        return False
    beyond = 0.0 if interval is None else abs(interval.estimate)
    if interval is None and change.ratio is not None:
        interval, middle, beyond = change.ratio, 1.0, abs(math.log(change.ratio.estimate))
    if interval is None or beyond <= change.resolution:
        return False
    return not interval.low <= middle <= interval.high


def _is_doubted(doubt: Doubt) -> Callable[[Line], bool]:
    return lambda line: line.change.verdict is Verdict.open and line.change.doubt is doubt


_ODDITIES = (
    (
        "the change has another sign than the two figures",
        _is_opposed,
        "it compares means of the launches that count, each figure is the median of all launches",
    ),
    (
        "open although its 95 % interval does not contain 0",
        _is_held_back,
        f"a verdict must be sure to {1 - LEVEL:.2%} for all cases together (Holm's correction); ",
    ),
    *(("open", _is_doubted(doubt), f"{reason}; ") for doubt, reason in _DOUBTS.items()),
)
"""What is odd about a line, the test for it, and why it is so; what ends in `; ` has a remedy."""


def _on_sessions(lines: Sequence[Line], again: str) -> Iterable[str]:
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
                f"takes launches of one commit in two sessions, or both sides in turns: {again}"
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
