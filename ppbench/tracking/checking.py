"""`ppbench check`: from names to the gate's ruling, its exit code and its summary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ppbench.cli_options import RESULTS
from ppbench.config.sweep import Sweep
from ppbench.config.track import read_fraction
from ppbench.errors import LaunchError, NotMeasuredError, UsageError
from ppbench.files import whole_file
from ppbench.format import Format
from ppbench.repository import Repository
from ppbench.stored import tell
from ppbench.tracking.accepted import Accepted, accept_file, in_force, read_accepted
from ppbench.tracking.comparing import measured, noise_folders, places_of, read, tell_aside
from ppbench.tracking.comparison import SHOWN, break_down, compare_sides, read_metrics
from ppbench.tracking.gate import GATED, Ruling, limits_of, rule
from ppbench.tracking.outcome import Outcome
from ppbench.tracking.sides import (
    SHORT,
    WORKTREE,
    Places,
    Side,
    both_fresh,
    find_side,
    revision_side,
)
from ppbench.tracking.summary import checked


@dataclass(frozen=True)
class Asked:
    """What `ppbench check` was asked."""

    sweep: Path | None = None
    base: str | None = None
    head: str = WORKTREE
    threshold: str | None = None
    metrics: Sequence[str] = ()
    launches: int | None = None  # None: measure nothing


def check(asked: Asked, results: Path, how: Format, summary: Path | None) -> Outcome:
    """The gate. Raises UsageError, NotMeasuredError, StoreError; with --run LaunchError."""
    threshold = _threshold(asked.threshold)
    gated = read_metrics(asked.metrics, GATED)
    base, head, sweep, places = _sides(asked, results)
    accepted, notes = _accepted(sweep, places, base, head)
    head = replace(head, notes=(*head.notes, *notes))
    limits = limits_of(sweep, threshold, accepted)
    limits = replace(limits, has_all=asked.sweep is not None)
    shown = read_metrics([*asked.metrics, *SHOWN])
    comparison = compare_sides(
        base, head, shown, noise_folders(results, base, head), limits.floor_of
    )
    ruling = rule(comparison, gated, limits)
    found = break_down(comparison, comparison.changed())
    command = _command(asked, ruling, sweep, results)
    tell_aside(comparison, how)
    if summary is not None:
        with whole_file(summary, "--summary") as file:
            file.write(f"{checked(ruling, found, Format.markdown, command)}\n".encode())
    return Outcome(checked(ruling, found, how, command), ruling.exit_code)


def _threshold(text: str | None) -> float | None:
    try:
        return None if text is None else read_fraction(_number(text))
    except ValueError as error:
        raise UsageError(f"--threshold {text}: {error}") from None


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _sides(asked: Asked, results: Path) -> tuple[Side, Side, Sweep | None, Places]:
    sweep = None if asked.sweep is None else read(asked.sweep)
    base_name, head_name, begun = asked.base, asked.head, datetime.now(UTC)
    if asked.launches is not None:
        names = (asked.base, asked.head)
        try:
            base_name, head_name = measured(names, asked.sweep, asked.launches, results)
        except LaunchError as error:  # it has rows, and is a failure like any other
            tell(f"warning: {error}")
    places = places_of(sweep, results)
    head = find_side(head_name, places)
    if sweep is None:
        sweep, notes = _sweep_of(head)
        head = replace(head, notes=(*head.notes, *notes))
        places = places if sweep is None else places_of(sweep, results)
    base = _base(base_name, head, places)
    if set(base.runs["run_id"]) & set(head.runs["run_id"]):
        raise UsageError(
            f"base ({base.title}) and head ({head.title}): are the same runs; name two"
        )
    if asked.launches is not None:
        base, head = both_fresh(base, head, begun)
    if asked.sweep is None:  # one that was found may have other cases by now
        return base, head, sweep, places
    return _of_sweep(base, sweep), _of_sweep(head, sweep), sweep, places


def _sweep_of(head: Side) -> tuple[Sweep | None, tuple[str, ...]]:
    """The sweep file that head's runs come from, or a note why there is none.

    Raises UsageError for one that is there and cannot be used: its thresholds must not be lost.
    """
    files = sorted(set((head.failed if head.runs.empty else head.runs)["sweep_file"].dropna()))
    if len(files) == 1 and Path(files[0]).exists():
        return read(Path(files[0])), ()
    if not files:
        return None, ()
    why = "it is not there" if len(files) == 1 else f"head's runs come from {len(files)}"
    lost = f"thresholds and accepted changes of {', '.join(files)} not used"
    return None, (f"no sweep file: {why}; {lost}; name one: ppbench check SWEEP",)


def _of_sweep(side: Side, sweep: Sweep | None) -> Side:
    return side if sweep is None else side.of_cases(case.case_id for case, _ in sweep.cases)


def _base(name: str | None, head: Side, places: Places) -> Side:
    """The named one, or the default, or what of its ancestors was measured last."""
    if name is not None:
        return find_side(name, places)
    if head.commit is None:
        raise UsageError(
            f"--base: is missing; {head.title} is not one commit, which would have one"
        )
    repository = places.repository()
    sha = repository.default_base(head.commit if head.is_clean else None)
    try:
        return revision_side(sha, sha, repository, places)
    except NotMeasuredError as error:
        nearest = _nearest(sha, head, repository, places)
        if nearest is None:
            raise NotMeasuredError(f"base {error}") from None
        side = revision_side(nearest, nearest, repository, places)
        note = (
            f"base would be {sha[:SHORT]}, which is not measured; {nearest[:SHORT]} is the nearest "
            "of its ancestors that is"
        )
        return replace(side, notes=(note, *side.notes))


def _nearest(sha: str, head: Side, repository: Repository, places: Places) -> str | None:
    """Of clean commits that measured what head has."""
    runs = places.store.runs(["case_id", "fingerprint", "commit", "status", "is_dirty"])
    is_like = runs["case_id"].isin(head.runs["case_id"])
    is_like &= runs["fingerprint"].isin(head.runs["fingerprint"])
    clean = runs[is_like & (runs["status"] == "ok") & ~runs["is_dirty"].eq(True)]
    order = repository.positions(clean["commit"].dropna().unique())
    newest_first = sorted(order, key=lambda one: -order[one])
    return next((one for one in newest_first if repository.is_ancestor(one, sha)), None)


def _accepted(
    sweep: Sweep | None, places: Places, base: Side, head: Side
) -> tuple[list[Accepted], list[str]]:
    """The entries that hold between base and head, and notes. Raises SweepFileError."""
    file = None if sweep is None else accept_file(sweep)
    if file is None:
        return [], []
    repository = places.repository()
    entries = read_accepted(file, repository)
    notes = [
        f"{file}: an entry is not in force: {one.problem}; delete it if its commit was squashed or "
        "rebased away, or name the new one"
        for one in entries
        if one.problem
    ]
    if base.commit is None or head.commit is None:
        return [], notes
    return in_force(entries, repository, base.commit, head.commit), notes


def _command(asked: Asked, ruling: Ruling, sweep: Sweep | None, results: Path) -> str:
    """What makes the same check again, of the same commits."""
    base, head = ruling.comparison.base, ruling.comparison.head
    words = ["ppbench", "check", *([] if sweep is None else [_near(sweep.file)])]
    words += ["--base", _lasting(base), "--head", _lasting(head)]
    if asked.threshold is not None:
        words += ["--threshold", asked.threshold]
    words += [word for name in asked.metrics for word in ("--metric", name)]
    words += [] if results == RESULTS else ["--results", str(results)]
    words += [] if asked.launches is None else ["--run", "--launches", str(asked.launches)]
    return shlex.join(words)


def _lasting(side: Side) -> str:
    """A name that means the same tomorrow, if there is one."""
    return side.commit[:12] if side.commit and side.is_clean else side.name


def _near(file: str) -> str:
    """As it would be typed here."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
