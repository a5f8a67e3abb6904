"""Compares two sides case by case, or cases that differ in one setting; may measure them first.

Sides are given by name. Runs are paired by case, fingerprint and measurement settings; see
`comparison.contrasts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ppbench.commits.bench import AT_ONCE, SILENT, Progress, TwoSides, read_tracked, rounds_of
from ppbench.comparison.axes import find_axis
from ppbench.comparison.contrasts import compare_sides, compare_values
from ppbench.comparison.lines import Comparison, read_metrics
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.sides import (
    WORKTREE,
    Places,
    choose_runs,
    find_side,
    the_sweep_file,
)
from ppbench.config.sweep import Sweep
from ppbench.display.commands import command, near
from ppbench.errors import UsageError
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED
from ppbench.store import Store

PROGRAM = "program_digest"
"""The setting whose values are contents of a program file."""


def compare(
    base: object = None,
    head: str = WORKTREE,
    *,
    across: str | None = None,
    runs: Sequence[str] = (),
    all_pairs: bool = False,
    sweep: Path | str | None = None,
    metrics: Sequence[str] = (),
    launches: int | None = None,
    max_launches: int | None = None,
    budget_s: float = 0.0,
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
) -> Comparison:
    """Compare two sides case by case, or with `across` the cases that differ in that setting alone.

    A side is named by a revision, a run, a sweep or a results folder. With a `sweep` file only its
    cases are compared. With `launches` both sides are measured first, so often each, and with
    `max_launches` until the verdicts are decided or `budget_s` seconds spent (0: no bound); `base`
    may then be None for the repository's default. Launches of the last hour count, so that a
    measurement that was stopped goes on; older ones do not, since a machine drifts by more than
    launches differ. Raises UsageError, NotMeasuredError, StoreError, LaunchError and
    SweepInterruptedError.

    `compare(across="schedule")` takes the last sweep, or `runs`: ids, sweeps, sweep files. Each
    value of the setting is compared with `base`, or with `all_pairs` each with each. By default
    the base is the value that most others can be compared with: of several the smallest number, or
    the first in the sweep. Nothing is measured.
    """
    begun, folder, chosen = datetime.now(UTC), Path(results), read_metrics(metrics)
    is_measured = launches is not None or max_launches is not None
    if across is not None:
        if is_measured:
            raise UsageError(
                "--run: measures two commits; ppbench sweep SWEEP --budget 10m measures the cases "
                "of one sweep in turns; then compare them without --run"
            )
        setting, places = find_axis(across), Places(Store(folder), Path.cwd())
        side = choose_runs(runs, places, has_older_programs=setting == PROGRAM)
        return compare_values(setting, side, base, chosen, all_pairs=all_pairs)
    if base is None and not is_measured:
        raise UsageError("BASE: is missing; name it, or measure both sides with --run")
    named = None if base is None else str(base)
    tracked = None if sweep is None else read_tracked(sweep)
    file = None if tracked is None else tracked.file

    def compared(
        base: str, head: str, since: datetime | None = None, looks: Looks | None = None
    ) -> Comparison:
        both = command("compare", base, head, near(file), run=True, results=folder)
        places = places_of(tracked, folder, both)
        first, last = find_side(base, places), find_side(head, places)
        sides = first.revision or "BASE", last.revision or "HEAD"
        if first.revision == last.revision:  # two runs of a commit: no two sides to measure
            sides = "BASE", "HEAD"
        known = near(file or the_sweep_file(first, last))
        again = command("compare", *sides, known, run=True, results=folder)
        return compare_sides(
            first, last, chosen, again=again, sweep=tracked, since=since, looks=looks
        )

    if named is not None and not is_measured:
        return compared(named, head)
    until = (launches, max_launches, budget_s, metrics or (SPEED,))
    with rounds_of(tracked, named, head, folder, progress) as rounds:
        return measured(rounds, *until, lambda looks: compared(*rounds.names, begun, looks))


def measured(
    rounds: TwoSides,
    launches: int | None,
    max_launches: int | None,
    budget_s: float,
    metrics: Collection[str],
    compared: Callable[[Looks | None], Comparison],
) -> Comparison:
    """Launch both sides so often, or until these metrics are decided, and compare them."""
    if max_launches is None:
        rounds.bring_to(launches or 0)
        return compared(None)
    rounds.bench.rounds_budget_s = budget_s
    say = rounds.bench.progress.say
    return measure_until_decided(
        max_launches, rounds.bring_to, compared, metrics, say, budget_s, AT_ONCE
    )


def places_of(sweep: Sweep | None, results: Path, again: str) -> Places:
    """The store, and the repository that a sweep tracks or else the one around this folder.

    `again` measures what is missing there.
    """
    return Places(Store(results), Path.cwd() if sweep is None else sweep.track.repo, again)
