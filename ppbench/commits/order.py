"""Orders the commits that were measured as a repository has them, or by their author dates."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ppbench.config.reader import read_sweep
from ppbench.display.units import counted
from ppbench.errors import PpbenchError, RepositoryError
from ppbench.git import Repository
from ppbench.statistics.series import Point

_MOST_FOLDERS = 8  # of sweep files that are asked which repository they track


@dataclass(frozen=True)
class Order:
    """The order of the commits."""

    places: Mapping[str, int]  # of the commits that the repository has
    line: str
    on_line: Mapping[str, int]  # places on the first-parent line of HEAD
    repository: Repository | None


def order_of(runs: pd.DataFrame, repo: Path | None, notes: list[str], *, has_all: bool) -> Order:
    """Order the commits of runs by the repository that knows them, or by their author dates."""
    commits = list(map(str, runs["commit"].unique()))
    for repository in _repositories(runs, repo):
        places = repository.positions(commits)
        if not places and repo is None:
            continue
        on_line = {sha: n for n, sha in enumerate(repository.line("HEAD"))}
        state = repository.state()
        name = state.branch or f"{state.commit[:9]} (no branch is checked out)"
        if repository.is_shallow() or has_all:
            _note_unknown(len(commits) - len(places), repository, notes)
        num_off = len(places.keys() - on_line.keys()) if has_all else 0
        if num_off:
            notes.append(
                f"{counted(num_off, 'commit')} of other branches: shown among those of {name}; "
                "a change may be no more than what one branch has and the other lacks"
            )
        words = "all commits" if has_all else f"first-parent line of {name}"
        return Order(places, words, on_line, repository)
    notes.append(
        "no git repository here knows these commits, so they are ordered by author date, and "
        "unmeasured commits are unknown; name the repository with --repo"
    )
    return Order({}, "by author date", {}, None)


def _repositories(runs: pd.DataFrame, repo: Path | None) -> Iterator[Repository]:
    """Yield the named repository, or the one around here and those that the sweeps track."""
    if repo is not None:
        yield Repository.around(repo)
        return
    files = map(Path, reversed(runs["sweep_file"].dropna().unique()))
    for folder in itertools.chain([Path.cwd()], itertools.islice(_tracked(files), _MOST_FOLDERS)):
        with contextlib.suppress(RepositoryError):
            repository = Repository.around(folder)
            repository.resolve("HEAD")
            yield repository


def _tracked(files: Iterable[Path]) -> Iterator[Path]:
    for file in files:
        with contextlib.suppress(PpbenchError):
            yield read_sweep(file, (), "cpu").track.repo


def _note_unknown(num: int, repository: Repository, notes: list[str]) -> None:
    if not num:
        return
    why = "the clone is shallow: git fetch --unshallow" if repository.is_shallow() else "rebased?"
    notes.append(
        f"{counted(num, 'commit')} not in {repository.root} ({why}): placed by author date, open "
        "in the chart"
    )


def runs_on_line(runs: pd.DataFrame, order: Order, notes: list[str]) -> pd.DataFrame:
    """Keep the runs of commits on the line; unknown commits are kept only in a shallow clone."""
    if order.repository is None:
        return runs
    is_off = runs["commit"].isin(set(order.places) - set(order.on_line))
    known = exclude(
        runs, is_off, f"of {_commits(runs[is_off])} off the {order.line}", notes, "--all"
    )
    if order.repository.is_shallow():
        return known
    is_unknown = ~known["commit"].isin(set(order.places))
    place = f"not in {order.repository.root} (rebased away, or another project's)"
    return exclude(known, is_unknown, f"of {_commits(known[is_unknown])} {place}", notes, "--all")


def exclude(
    runs: pd.DataFrame, is_excluded: pd.Series, reason: str, notes: list[str], option: str = ""
) -> pd.DataFrame:
    """Drop runs, and note how many and why; `option` is the one that shows them."""
    if num := int(is_excluded.sum()):
        hint = f"; {option} shows them" if option else ""
        notes.append(f"{counted(num, 'run')} {reason}: excluded{hint}")
    return runs[~is_excluded]


def _commits(runs: pd.DataFrame) -> str:
    return counted(runs["commit"].nunique(), "commit")


def ordered(
    points: Sequence[Point], moments: Mapping[str, float], order: Order
) -> tuple[Point, ...]:
    """Sort the points: known commits by their place, the others by date between them."""
    known = sorted(
        (point for point in points if point.commit in order.places),
        key=lambda point: order.places[point.commit],
    )
    # Dates need not rise along the line: an amended commit keeps its old one.
    reached = list(itertools.accumulate((moments[point.commit] for point in known), max))
    others = sorted(
        (point for point in points if point.commit not in order.places),
        key=lambda point: (moments[point.commit], point.commit),
    )
    merged = list(known)
    for point in reversed(others):
        merged.insert(bisect.bisect_right(reached, moments[point.commit]), point)
    return tuple(merged)


def with_gaps(points: Sequence[Point], order: Order) -> tuple[Point, ...]:
    """Count, for each point, the unmeasured commits of the line since the point before it."""
    last: int | None = None
    numbered = []
    for point in points:
        place = order.on_line.get(point.commit)
        num = 0 if place is None or last is None else place - last - 1
        numbered.append(replace(point, num_before=num))
        last = last if place is None else place
    return tuple(numbered)


def num_behind(points: Sequence[Point], order: Order) -> int:
    """The number of commits on the line after the last measured one."""
    places = [order.on_line[point.commit] for point in points if point.commit in order.on_line]
    return len(order.on_line) - 1 - max(places) if places else 0
