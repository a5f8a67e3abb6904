"""Judges whether a change may go in: head against base, with a threshold for each case.

    regression   significantly worse, by more than the case's threshold, and not accepted
    failed       ran at base, and fails at head on the same machine
    too little   no verdict can be given for a case; with a sweep file, for any of its cases

A case that fails on both sides is no worse than it was: it passes, with a note.

A case that is `open` passes too, and is reported as such: a gate that failed whatever is
uncertain would stop most changes, and soon be switched off.

`[[track.accept]]` of the sweep file lists changes for the worse that are intended, which then pass.
An entry is in force only while its commit lies between base and head. After that the base has the
change too, so the entry need not be deleted, and the next regression is not covered by it. If its
commit was squashed or rebased away it is never in force, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd

from ppbench.comparison.launches import keys_of
from ppbench.comparison.lines import Comparison, Contrast, Line
from ppbench.config.case import Planned
from ppbench.config.conditions import conditions_of
from ppbench.config.sweep import Accepted, Sweep
from ppbench.config.toml import quoted
from ppbench.errors import ExitCode, RepositoryError
from ppbench.git import Repository
from ppbench.judge.evidence import RESOLUTION, Metric
from ppbench.judge.verdicts import Verdict

THRESHOLD = 0.02
GATED = ("tokens_per_s", "peak_memory_bytes")
WORDS = {
    ExitCode.ok: "passed",
    ExitCode.regression: "regression",
    ExitCode.insufficient: "not enough data",
    ExitCode.failed_runs: "failed",
}
NOT_DECIDED = "not decided"
NOTHING = "no case was measured on both sides on the same machine"
NOT_AT_HEAD = "not measured at head"


def in_force(
    entries: Iterable[Accepted], repository: Repository, base: str | None, head: str | None
) -> tuple[list[Accepted], list[str]]:
    """The entries whose commit is in head and not in base; a note for each that git lacks."""
    found, notes = [], []
    for entry in entries:
        try:
            commit = repository.resolve(entry.commit)
        except RepositoryError as error:
            notes.append(
                f"track.accept: an entry is not in force: {error}; delete it if its commit was "
                "squashed or rebased away, or name the new one"
            )
            continue
        if base is None or head is None:
            continue
        if repository.is_ancestor(commit, head) and not repository.is_ancestor(commit, base):
            found.append(replace(entry, commit=commit))
    return found, notes


def entry_text(commit: str, conditions: Sequence[str], metric: str, up_to: float) -> str:
    """Write an entry to paste; `conditions` identify its case."""
    lines = [
        "[[track.accept]]",
        f"commit = {quoted(commit)}",
        'reason = "why this is intended"',
        *([f"cases = {quoted(' and '.join(conditions))}"] if conditions else []),
        f"metric = {quoted(metric)}",
        f'up_to = "{up_to:.0%}"',
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Limits:
    """By how much worse each case may get, and which changes were accepted beforehand.

    `threshold`, from the command line, replaces the file's `default` and ours, but not what the
    file sets for some of the cases: whoever wrote that knew more about them.
    """

    sweep: Sweep | None = None
    threshold: float | None = None
    accepted: tuple[Accepted, ...] = ()
    has_all: bool = False  # whether each of the sweep's cases must be judged

    @cached_property
    def planned(self) -> Mapping[str, Planned]:
        """The cases of the sweep file, by case_id."""
        cases = () if self.sweep is None else self.sweep.cases
        return {case.case_id: (case, measure) for case, measure in cases}

    def threshold_of(self, series: Contrast) -> float:
        """The last threshold of the file that matches the case, else the default."""
        found = THRESHOLD if self.threshold is None else self.threshold
        planned = self.planned.get(series.case_id)
        if self.sweep is not None and planned is not None:
            for limit in self.sweep.track.thresholds:
                is_asked = limit.only.each or self.threshold is None
                found = limit.fraction if is_asked and limit.only.matches(planned) else found
        return found

    def resolution_of(self, series: Contrast) -> float:
        """Within how much sides are the same: a threshold below the usual one lowers it."""
        return min(RESOLUTION, self.threshold_of(series))


@dataclass(frozen=True)
class GatedLine:
    """A line of the comparison with the gate's judgement."""

    line: Line
    threshold: float
    worse: float | None  # a fraction, or points as one; negative: better
    is_gated: bool
    conditions: Sequence[str]  # that its case alone meets; none if it is not planned
    accepted: Accepted | None = None

    @property
    def up_to(self) -> float:
        """How much an entry must accept: the whole interval, in whole percent."""
        ends = worse_by(self.line, "low"), worse_by(self.line, "high")
        return math.ceil(100 * max(0.0, *(end or 0.0 for end in ends))) / 100

    @property
    def is_beyond(self) -> bool:
        """Whether it is worse than is allowed, be it accepted or not."""
        is_worse = self.line.change.verdict is Verdict.slower and self.worse is not None
        return self.is_gated and is_worse and (self.worse or 0.0) > self.threshold

    @property
    def is_regression(self) -> bool:
        return self.is_beyond and self.accepted is None

    def values(self) -> dict[str, object]:
        """The row of this line in `GateResult.frame`."""
        return {
            **self.line.values(),
            "threshold": self.threshold,
            "worse": self.worse,
            "is_gated": self.is_gated,
            "is_regression": self.is_regression,
            "accepted_by": None if self.accepted is None else self.accepted.commit,
        }


@dataclass(frozen=True, repr=False)
class GateResult:
    """The gate's judgement of a comparison."""

    comparison: Comparison
    lines: tuple[GatedLine, ...]
    failed: tuple[str, ...]  # cases that ran at base, in words
    missing: tuple[str, ...]  # cases that could not be judged, with the reason
    source: str | None = None  # the sweep file whose thresholds were used, or the script

    def __repr__(self) -> str:
        counts = {
            "regressed": len(self.regressions),
            "failed": len(self.failed),
            "not judged": len(self.missing),
        }
        parts = [f"{num} {name}" for name, num in counts.items() if num]
        return f"<GateResult {self.word}: {', '.join(parts) or 'nothing worse'}>"

    @property
    def frame(self) -> pd.DataFrame:
        """One row of raw figures per case and metric."""
        rows = [{**line.values(), **self.comparison.values_of(line.line)} for line in self.lines]
        return pd.DataFrame(rows)

    @property
    def regressions(self) -> list[GatedLine]:
        return [line for line in self.lines if line.is_regression]

    @property
    def accepted(self) -> list[GatedLine]:
        return [line for line in self.lines if line.is_beyond and line.accepted is not None]

    @property
    def open(self) -> list[GatedLine]:
        """The lines that have an interval and no verdict."""
        return [
            gated
            for gated in self.lines
            if gated.is_gated
            and gated.line.change.verdict is Verdict.open
            and gated.line.change.has_interval
        ]

    @property
    def word(self) -> str:
        """The result in a word; where nothing is sure and nothing worse, it is not decided."""
        is_open = self.exit_code is ExitCode.ok and bool(self.open)
        is_left_open = self.exit_code is ExitCode.insufficient and not self.missing
        return NOT_DECIDED if is_open or is_left_open else WORDS[self.exit_code]

    @property
    def exit_code(self) -> ExitCode:
        """The exit code; a fault that was found comes before a case that could not be judged."""
        if self.regressions:
            return ExitCode.regression
        if self.failed:
            return ExitCode.failed_runs
        is_unsure = bool(self.missing) or self.comparison.is_open
        return ExitCode.insufficient if is_unsure else ExitCode.ok


def judge(
    comparison: Comparison, gated: Sequence[Metric], limits: Limits, source: str | None = None
) -> GateResult:
    """Judge a comparison that was made with the resolutions of `limits`; pure.

    `source` is the sweep file, or the training script, that the runs are of.
    """
    lines = []
    for line in comparison.lines:
        threshold, worse = limits.threshold_of(line.series), worse_by(line)
        planned = limits.planned.get(line.series.case_id)
        conditions = [] if planned is None else conditions_of(planned, comparison.axes)
        judged = GatedLine(line, threshold, worse, line.metric in gated, conditions)
        if judged.is_beyond and worse is not None:
            covering = (a for a in limits.accepted if a.covers(line.metric.name, worse, planned))
            judged = replace(judged, accepted=next(covering, None))
        lines.append(judged)
    # A case that failed at head; one failed launch counts if base had none.
    base, head = comparison.base, comparison.head
    ran, flaky, runs = (set(keys_of(rows)) for rows in (base.runs, base.failed, head.runs))
    launches: dict[str, list[str]] = {}  # statuses of the failed launches of each case
    for key, status in zip(keys_of(head.failed), head.failed["status"], strict=True):
        if key in ran and (key not in runs or key not in flaky):
            launches.setdefault(key[0], []).append(str(status))
    failed = tuple(
        f"{comparison.texts[case_id]}: {' and '.join(dict.fromkeys(statuses))}"
        + (f" in {len(statuses)} launches" if len(statuses) > 1 else "")
        for case_id, statuses in launches.items()
    )
    missing = tuple(dict.fromkeys(_missing(comparison, lines, limits)))
    return GateResult(comparison, tuple(lines), failed, missing, source)


def worse_by(line: Line, end: str = "estimate") -> float | None:
    """By which fraction, or points as one, head is worse; None where no estimate was made.

    `end` may also be `low` or `high`, the ends of the interval.
    """
    change, sign = line.change, -1 if line.metric.higher_is_better else 1
    ratio = change.difference if line.metric.in_points else change.ratio
    same = 0.0 if line.metric.in_points else 1.0
    return None if ratio is None else sign * (float(getattr(ratio, end)) - same)


def _missing(comparison: Comparison, lines: Sequence[GatedLine], limits: Limits) -> Iterable[str]:
    for gated in lines:
        change = gated.line.change
        if gated.is_gated and not change.has_interval:
            counts = f"{change.num_base} at base, {change.num_head} at head"
            yield f"{gated.line.series.text}: too few launches ({counts})"
    compared = {line.series.case_id for line in comparison.lines}
    known = dict.fromkeys(comparison.base.runs["case_id"])
    for case_id in known | dict.fromkeys(limits.planned if limits.has_all else ()):
        why = None if case_id in compared else _why_missing(case_id, comparison)
        if why is not None and (case_id in limits.planned or why != NOT_AT_HEAD):
            text = comparison.texts.get(case_id)
            if text is None and limits.sweep is not None:
                text = " and ".join(conditions_of(limits.planned[case_id], limits.sweep.axes))
            yield f"{text or 'the case'}: {why}"
    if not comparison.lines:
        yield NOTHING


def _why_missing(case_id: str, comparison: Comparison) -> str | None:
    """Return why a case was not compared.

    None if it fails at head and that is reported already, or failed at base too.
    """
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
    machines = [{key[1] for key in keys} for keys in (base, head | head_failed)]
    is_shared = bool(machines[0] & machines[1])
    return f"measured {'with different settings' if is_shared else 'on different machines'}"
