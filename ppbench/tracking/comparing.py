"""`ppbench compare`: from names to what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ppbench.analysis.compare import Verdict
from ppbench.config.sweep import Sweep
from ppbench.config.sweep_file import read_sweep
from ppbench.errors import SweepInterruptedError, UsageError
from ppbench.format import Format
from ppbench.repository import Repository
from ppbench.run.environment import default_device
from ppbench.stored import open_store, tell
from ppbench.tracking.comparison import Comparison, break_down, compare_sides, read_metrics
from ppbench.tracking.measuring import measure_sides
from ppbench.tracking.outcome import FINE, NOT_ENOUGH, Outcome
from ppbench.tracking.sides import WORKTREE, Places, Side, both_fresh, find_side
from ppbench.tracking.summary import compared


@dataclass(frozen=True)
class Question:
    """What `ppbench compare` was asked."""

    base: str | None = None  # None: the repository's default, if both sides are to be measured
    head: str = WORKTREE
    sweep: Path | None = None
    metrics: Sequence[str] = ()
    launches: int | None = None  # None: measure nothing


def read_question(words: Sequence[str], metrics: Sequence[str], launches: int | None) -> Question:
    """`[BASE [HEAD]] [SWEEP]`, as typed. Raises UsageError for more."""
    *names, last = words
    sweep = Path(last) if last.endswith(".toml") else None
    names += [] if sweep else [last]
    if len(names) > 2:
        raise UsageError(
            f"compare {' '.join(words)}: {len(names)} sides are named; give BASE and HEAD, and a "
            "sweep file, FILE.toml, at the end"
        )
    base, head = (*names, None, None)[:2]
    return Question(base, head or WORKTREE, sweep, metrics, launches)


def compare_named(question: Question, results: Path, how: Format) -> Outcome:
    """Both sides beside each other. Raises UsageError, NotMeasuredError, StoreError."""
    metrics = read_metrics(question.metrics)
    begun = datetime.now(UTC)
    names = _names(question, results)
    sweep = None if question.sweep is None else read(question.sweep)
    base, head = sides(names, places_of(sweep, results), sweep)
    if question.launches is not None:
        base, head = both_fresh(base, head, begun)
    comparison = compare_sides(base, head, metrics, noise_folders(results, base, head))
    wanted = comparison.series() if how is Format.json else comparison.changed()
    found = break_down(comparison, wanted)
    tell_aside(comparison, how)
    has_verdict = any(line.change.verdict is not Verdict.insufficient for line in comparison.lines)
    return Outcome(compared(comparison, found, how), FINE if has_verdict else NOT_ENOUGH)


def _names(question: Question, results: Path) -> tuple[str, str]:
    """Those that were given; with --run those that were measured."""
    if question.launches is not None:
        return measured((question.base, question.head), question.sweep, question.launches, results)
    if question.base is None:
        raise UsageError("BASE: is missing; name it, or measure both sides with --run")
    return question.base, question.head


def measured(
    names: tuple[str | None, str], sweep: Path | None, launches: int, results: Path
) -> tuple[str, str]:
    """Measure two commits, in interleaved launches; what they are called then.

    Raises SweepInterruptedError.
    """
    if sweep is None:
        raise UsageError("--run: needs SWEEP, the sweep file to be measured")
    base, head = names
    if base is None and head != WORKTREE:
        base = Repository.around(read(sweep).track.repo).default_base(head)
    try:
        return measure_sides(sweep, [], base or "", head, launches, results)
    except KeyboardInterrupt:
        raise SweepInterruptedError(
            "stopped; what is finished is kept, and the same command goes on from there"
        ) from None


def read(file: Path) -> Sweep:
    return read_sweep(file, [], default_device())


def places_of(sweep: Sweep | None, results: Path) -> Places:
    """The repository that a sweep tracks, else the one around the current folder."""
    folder = Path.cwd() if sweep is None else sweep.track.repo
    return Places(open_store(results), folder)


def sides(names: Sequence[str], places: Places, sweep: Sweep | None) -> list[Side]:
    """Of the sweep's cases alone, if there is one."""
    found = [find_side(name, places) for name in names]
    if sweep is None:
        return found
    ids = [case.case_id for case, _ in sweep.cases]
    return [side.of_cases(ids) for side in found]


def noise_folders(results: Path, *of: Side) -> list[Path]:
    """Where the machine's noise may be kept: first of all where we were told to look."""
    return list(dict.fromkeys([results, *(side.store.folder for side in of)]))


def tell_aside(comparison: Comparison, how: Format) -> None:
    """What a table in CSV has no place for."""
    if how is Format.csv:
        for note in comparison.notes:
            tell(f"note: {note}")
