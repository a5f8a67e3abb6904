"""A claim measured again, or compared with newer launches of the store, and judged.

    claim ---commits, cases---> launches newer than the claim's ---compare---> Recheck
                                (measured now, or stored)         claim by claim: held, not shown,
                                                                  contradicted

The launches of the claim itself never count a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import SILENT, Progress, measure_sides, read_tracked
from ppbench.commits.claims import Case, Claim, Effect
from ppbench.commits.claims import Side as ClaimedSide
from ppbench.commits.comparison import (
    Comparison,
    Series,
    compare_sides,
    noise_folders,
    places_of,
)
from ppbench.commits.sides import WORKTREE, Places, Side, both_fresh, find_side
from ppbench.comparison.launches import FRESH_S
from ppbench.comparison.lines import Line
from ppbench.comparison.sessions import (
    BREAK,
    Session,
    moments_of,
    number_sessions,
    sessions_of,
)
from ppbench.config.sweep import Sweep
from ppbench.display.metrics import METRICS
from ppbench.errors import ExitCode, NotMeasuredError, UsageError
from ppbench.statistics.replication import Outcome, judge_again, overall

_CODES = {
    Outcome.held: ExitCode.ok,
    Outcome.contradicted: ExitCode.regression,
    Outcome.not_shown: ExitCode.insufficient,
}


@dataclass(frozen=True)
class Judged:
    """One claim, and what the new launches say of it."""

    effect: Effect
    case: Case
    again: Line[Series] | None  # None: not measured again
    outcome: Outcome


@dataclass(frozen=True, repr=False)
class Recheck:
    """A claim and what was measured again."""

    claim: Claim
    comparison: Comparison  # of the new launches alone
    judged: tuple[Judged, ...]  # what was claimed
    sessions: tuple[Session, ...]  # of the new launches
    is_another_session: bool  # whether no new launch was made in a session of the claim
    begun: datetime | None = None  # when a session was begun on purpose
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Recheck {self.outcome}: {len(self.judged)} claimed>"

    @property
    def outcome(self) -> Outcome:
        """What is said of all claims together."""
        return overall([one.outcome for one in self.judged])

    @property
    def exit_code(self) -> ExitCode:
        """The code of the outcome, or that runs failed and so a claim was not measured again."""
        is_missing = any(one.again is None for one in self.judged)
        has_failed = any(len(s.failed) for s in (self.comparison.base, self.comparison.head))
        if is_missing and has_failed and self.outcome is Outcome.not_shown:
            return ExitCode.failed_runs
        return _CODES[self.outcome]


@dataclass(frozen=True)
class Measuring:
    """How a claim is measured again; without `launches` newer stored ones are taken."""

    launches: int | None = None
    is_replication: bool = False  # only in another session
    is_forced: bool = False  # another session is begun now, without a break
    results: Path = Path("results")
    progress: Progress = SILENT


def check_claim(claim: Claim, how: Measuring, now: datetime | None = None) -> Recheck:
    """Compare the claim's sides by launches that are newer than its own, and judge it.

    Raises UsageError, NotMeasuredError, StoreError, LaunchError and SweepInterruptedError.
    """
    sweep = _sweep_of(claim, how)
    places = places_of(sweep, how.results)
    _check_worktree(claim.head, places)
    begun = datetime.now(UTC) if now is None else now
    begins = [begun] if how.is_forced else []
    if how.is_replication and not how.is_forced:
        _check_session_is_over(claim, places, begun)
    since = _fresh_since(claim, begun, is_forced=how.is_forced)
    if how.launches is not None:
        _measure(claim, sweep, how, since)
    sides = (claim.base, claim.head)
    base, head = (_newer(find_side(_name_of(side), places), claim) for side in sides)
    if how.launches is not None:
        base, head = both_fresh(base, head, since)
    _check_is_any(claim, base, head)
    metrics = [METRICS[name] for name in dict.fromkeys(effect.metric for effect in claim.effects)]
    folders = noise_folders(how.results, base, head)
    comparison = compare_sides(base, head, metrics, folders, again=claim.command)
    return replace(judge_claim(claim, comparison, begins), begun=begins[0] if begins else None)


def judge_claim(claim: Claim, comparison: Comparison, begins: Sequence[datetime] = ()) -> Recheck:
    """Judge a claim by a comparison of other launches."""
    num = len(claim.claimed)
    judged = tuple(
        _judged(effect, claim.cases[effect.case], comparison, num) for effect in claim.claimed
    )
    new = [moment for runs in _runs_of(comparison) for moment in moments_of(runs)]
    numbers = number_sessions([*claim.moments, *new], begins)
    old = set(numbers[: len(claim.moments)])
    return Recheck(
        claim,
        comparison,
        judged,
        tuple(sessions_of(new, begins)),
        not old & set(numbers[len(claim.moments) :]),
        notes=tuple(dict.fromkeys(_notes(claim, judged, comparison))),
    )


def _judged(effect: Effect, case: Case, comparison: Comparison, num_claims: int) -> Judged:
    metric = METRICS[effect.metric]
    lines = [
        line
        for line in comparison.lines
        if line.metric == metric and (line.series.key[0], *line.series.key[2:]) == case.key
    ]
    same_machine = [line for line in lines if line.series.fingerprint == case.fingerprint]
    line = next(iter(same_machine or lines), None)
    again = None if line is None else line.change
    outcome = judge_again(metric, effect.change.as_change(metric), again, num_claims)
    return Judged(effect, case, line, outcome)


def _notes(claim: Claim, judged: Sequence[Judged], comparison: Comparison) -> Iterator[str]:
    machines = {
        one.again.series.fingerprint
        for one in judged
        if one.again is not None and one.again.series.fingerprint != one.case.fingerprint
    }
    if machines:
        yield (
            f"measured again on another machine ({', '.join(sorted(machines))}) than the claim's "
            f"({', '.join(sorted({case.fingerprint for case in claim.cases}))}): what holds on one "
            "need not hold on the other"
        )
    for one in judged:
        if one.again is None:
            yield f"not measured again: {one.case.text}"
    codes = {code for side in (claim.base, claim.head) for code in side.code}
    new = {str(code) for runs in _runs_of(comparison) for code in runs["code"].dropna()}
    if codes and new and codes.isdisjoint(new):
        yield (
            f"measured again by another ppbench (code {', '.join(sorted(new))}) than the claim "
            f"({', '.join(sorted(codes))})"
        )


def _runs_of(comparison: Comparison) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The new launches of each side, failed ones too."""
    base, head = (pd.concat([side.runs, side.failed]) for side in _sides_of(comparison))
    return base, head


def _sides_of(comparison: Comparison) -> tuple[Side, Side]:
    return comparison.base, comparison.head


def _sweep_of(claim: Claim, how: Measuring) -> Sweep | None:
    """The claim's sweep file, which measuring needs."""
    file = claim.sweep_file
    if file is not None and Path(file).is_file():
        return read_tracked(file)
    if how.launches is None:
        return None
    raise UsageError(
        f"--run: the claim's sweep file {file or 'is not known'}{' is not here' if file else ''}; "
        "expected it where the claim was made; run this in that folder, or leave out --run and "
        "--replicate to take newer launches of the store"
    )


def _check_worktree(head: ClaimedSide, places: Places) -> None:
    """Raises UsageError unless the work tree has the changes that were claimed."""
    if not head.is_dirty:
        return
    state = places.repository().state()
    if (state.commit, state.changes) != (head.commit, head.changes):
        found = f"{state.commit[:9]} with changes {state.changes or 'none'}"
        raise UsageError(
            f"{WORKTREE}: is {found}; expected {(head.commit or '')[:9]} with the changes "
            f"{head.changes}, which were claimed; check out that commit and apply them"
        )


def _name_of(side: ClaimedSide) -> str:
    return side.revision or side.name


def _check_session_is_over(claim: Claim, places: Places, now: datetime) -> None:
    """Raises NotMeasuredError, with the time to wait for, while the newest session goes on."""
    moments = [moment for moment in claim.moments if moment is not None]
    for side in (claim.base, claim.head):
        try:
            moments += [m for m in moments_of(find_side(_name_of(side), places).runs) if m]
        except NotMeasuredError:  # another store than the claim's
            continue
    last = max((moment for moment in moments if moment <= now), default=None)
    if last is not None and now <= last + BREAK:
        hours = BREAK.total_seconds() / 3600
        raise NotMeasuredError(
            f"--replicate: the newest session is not over: its last launch ended at {_at(last)}, "
            f"and a session lasts until {hours:.0f} hours pass without one; replicate it after "
            f"{_at(last + BREAK)}, or begin another session now with --new-session, which the "
            "claim will say"
        )


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _fresh_since(claim: Claim, now: datetime, *, is_forced: bool) -> datetime:
    """The moment up to an hour before which launches count as made now.

    Those of the last hour do, so that what was stopped goes on, but none of the claim; with a
    session that is begun on purpose, none that is older.
    """
    hour = timedelta(seconds=FRESH_S)
    if is_forced or claim.newest is None:
        return now + hour
    return max(now, claim.newest + hour + timedelta(microseconds=1))


def _measure(claim: Claim, sweep: Sweep | None, how: Measuring, since: datetime) -> None:
    base, head = claim.base.revision, claim.head.revision
    if base is None or head is None:
        name = claim.base.name if base is None else claim.head.name
        raise UsageError(
            f"--run: {name} is no commit, so it cannot be measured again; leave out --run and "
            "--replicate, and name a store with newer launches: --results DIR"
        )
    assert how.launches is not None
    measure_sides(sweep, base, head, how.launches, how.results, how.progress, since)


def _newer(side: Side, claim: Claim) -> Side:
    """The launches of a side that are not the claim's, and were made after its last."""
    known, newest = {launch.run_id for launch in claim.launches}, claim.newest
    kept = []
    for rows in (side.runs, side.failed):
        moments = moments_of(rows)
        is_new = [
            run_id not in known and moment is not None and (newest is None or moment > newest)
            for run_id, moment in zip(rows["run_id"], moments, strict=True)
        ]
        kept.append(rows[pd.Series(is_new, rows.index, dtype=bool)])
    runs, failed = kept
    return replace(side, runs=runs, failed=failed).of_cases(case.case_id for case in claim.cases)


def _check_is_any(claim: Claim, base: Side, head: Side) -> None:
    for word, side in (("base", base), ("head", head)):
        if side.runs.empty and side.failed.empty:
            newest = "" if claim.newest is None else f" than {_at(claim.newest)}"
            raise NotMeasuredError(
                f"{word} {side.title}: has no launches in {side.store.folder} that are newer"
                f"{newest}, the claim's last; measure it again with: ppbench check CLAIM --run"
            )
