"""Whether a change may go in: head against base, with a threshold for each case.

    regression   beyond chance worse, by more than the case's threshold, and not accepted
    failed       ran at the base, and fails at the head on the same machine
    too little   a case of which no verdict can be given; with a sweep, any of its cases

A case that fails on both sides is no worse than it was: it passes, with a note.

A case that is `unclear` passes, and is said to be so: a gate that stops what it cannot tell would
stop most changes, and soon be switched off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ppbench.analysis.compare import FLOOR, Metric, Verdict
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.schema import known_keys
from ppbench.config.sweep import Sweep
from ppbench.config.track import Track
from ppbench.report.cases import case_text, varying_axes
from ppbench.tracking.accepted import Accepted
from ppbench.tracking.comparison import Comparison, Line, Series
from ppbench.tracking.outcome import FAILED, FINE, NOT_ENOUGH, REGRESSION
from ppbench.tracking.replicates import keys_of

THRESHOLD = 0.02
GATED = ("tokens_per_s", "peak_memory_bytes")
WORDS = {FINE: "passed", REGRESSION: "regression", NOT_ENOUGH: "not enough data", FAILED: "failed"}
NOTHING = "no case was measured on both sides on the same machine"
NOT_AT_HEAD = "not measured at head"
OTHER_MACHINES = "measured on different machines"
Planned = Mapping[str, tuple[Case, Measure]]


@dataclass(frozen=True)
class Limits:
    """By how much worse each case may get, and what was accepted beforehand."""

    planned: Planned  # by case_id; what the sweep file has
    track: Track
    default: float = THRESHOLD
    accepted: tuple[Accepted, ...] = ()
    has_all: bool = False  # whether each of the planned cases must be judged

    def text_of(self, case_id: str) -> str:
        """What a case of the sweep is called that neither side has."""
        cases = pd.DataFrame([case.settings() for case, _ in self.planned.values()])
        case, _ = self.planned[case_id]
        return case_text(pd.Series(case.settings()), varying_axes(cases))

    def threshold_of(self, one: Series) -> float:
        found = self.planned.get(one.case_id)
        return self.track.threshold_of(*found, self.default) if found else self.default

    def conditions_of(self, one: Series, axes: Sequence[str]) -> dict[str, object]:
        """What an entry of the accept file says of a case; nothing of one that is not known."""
        found = self.planned.get(one.case_id)
        keys = [key for key in known_keys() if key.replace(".", "_") in axes]
        return {key: setting_of(*found, key) for key in keys} if found else {}

    def floor_of(self, one: Series) -> float:
        """A threshold below the floor asks for smaller changes to be found."""
        return min(FLOOR, self.threshold_of(one))


def limits_of(sweep: Sweep | None, threshold: float | None, accepted: Sequence[Accepted]) -> Limits:
    """`threshold`, from the command line, stands in for the file's `default` and for ours.

    What the file sets for some of the cases stays: who wrote it knew more of them.
    """
    if sweep is None:
        return Limits({}, Track(), THRESHOLD if threshold is None else threshold, tuple(accepted))
    planned = {case.case_id: (case, measure) for case, measure in sweep.cases}
    if threshold is None:
        return Limits(planned, sweep.track, THRESHOLD, tuple(accepted))
    special = tuple(one for one in sweep.track.thresholds if one.only.allowed)
    return Limits(planned, replace(sweep.track, thresholds=special), threshold, tuple(accepted))


@dataclass(frozen=True)
class Judged:
    """A line and what the gate makes of it."""

    line: Line
    threshold: float
    worse: float | None  # a fraction, or points as one; negative: better
    is_gated: bool
    conditions: Mapping[str, object]  # by dotted key, what tells its case from the others
    accepted: Accepted | None = None

    @property
    def up_to(self) -> float:
        """What an entry would have to allow for: all that the interval holds, in whole percent."""
        ends = worse_by(self.line, "low"), worse_by(self.line, "high")
        return math.ceil(100 * max(0.0, *(end or 0.0 for end in ends))) / 100

    @property
    def is_beyond(self) -> bool:
        """Worse than is allowed, be it accepted or not."""
        is_worse = self.line.change.verdict is Verdict.slower and self.worse is not None
        return self.is_gated and is_worse and (self.worse or 0.0) > self.threshold

    @property
    def is_regression(self) -> bool:
        return self.is_beyond and self.accepted is None

    @property
    def is_too_little(self) -> bool:
        return self.is_gated and self.line.change.verdict is Verdict.insufficient


@dataclass(frozen=True)
class Ruling:
    """What the gate says of a comparison."""

    comparison: Comparison
    judged: tuple[Judged, ...]
    failed: tuple[str, ...]  # cases that ran at the base, in words
    missing: tuple[str, ...]  # why there is too little to judge

    @property
    def regressions(self) -> list[Judged]:
        return [one for one in self.judged if one.is_regression]

    @property
    def accepted(self) -> list[Judged]:
        return [one for one in self.judged if one.is_beyond and one.accepted is not None]

    @property
    def unclear(self) -> list[Judged]:
        return [o for o in self.judged if o.is_gated and o.line.change.verdict is Verdict.unclear]

    @property
    def exit_code(self) -> int:
        """What is known to be wrong comes before what is not known."""
        if self.regressions:
            return REGRESSION
        if self.failed:
            return FAILED
        return NOT_ENOUGH if self.missing else FINE


def rule(comparison: Comparison, gated: Sequence[Metric], limits: Limits) -> Ruling:
    """Pure: `comparison` was made with the floors of `limits`."""
    judged = tuple(_judged(line, comparison, gated, limits) for line in comparison.lines)
    failed = tuple(_failed(comparison))
    missing = tuple(dict.fromkeys(_missing(comparison, judged, limits)))
    return Ruling(comparison, judged, failed, missing)


def _judged(line: Line, comparison: Comparison, gated: Sequence[Metric], limits: Limits) -> Judged:
    threshold, worse = limits.threshold_of(line.series), worse_by(line)
    conditions = limits.conditions_of(line.series, comparison.axes)
    one = Judged(line, threshold, worse, line.metric in gated, conditions)
    if not one.is_beyond or worse is None:
        return one
    planned = limits.planned.get(line.series.case_id)
    covering = (a for a in limits.accepted if a.covers(line.metric.name, worse, planned))
    return replace(one, accepted=next(covering, None))


def worse_by(line: Line, end: str = "estimate") -> float | None:
    """By which fraction, or points as one, head is worse; None where no estimate was made.

    `end` may also be `low` or `high`: those of the interval.
    """
    change, sign = line.change, -1 if line.metric.higher_is_better else 1
    found = change.difference if line.metric.in_points else change.ratio
    less = 0.0 if line.metric.in_points else 1.0
    return None if found is None else sign * (float(getattr(found, end)) - less)


def _failed(comparison: Comparison) -> Iterable[str]:
    """A launch that fails counts, even if others of the case do not and none did at the base."""
    base, head = comparison.base, comparison.head
    ran, flaky, runs = (set(keys_of(rows)) for rows in (base.runs, base.failed, head.runs))
    for key, status in zip(keys_of(head.failed), head.failed["status"], strict=True):
        if key in ran and (key not in runs or key not in flaky):
            yield f"{comparison.texts[key[0]]}: {status}"


def _missing(comparison: Comparison, judged: Sequence[Judged], limits: Limits) -> Iterable[str]:
    for one in judged:
        if one.is_too_little:
            change = one.line.change
            told = f"{change.num_base} at base, {change.num_head} at head"
            yield f"{one.line.series.text}: too few launches ({told})"
    settled = {line.series.case_id for line in comparison.lines}
    known = dict.fromkeys(comparison.base.runs["case_id"])
    for case_id in known | dict.fromkeys(limits.planned if limits.has_all else ()):
        why = None if case_id in settled else _why_missing(case_id, comparison)
        if why is not None and (case_id in limits.planned or why != NOT_AT_HEAD):
            yield f"{comparison.texts.get(case_id) or limits.text_of(case_id)}: {why}"
    if not comparison.lines:
        yield NOTHING


def _why_missing(case_id: str, comparison: Comparison) -> str | None:
    """Of a case without a line; None if it fails at head, and that is told or was so before."""
    (base, base_failed), (head, head_failed) = (
        tuple({key for key in keys_of(rows) if key[0] == case_id} for rows in (s.runs, s.failed))
        for s in (comparison.base, comparison.head)
    )
    if not head | head_failed:
        return NOT_AT_HEAD if base | base_failed else "not measured"
    if not base | base_failed:
        return "not measured at base"
    if head and not base:
        return "failed at base"
    if base & head_failed or not base:
        return None
    places = [{key[1] for key in keys} for keys in (base, head | head_failed)]
    return "measured with different settings" if places[0] & places[1] else OTHER_MACHINES
