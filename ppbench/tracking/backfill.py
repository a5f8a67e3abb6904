"""Measures past commits: the newest, the oldest, then always the middle of the largest gap.

    order of measurement      2  9  5  8  3  7  4  6  1      oldest to newest

In this order what is known is spread evenly whenever it is stopped. It is decided by the range
alone, so that a second start goes on where the first one ended. All commits have their first launch
before any has its second: launches of one commit in a row would share whatever the machine did just
then, and that looks like a change. Commits are those along first
parents, which are what the branch has been at one time; what was merged counts as its merge.
"""

from __future__ import annotations

import heapq
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.analysis.compare import SPEED
from ppbench.errors import SweepInterruptedError, UsageError, first_line
from ppbench.format import Format
from ppbench.listing import render
from ppbench.repository import Repository
from ppbench.stored import tell
from ppbench.tracking.launches import Launches
from ppbench.tracking.measuring import Bench, Target, opened
from ppbench.tracking.outcome import COMMIT_COLUMNS, COMMIT_FIELDS, Outcome, row_of, words_of

EXIT_NOTHING_RAN = 4


@dataclass(frozen=True)
class Wanted:
    """Which commits, and how often each."""

    span: str  # A..B: A, B and what lies between
    every: int = 1
    most: int | None = None
    launches: int | None = None  # None: as many as the sweep file says
    retries_failed: bool = False


def backfill(
    wanted: Wanted,
    file: Path,
    overrides: Sequence[str],
    results: Path,
    how: Format,
    *,
    is_dry_run: bool = False,
) -> Outcome:
    """Measure what is missing of the commits. Raises SweepInterruptedError, RepositoryError."""
    with opened(file, overrides, results, retries_failed=wanted.retries_failed) as bench:
        num_launches = _num_launches(bench, wanted)
        path, order = _chosen(bench.repository, wanted)
        targets = {place: bench.target(path[place]) for place in order}
        if is_dry_run:
            return _planned(bench, [targets[place] for place in order], num_launches, how)
        try:
            _measure(bench, [targets[place] for place in order], num_launches)
        except KeyboardInterrupt:
            raise _stopped(
                bench, list(targets.values()), wanted, file, overrides, results
            ) from None
        return _outcome(bench, [targets[place] for place in sorted(order)], how)


def _num_launches(bench: Bench, wanted: Wanted) -> int:
    return wanted.launches or max(measure.launches for _, measure in bench.sweep.cases)


def _chosen(repository: Repository, wanted: Wanted) -> tuple[list[str], list[int]]:
    """All commits of the range, oldest first; and the places of those to measure, in order."""
    path = commits_of(repository, wanted.span)
    if wanted.most is not None:
        return path, order_of(len(path))[: wanted.most]
    places = sorted({0, *range(len(path) - 1, -1, -wanted.every)})
    return path, [places[index] for index in order_of(len(places))]


def commits_of(repository: Repository, span: str) -> list[str]:
    """Of `A..B`, oldest first, A included; `A..` ends at HEAD. Raises UsageError."""
    first, dots, last = span.partition("..")
    if not dots or not first or last.startswith("."):
        raise UsageError(
            f'"{span}": expected a range A..B, such as v1.0..main or HEAD~20..HEAD; A is measured '
            "too, and without B it ends at HEAD"
        )
    start, end = repository.resolve(first), repository.resolve(last or "HEAD")
    return [start] if start == end else [start, *repository.between(first, last or "HEAD")]


def order_of(count: int) -> list[int]:
    """Places 0 to count - 1: the last, the first, then the middle of the largest gap.

    Of gaps of the same size the newest is first.
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


def _measure(bench: Bench, targets: Sequence[Target], num_launches: int) -> None:
    stored = bench.launches(targets)
    missing = [
        target
        for target, found in zip(targets, stored, strict=True)
        if bench.is_missing(target, found, num_launches)
    ]
    if num_done := len(targets) - len(missing):
        tell(f"{num_done} of {len(targets)} commits are measured already")
    for count in range(1, num_launches + 1):
        lacking = [
            target
            for target, found in zip(missing, bench.launches(missing), strict=True)
            if bench.is_missing(target, found, count)
        ]
        num_later = (num_launches - count) * len(missing)
        for place, target in enumerate(lacking):
            bench.measure(target, count, num_later + len(lacking) - place)


def _planned(bench: Bench, targets: Sequence[Target], num_launches: int, how: Format) -> Outcome:
    """What would be measured, in this order."""
    rows = [
        {
            **row_of(target.commit),
            "status": "to measure" if bench.is_missing(target, found, num_launches) else "stored",
        }
        for target, found in zip(targets, bench.launches(targets), strict=True)
    ]
    columns = [*COMMIT_COLUMNS, "status"]
    return Outcome(render(pd.DataFrame(rows), how, columns, COMMIT_FIELDS), 0)


def _outcome(bench: Bench, targets: Sequence[Target], how: Format) -> Outcome:
    """A row for each commit and case; an error where nothing ran at all."""
    rows = [
        {**row_of(target.commit), **_case_row(bench, found, place)}
        for target, found in zip(targets, bench.launches(targets), strict=True)
        for place in range(len(bench.sweep.cases))
    ]
    frame = pd.DataFrame(rows)
    axes = bench.sweep.axes if len(bench.sweep.cases) > 1 else ()
    columns = [*COMMIT_COLUMNS, *axes, "num_launches", "status", SPEED]
    error = ["error"] if frame["error"].any() else []
    text = render(frame, how, [*columns, *error], COMMIT_FIELDS)
    return Outcome(text, 0 if frame["num_launches"].any() else EXIT_NOTHING_RAN)


def _case_row(bench: Bench, found: Launches, place: int) -> dict[str, object]:
    case, measure = bench.sweep.cases[place]
    settings = {**case.settings(), **measure.settings()}
    figures, rows = found.figures(place, SPEED), found.of_case(place)
    failure = found.failure(place)
    return {
        "case_id": case.case_id,
        **{axis: settings[axis] for axis in bench.sweep.axes},
        "num_launches": found.num_ok(place),
        "status": "ok" if found.num_ok(place) else rows[-1].status if rows else "not measured",
        SPEED: statistics.median(figures) if figures else None,
        "error": first_line(failure.error) if failure else None,
    }


def _stopped(
    bench: Bench,
    targets: Sequence[Target],
    wanted: Wanted,
    file: Path,
    overrides: Sequence[str],
    results: Path,
) -> SweepInterruptedError:
    num_launches = _num_launches(bench, wanted)
    num_done = sum(
        not bench.is_missing(target, found, num_launches)
        for target, found in zip(targets, bench.launches(targets), strict=True)
    )
    options = {
        "every": None if wanted.every == 1 else wanted.every,
        "max": wanted.most,
        "launches": wanted.launches,
    }
    flags = ["--retry-failed"] * wanted.retries_failed
    words = ["ppbench", "backfill", wanted.span, str(file)]
    words += words_of(options, overrides, results, flags)
    return SweepInterruptedError(
        f"stopped; {num_done} of {len(targets)} commits are measured, and kept. Go on with: "
        f"{shlex.join(words)}"
    )
