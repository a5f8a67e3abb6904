"""Judges whether a change may go in: head against base, with a threshold for each case.

    regression   significantly worse, by more than the case's threshold, and not accepted
    failed       ran at base, and fails at head on the same machine
    too little   no verdict can be given for a case; with a sweep file, for any of its cases

A case that fails on both sides is no worse than it was: it passes, with a note.

A case that is `open` passes too, and is reported as such: a gate that failed whatever is
uncertain would stop most changes, and soon be switched off.

The accept file lists intended changes for the worse, which then pass:

    [[accept]]
    commit = "3f2a91c07"                  # the change came with it
    reason = "exact attention, see #41"
    cases  = "schedule=1f1b and world_size=4"   # of these cases; all when left out
    metric = "tokens_per_s"               # this figure; all when left out
    up_to  = "10%"                        # no worse than this; however much when left out

An entry is in force only while its commit lies between base and head. After that the base has the
change too, so the entry need not be deleted, and the next regression is not covered by it. If its
commit was squashed or rebased away it is never in force, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ppbench.comparison.launches import keys_of
from ppbench.comparison.lines import Comparison, Contrast, Line
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.schema import known_keys
from ppbench.config.sweep import AND, EVERYTHING, Only, Sweep, Track, parse_only, read_fraction
from ppbench.config.toml import (
    Source,
    brief,
    parse,
    quoted,
    read_text,
    shown,
    unknown_key,
)
from ppbench.display.cases import case_text, varying_axes
from ppbench.display.metrics import METRICS
from ppbench.errors import ExitCode, RepositoryError, UsageError, nearest
from ppbench.git import Repository
from ppbench.judge.evidence import RESOLUTION, Metric
from ppbench.judge.verdicts import Verdict

_KEYS = ("commit", "reason", "cases", "metric", "up_to")
_NEEDED = ("commit", "reason")
_MOST = 1000.0  # memory may grow to several times its size


@dataclass(frozen=True)
class Accepted:
    """One entry of the file."""

    commit: str  # in full, if it is known
    reason: str
    only: Only = EVERYTHING
    metric: str | None = None  # None: any
    up_to: float | None = None  # a fraction; None: however much
    problem: str = ""  # why the commit is not known

    def covers(self, metric: str, worse: float, planned: tuple[Case, Measure] | None) -> bool:
        """Whether it accepts that a metric of a case is worse by this fraction.

        `planned` is None for a case that the sweep file lacks; such a case meets no condition.
        """
        if self.metric not in (None, metric) or (self.up_to is not None and worse > self.up_to):
            return False
        return not self.only.allowed or (planned is not None and self.only.matches(*planned))


def accept_file(sweep: Sweep) -> Path | None:
    """Return the file that `[track] accept` names, else `<sweep>.accept.toml` if it exists.

    Raises UsageError for a named file that does not exist.
    """
    named = sweep.track.accept
    if named is not None:
        if not named.is_file():
            raise UsageError(f"{sweep.file}: track.accept: no such file: {named}")
        return named
    beside = Path(sweep.file).with_suffix(".accept.toml")
    return beside if beside.is_file() else None


def read_accepted(file: Path, repository: Repository) -> list[Accepted]:
    """Read the entries of a file. Raises SweepFileError, with the line, for an invalid one."""
    text = read_text(file)
    tree, source = parse(file, text), Source(str(file), text, frozenset())
    for key, value in tree.items():
        if key != "accept":
            raise source.error((key,), unknown_key(key, value, ["accept"]))
    tables = tree.get("accept", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise source.error(("accept",), "expected [[accept]], an array of tables")
    entries = []
    for index, table in enumerate(tables):
        place = ("accept", index)
        for key, value in table.items():
            if key not in _KEYS:
                raise source.error((*place, key), unknown_key(key, value, _KEYS))
            if not isinstance(value, str) and key != "up_to":
                raise source.error((*place, key), f"expected a string, got {shown(value)}")
        for key in _NEEDED:
            if not str(table.get(key, "")).strip():
                raise source.error((*place, key), f"is missing; every entry needs a {key}")
        metric, up_to = table.get("metric"), table.get("up_to")
        if metric is not None and metric not in METRICS:
            problem = f"unknown metric {brief(metric)}{nearest(str(metric), METRICS)}"
            raise source.error((*place, "metric"), problem)
        commit, problem = str(table["commit"]), ""
        try:
            commit = repository.resolve(commit)
        except RepositoryError as error:
            problem = str(error)
        try:
            cases = table.get("cases")
            only = EVERYTHING if cases is None else parse_only(AND.split(str(cases).strip()))
        except UsageError as error:
            raise source.error((*place, "cases"), str(error).removeprefix("--only ")) from None
        try:
            most = None if up_to is None else read_fraction(up_to, _MOST)
        except ValueError as error:
            raise source.error((*place, "up_to"), f"{error}; got {shown(up_to)}") from None
        of_metric = None if metric is None else str(metric)
        entries.append(Accepted(commit, str(table["reason"]), only, of_metric, most, problem))
    return entries


def in_force(
    entries: Iterable[Accepted], repository: Repository, base: str, head: str
) -> list[Accepted]:
    """Return the entries whose commit is in head and not in base."""
    return [
        entry
        for entry in entries
        if not entry.problem
        and repository.is_ancestor(entry.commit, head)
        and not repository.is_ancestor(entry.commit, base)
    ]


def entry_text(commit: str, cases: Mapping[str, object], metric: str, up_to: float) -> str:
    """Write an entry to paste; `cases` are dotted keys of the sweep file and their values."""
    conditions = " and ".join(
        f"{key}={value if isinstance(value, str) else brief(value)}" for key, value in cases.items()
    )
    lines = [
        "[[accept]]",
        f"commit = {quoted(commit)}",
        'reason = "why this is intended"',
        *([f"cases = {quoted(conditions)}"] if conditions else []),
        f"metric = {quoted(metric)}",
        f'up_to = "{up_to:.0%}"',
    ]
    return "\n".join(lines)


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
OTHER_MACHINES = "measured on different machines"
Planned = Mapping[str, tuple[Case, Measure]]


@dataclass(frozen=True)
class Limits:
    """By how much worse each case may get, and which changes were accepted beforehand."""

    planned: Planned  # the cases of the sweep file, by case_id
    track: Track
    default: float = THRESHOLD
    accepted: tuple[Accepted, ...] = ()
    file: str | None = None  # the sweep file
    has_all: bool = False  # whether each of the planned cases must be judged

    def text_of(self, case_id: str) -> str:
        """The name of a planned case that neither side has."""
        cases = pd.DataFrame([case.settings() for case, _ in self.planned.values()])
        case, _ = self.planned[case_id]
        return case_text(pd.Series(case.settings()), varying_axes(cases))

    def threshold_of(self, series: Contrast) -> float:
        planned = self.planned.get(series.case_id)
        return self.track.threshold_of(*planned, self.default) if planned else self.default

    def conditions_of(self, series: Contrast, axes: Sequence[str]) -> dict[str, object]:
        """The conditions that an entry of the accept file needs for a case; none if unplanned."""
        planned = self.planned.get(series.case_id)
        keys = [key for key in known_keys() if key.replace(".", "_") in axes]
        return {key: setting_of(*planned, key) for key in keys} if planned else {}

    def resolution_of(self, series: Contrast) -> float:
        """Within how much sides are the same: a threshold below the usual one lowers it."""
        return min(RESOLUTION, self.threshold_of(series))


def limits_of(
    sweep: Sweep | None, threshold: float | None, accepted: Sequence[Accepted], *, has_all: bool
) -> Limits:
    """Return the limits of a sweep file and of the command line.

    `threshold`, from the command line, replaces the file's `default` and ours, but not what the
    file sets for some of the cases: whoever wrote that knew more about them.
    """
    default = THRESHOLD if threshold is None else threshold
    if sweep is None:
        return Limits({}, Track(), default, tuple(accepted))
    track = sweep.track
    if threshold is not None:
        special = tuple(limit for limit in track.thresholds if limit.only.allowed)
        track = replace(track, thresholds=special)
    planned = {case.case_id: (case, measure) for case, measure in sweep.cases}
    return Limits(planned, track, default, tuple(accepted), sweep.file, has_all)


@dataclass(frozen=True)
class GatedLine:
    """A line of the comparison with the gate's judgement."""

    line: Line
    threshold: float
    worse: float | None  # a fraction, or points as one; negative: better
    is_gated: bool
    conditions: Mapping[str, object]  # by dotted key, the settings that identify its case
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
    sweep_file: str | None = None  # whose thresholds were used

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


def judge(comparison: Comparison, gated: Sequence[Metric], limits: Limits) -> GateResult:
    """Judge a comparison that was made with the resolutions of `limits`; pure."""
    lines = []
    for line in comparison.lines:
        threshold, worse = limits.threshold_of(line.series), worse_by(line)
        conditions = limits.conditions_of(line.series, comparison.axes)
        judged = GatedLine(line, threshold, worse, line.metric in gated, conditions)
        if judged.is_beyond and worse is not None:
            planned = limits.planned.get(line.series.case_id)
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
    return GateResult(comparison, tuple(lines), failed, missing, limits.file)


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
            yield f"{comparison.texts.get(case_id) or limits.text_of(case_id)}: {why}"
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
    return "measured with different settings" if machines[0] & machines[1] else OTHER_MACHINES
