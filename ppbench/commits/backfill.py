"""Measures past commits: the newest, the oldest, then always the middle of the largest gap.

    order of measurement      2  9  5  8  3  7  4  6  1      oldest to newest

This order spreads what is known evenly, whenever the backfill is stopped. It depends on the range
alone, so that a second start goes on where the first one ended. All commits have their first launch
before any has its second. The commits are those along first parents, the states that the branch has
had; a merged branch counts as its merge.

Each is launched in turns with the newest, the reference, which is launched in turns with itself:
what the machine does to a launch, it does to both. If the reference does not run, commits are
launched alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import SILENT, Bench, Part, Progress, commit_values, read_tracked
from ppbench.commits.launches import Launches
from ppbench.console import note
from ppbench.errors import ExitCode, SweepInterruptedError, UsageError
from ppbench.git import Repository
from ppbench.judge.verdicts import SPEED


@dataclass(frozen=True, repr=False)
class BackfillResult:
    """The commits of a range as they are measured now, or as they would be."""

    frame: pd.DataFrame  # a row per commit and case; of a dry run a row per commit
    axes: tuple[str, ...]  # settings in which the cases differ
    is_dry_run: bool
    missing: tuple[str, ...] = ()  # commits that the budget left unmeasured, in words

    def __repr__(self) -> str:
        counts = self.frame["status"].value_counts().items()
        return f"<BackfillResult {', '.join(f'{num} {status}' for status, num in counts)}>"

    @property
    def exit_code(self) -> ExitCode:
        """An error where nothing ran at all, or not all that was asked for was measured."""
        if not (self.is_dry_run or bool(self.frame["num_launches"].any())):
            return ExitCode.failed_runs
        return ExitCode.insufficient if self.missing else ExitCode.ok


def backfill(
    span: str,
    sweep: Path | str,
    *,
    most: int | None = None,
    launches: int | None = None,
    budget_s: float = 0.0,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    retries_failed: bool = False,
    is_dry_run: bool = False,
    progress: Progress = SILENT,
) -> BackfillResult:
    """Measure what is missing of the commits `A..B`: A, B and those between.

    `most` takes so many commits, spread evenly. `launches` of each case are by default those of
    the sweep file. With a budget no launch is begun that would end after so many seconds. Raises
    UsageError, RepositoryError and SweepInterruptedError.
    """
    tracked, folder = read_tracked(sweep, overrides), Path(results)
    with Bench(
        tracked,
        folder,
        progress,
        overrides=overrides,
        retries_failed=retries_failed,
        budget_s=budget_s,
    ) as bench:
        num_launches = launches or max(measure.launches for _, measure in bench.sweep.cases)
        path = commits_of(bench.repository, span)
        order = order_of(len(path))[:most]
        in_turn = [bench.target(path[place]) for place in order]  # the first one is the reference
        cases = range(len(bench.sweep.cases))
        num_tried = 0  # starts of the reference in turns with itself

        def lacking(stored: Sequence[Launches], count: int = num_launches) -> list[int]:
            """The commits of which a case that runs has fewer launches than this."""
            return [
                place
                for place, own in enumerate(stored)
                if (bench.starts[in_turn[place].name] if place else num_tried) < count
                and any(
                    own.num_done(case, stored[1:] if place == 0 else ()) < count
                    and not own.does_not_run(case)
                    for case in cases
                )
            ]

        stored = bench.launches(in_turn)
        missing = lacking(stored)
        if is_dry_run:
            plan = pd.DataFrame([commit_values(target.commit) for target in in_turn])
            plan["status"] = [
                "to measure" if at in missing else "stored" for at in range(len(plan))
            ]
            return BackfillResult(plan, (), is_dry_run=True)
        if num_done := len(in_turn) - len(missing):
            num_failed = sum(any(map(own.does_not_run, cases)) for own in stored)
            again = f"; {num_failed} failed, and --retry-failed tries them again" * bool(num_failed)
            note(f"{num_done} of {len(in_turn)} commits are measured already{again}")

        def policy(stored: Sequence[Launches]) -> Part:
            """A commit and the reference: all have their first launch before any its second."""
            nonlocal num_tried
            for count in range(1, num_launches + 1):
                if left := lacking(stored, count):
                    num_later = (num_launches - count) * len(lacking(stored))
                    num_tried += left[0] == 0
                    places = (left[0],) if stored[0].fails_now else (0, left[0])
                    return Part(places, num_later + len(left))
            return Part()

        try:
            bench.measure(in_turn, policy)
        except KeyboardInterrupt:
            num_done = len(in_turn) - len(lacking(bench.launches(in_turn)))
            raise SweepInterruptedError(
                f"stopped; {num_done} of {len(in_turn)} commits are measured, and kept"
            ) from None
        stored = bench.launches(in_turn)
        rows = []
        for _, target, own in sorted(zip(order, in_turn, stored, strict=True)):
            for place, (case, measure) in enumerate(bench.sweep.cases):
                settings = {**case.settings(), **measure.settings()}
                failure = own.failure(place)
                rows.append(
                    {
                        **commit_values(target.commit),
                        "case_id": case.case_id,
                        **{axis: settings[axis] for axis in bench.sweep.axes},
                        **own.summary(place, SPEED),
                        "error": failure.error if failure else None,
                    }
                )
        axes = tuple(bench.sweep.axes) if len(bench.sweep.cases) > 1 else ()
        lost = lacking(stored) if bench.budget.is_spent else []
        labels = tuple(in_turn[place].label for place in lost)
        return BackfillResult(pd.DataFrame(rows), axes, is_dry_run=False, missing=labels)


def commits_of(repository: Repository, span: str) -> list[str]:
    """Return the commits of `A..B`, oldest first, A included; `A..` ends at HEAD.

    Raises UsageError for another form.
    """
    first, dots, last = span.partition("..")
    if not dots or not first or last.startswith("."):
        raise UsageError(
            f'"{span}": expected a range A..B, such as v1.0..main or HEAD~20..HEAD; A is measured '
            "too, and without B it ends at HEAD"
        )
    start, end = repository.resolve(first), repository.resolve(last or "HEAD")
    return [start] if start == end else [start, *repository.between(first, last or "HEAD")]


def order_of(count: int) -> list[int]:
    """Order the places 0 to count - 1: the last, the first, then the middle of the largest gap.

    Among gaps of the same size the newest comes first.
    """
    order = list(dict.fromkeys([count - 1, 0])) if count else []
    gaps = [(-(count - 1), 0, count - 1)]  # size, negative; how far from the newest; its end
    while gaps:
        size, _, end = heapq.heappop(gaps)
        start = end + size
        if end - start > 1:
            middle = (start + end + 1) // 2
            order.append(middle)
            for one, other in ((start, middle), (middle, end)):
                heapq.heappush(gaps, (one - other, count - 1 - other, other))
    return order
