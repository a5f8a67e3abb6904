"""A saved comparison, judged anew by launches that it has not seen.

    comparison.json ---sides, cases---> newer launches of the store ---compare---> Recheck
                                        (with --run made first)        held, not held, not decided

What holds is the verdict: new launches that are `slower` again confirm `slower`, any other decided
verdict contradicts it. The launches of the comparison itself never count a second time: they were
chosen because they showed something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import SILENT, Progress, read_tracked, rounds_of
from ppbench.commits.comparison import places_of
from ppbench.comparison.contrasts import compare_sides
from ppbench.comparison.lines import Comparison, Line
from ppbench.comparison.sides import SHORT, WORKTREE, find_side
from ppbench.display.commands import near
from ppbench.display.metrics import METRICS
from ppbench.errors import ExitCode, NotMeasuredError, UsageError
from ppbench.judge.differences import Ratio
from ppbench.judge.evidence import Metric
from ppbench.judge.verdicts import Change, Verdict


class Outcome(StrEnum):
    """What new launches say of a stated change."""

    held = "held"
    not_decided = "not decided"
    not_held = "not held"


_AGAIN = ("ratio", "difference", "verdict", "num_base", "num_head")
COLUMNS = ("stated", "stated_verdict", *(f"again_{name}" for name in _AGAIN), "outcome")
"""The columns of a recheck that no other command has."""
_CODES = {
    Outcome.not_held: ExitCode.regression,
    Outcome.not_decided: ExitCode.insufficient,
    Outcome.held: ExitCode.ok,
}
"""Those that come first decide where several are found."""


@dataclass(frozen=True)
class Stated:
    """A change of one figure of a case that a saved comparison states, and what holds of it."""

    case_id: str
    case: str
    fingerprint: str
    metric: Metric
    change: Change
    again: Line | None = None  # by new launches; None: not measured again

    @property
    def outcome(self) -> Outcome:
        """Whether the same verdict was reached again."""
        if self.again is None or not self.again.change.is_decided:
            return Outcome.not_decided
        is_held = self.again.change.verdict is self.change.verdict
        return Outcome.held if is_held else Outcome.not_held


@dataclass(frozen=True)
class Saved:
    """A saved comparison."""

    sides: tuple[Mapping[str, str | None], ...]  # names, titles, and revisions of commits
    sweep_file: str | None
    last_run: str  # its newest run
    stated: tuple[Stated, ...]  # the changes, or if nothing changed, that it did not


@dataclass(frozen=True)
class Recheck:
    """What new launches say of all that a comparison states."""

    comparison: Comparison  # of the new launches alone
    judged: tuple[Stated, ...]

    @property
    def outcome(self) -> Outcome:
        """Any that is not held, then any that is not decided."""
        outcomes = [each.outcome for each in self.judged]
        return min(outcomes, key=list(_CODES).index, default=Outcome.not_decided)

    @property
    def frame(self) -> pd.DataFrame:
        """One row per stated change, with the figures of the launches that judged it anew."""
        rows = []
        for each in self.judged:
            again = {} if each.again is None else each.again.values()
            rows.append(
                {
                    "case_id": each.case_id,
                    "case": each.case,
                    "metric": each.metric.name,
                    "stated_verdict": str(each.change.verdict),
                    **{f"again_{name}": again.get(name) for name in _AGAIN},
                    "outcome": str(each.outcome),
                }
            )
        return pd.DataFrame(rows)

    @property
    def exit_code(self) -> ExitCode:
        """The code of the outcome, or that runs failed and so nothing was measured again."""
        is_missing = any(each.again is None for each in self.judged)
        has_failed = any(len(side.failed) for side in (self.comparison.base, self.comparison.head))
        if is_missing and has_failed and self.outcome is Outcome.not_decided:
            return ExitCode.failed_runs
        return _CODES[self.outcome]


def identity_values(comparison: Comparison) -> dict[str, object]:
    """What a saved comparison needs beside its changes to be measured again.

    The revision of a side is the name by which it is measured, whatever HEAD is by then.
    """
    file, sides = comparison.sweep_file, {}
    for word, side in (("base", comparison.base), ("head", comparison.head)):
        revision = WORKTREE if side.name == WORKTREE else side.revision and side.commit
        sides[word] = {
            "name": side.name,
            "title": side.title,
            "commit": side.commit,
            "revision": side.commit if side.is_clean else revision,
            "num_runs": len(side.runs),
            "num_failed": len(side.failed),
        }
    return {
        **sides,
        "sweep_file": None if file is None else near(file),
        "last_run": max(comparison.run_ids, default=""),
    }


def read_saved(file: Path) -> Saved:
    """Read a saved comparison of two sides. Raises UsageError for any other file."""
    try:
        content = json.loads(file.read_bytes())
        stated = []
        for row in content["changes"]:
            names = (str(row["case_id"]), str(row["case"]), str(row["fingerprint"]))
            values = (row["base"], row["head"], Verdict(row["verdict"]))
            counts = (int(row["num_base"]), int(row["num_head"]), float(row["resolution"]))
            ratio, difference = (
                None
                if row[name] is None
                else Ratio(float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]))
                for name in ("ratio", "difference")
            )
            change = Change(*values, *counts, ratio, difference)
            stated.append(Stated(*names, METRICS[row["metric"]], change))
        changes = [one for one in stated if one.change.verdict.is_claim]
        same = [one for one in stated if one.change.verdict is Verdict.same]
        sides = tuple(
            {name: content[side][name] for name in ("name", "title", "revision")}
            for side in ("base", "head")
        )
        return Saved(sides, content["sweep_file"], content["last_run"], tuple(changes or same))
    except OSError as error:
        why = error.strerror or "cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        why = "is no saved comparison of two sides"
    raise UsageError(
        f"{file}: {why}; expected what this writes: ppbench compare BASE HEAD SWEEP -o {file}"
    )


def check_saved(
    file: Path,
    *,
    launches: int | None = None,
    results: Path = Path("results"),
    progress: Progress = SILENT,
) -> Recheck:
    """Judge what a saved comparison states by launches that are newer than its own.

    With `launches` so many of each side are made first. Raises UsageError, NotMeasuredError,
    StoreError, LaunchError and SweepInterruptedError.
    """
    saved, begun, sweep = read_saved(file), datetime.now(UTC), None
    if not saved.stated:
        raise UsageError(
            f"{file}: states nothing that could hold, as every verdict in it is open; expected "
            f"one that is decided: ppbench compare BASE HEAD SWEEP --run -o {file}"
        )
    if saved.sweep_file is not None and Path(saved.sweep_file).is_file():
        sweep = read_tracked(saved.sweep_file)
    again = f"ppbench check {file} --run"
    places = places_of(sweep, results, again)
    revisions = [named["revision"] for named in saved.sides]
    if WORKTREE in revisions:
        state = places.repository().state()
        title = f"{WORKTREE} = {state.commit[:SHORT]} with changes {state.changes or 'none'}"
        expected = saved.sides[revisions.index(WORKTREE)]["title"]
        if title != expected:
            raise UsageError(
                f"{title}: expected {expected}, which was compared; check out that commit and "
                "apply the changes"
            )
    if launches is not None:
        base, head = revisions
        if sweep is None or base is None or head is None:
            what = "its sweep file is not here" if sweep is None else "a side is no commit"
            raise UsageError(
                f"--run: {file}: {what}, so it cannot be measured again; leave out --run to judge "
                "by newer launches of the store"
            )
        with rounds_of(sweep, base, head, results, progress, saved.last_run) as rounds:
            rounds.bring_to(launches)
    newer = []  # the launches of the stated cases that the saved comparison has not seen
    for named in saved.sides:
        side = find_side(named["revision"] or str(named["name"]), places)
        runs, failed = (rows[rows["run_id"] > saved.last_run] for rows in (side.runs, side.failed))
        case_ids = (each.case_id for each in saved.stated)
        newer.append(replace(side, runs=runs, failed=failed).of_cases(case_ids))
    first, last = newer
    for word, measured in (("base", first), ("head", last)):
        if measured.runs.empty and measured.failed.empty:
            raise NotMeasuredError(
                f"{word} {measured.title}: has no launches in {measured.store.folder} that are "
                f"newer than those of {file}; make some with: {again}"
            )
    metrics = list(dict.fromkeys(each.metric for each in saved.stated))
    comparison = compare_sides(first, last, metrics, again=again, since=begun if launches else None)
    judged = []
    for stated in saved.stated:  # by launches of the same machine, if there are any
        lines = {
            (line.series.fingerprint != stated.fingerprint, line.series.text != stated.case): line
            for line in reversed(comparison.lines)
            if line.metric == stated.metric and line.series.case_id == stated.case_id
        }
        judged.append(replace(stated, again=lines[min(lines)] if lines else None))
    return Recheck(comparison, tuple(judged))
