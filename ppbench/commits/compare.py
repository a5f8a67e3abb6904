"""Compares two sides that are given by name, and measures them first if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ppbench.commits.bench import SILENT, Progress, measure_sides
from ppbench.commits.comparison import Comparison, compare_sides, read_metrics
from ppbench.commits.sides import WORKTREE, Places, Side, both_fresh, find_side
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.errors import SweepInterruptedError, UsageError
from ppbench.git import Repository
from ppbench.run.machine.environment import default_device
from ppbench.store import Store


def compare(
    base: str | None,
    head: str = WORKTREE,
    *,
    sweep: Path | str | None = None,
    metrics: Sequence[str] = (),
    launches: int | None = None,
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
) -> Comparison:
    """Compare two sides case by case.

    A side is named by a revision, a run, a sweep or a results folder. With a `sweep` file only its
    cases are compared. With `launches` both sides are measured first, so often each, and `base` may
    be None for the repository's default. Raises UsageError, NotMeasuredError, StoreError,
    LaunchError and SweepInterruptedError.
    """
    chosen, results, begun = read_metrics(metrics), Path(results), datetime.now(UTC)
    names = base, head
    if launches is not None:
        names = measure_first(base, head, sweep, launches, results, progress)
    if names[0] is None:
        raise UsageError("BASE: is missing; name it, or measure both sides with --run")
    planned = None if sweep is None else read(sweep)
    places = places_of(planned, results)
    first, last = (of_sweep(find_side(str(name), places), planned) for name in names)
    if launches is not None:
        first, last = both_fresh(first, last, begun)
    return compare_sides(first, last, chosen, noise_folders(results, first, last))


def measure_first(
    base: str | None,
    head: str,
    sweep: Path | str | None,
    launches: int,
    results: Path,
    progress: Progress,
) -> tuple[str, str]:
    """Measure two commits in interleaved launches, and return the names of their sides.

    Raises UsageError without a sweep file, SweepInterruptedError, LaunchError.
    """
    if sweep is None:
        raise UsageError("--run: needs SWEEP, the sweep file to be measured")
    if base is None and head != WORKTREE:
        base = Repository.around(read(sweep).track.repo).default_base(head)
    try:
        return measure_sides(Path(sweep), base or "", head, launches, results, progress=progress)
    except KeyboardInterrupt:
        raise SweepInterruptedError("stopped; what is finished is kept") from None


def read(file: Path | str) -> Sweep:
    return read_sweep(Path(file), [], default_device())


def places_of(sweep: Sweep | None, results: Path) -> Places:
    """The store, and the repository that a sweep tracks or else the one around this folder."""
    return Places(Store(results), Path.cwd() if sweep is None else sweep.track.repo)


def of_sweep(side: Side, sweep: Sweep | None) -> Side:
    """The side with the cases of a sweep only, if there is one."""
    return side if sweep is None else side.of_cases(case.case_id for case, _ in sweep.cases)


def noise_folders(results: Path, *sides: Side) -> list[Path]:
    """The stores in which the machine's noise may be kept, the named one first."""
    return list(dict.fromkeys([results, *(side.store.folder for side in sides)]))
