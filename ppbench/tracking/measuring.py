"""Commits measured for a sweep, each in a work tree of its own, by `ppbench sweep`.

    commit --git worktree--> files --([track] setup)--> ppbench sweep, in that folder --> store

A process of its own for each: the commit's code is what is imported, by the controller as by the
ranks, and nothing of the caller's. The sweep is the file as it stands today, for all commits alike.
How many launches there are to be grows from call to call, so that those of two commits can be
interleaved; finished ones are found in the store, and nothing is started for them.

What cannot even be started has a row all the same: then it is known, and is not tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.analysis.compare import SPEED
from ppbench.config.case import setting_of
from ppbench.config.schema import known_keys
from ppbench.config.selection import parse_only
from ppbench.config.sweep import Sweep
from ppbench.config.sweep_file import read_sweep
from ppbench.errors import LaunchError, StoreError, UsageError, first_line
from ppbench.repository import Commit, Repository
from ppbench.run.environment import code_hash, default_device
from ppbench.run.evidence import Judgement
from ppbench.run.job import Begun, Job
from ppbench.run.rows import write_failure
from ppbench.run.sweep import check_devices, items_of, sweep_id_of
from ppbench.store import check_writable, new_run_id
from ppbench.stored import open_store, tell
from ppbench.tracking.checkouts import Checkouts, SetupError
from ppbench.tracking.launches import Launches, Stored
from ppbench.tracking.progress import Progress
from ppbench.tracking.sides import WORKTREE

_CODE = Path("ppbench") / "run" / "environment.py"
"""In a repository with it, each commit measures by its own code."""
_INTERRUPTED = 130
_CHECKED_OUT = ("", "HEAD", "@", WORKTREE)
_PROGRAM = (
    "from ppbench.run.lifetime import die_with_parent; die_with_parent({parent}); "
    "from ppbench.cli import main; main()"
)


@dataclass(frozen=True)
class Target:
    """What is measured: a commit, or what is checked out with its uncommitted changes."""

    commit: Commit

    @property
    def name(self) -> str:
        return WORKTREE if self.commit.is_dirty else self.commit.commit

    @property
    def label(self) -> str:
        """As people call it."""
        changed = " with uncommitted changes" if self.commit.is_dirty else ""
        return f"{self.commit.commit[:9]}{changed} {self.commit.subject}".strip()


class Bench:
    """Measures commits for one sweep into one store. To be had from `opened`."""

    def __init__(
        self,
        sweep: Sweep,
        overrides: Sequence[str],
        results: Path,
        progress: Progress,
        *,
        metrics: Sequence[str],
        retries_failed: bool,
        is_fresh: bool,
    ) -> None:
        self.sweep, self.progress = sweep, progress
        self.repository = Repository.around(sweep.track.repo)
        self.num_starts = 0
        self._store = open_store(results.resolve())
        self._overrides, self._metrics = tuple(overrides), tuple(metrics)
        self._only: tuple[str, ...] = ()
        self._is_fresh = is_fresh
        self._stored = self._look_up()
        self._retries_failed = retries_failed
        self._tried: dict[str, int] = {}  # target -> most launches that were asked for
        folder, setup = self._store.folder, sweep.track.setup
        self.checkouts = Checkouts(self.repository, folder, setup, progress.note)

    def _look_up(self) -> Stored:
        has_own_code = (self.repository.root / _CODE).is_file()
        code = None if has_own_code else code_hash()
        return Stored(self._store, self.sweep, self._metrics, is_fresh=self._is_fresh, code=code)

    def select(self, only: Sequence[str]) -> None:
        """From now on the sweep is its cases that match. Raises UsageError if none does."""
        cases = parse_only(only).select(self.sweep.cases)
        self.sweep = dataclasses.replace(self.sweep, cases=cases)
        self._only = tuple(only)
        self._stored = self._look_up()

    def select_case(self, place: int) -> None:
        """From now on the sweep is this one case."""
        self.select(self.words_of_case(place))

    def words_of_case(self, place: int) -> list[str]:
        """What tells a case from the others, as `--only` takes it."""
        keys = [key for key in known_keys() if key.replace(".", "_") in self.sweep.axes]
        values = {key: setting_of(*self.sweep.cases[place], key) for key in keys}
        return [f"{key}={_as_toml(value)}" for key, value in values.items()]

    def target(self, name: str) -> Target:
        """The commit of a revision, branch or tag; `WORKTREE` is what is checked out."""
        if name == WORKTREE:
            return Target(self.repository.state())
        return Target(self.repository.describe(self.repository.resolve(name)))

    def launches(self, targets: Sequence[Target]) -> list[Launches]:
        """What the store has of each."""
        return self._stored.of_all([one.commit for one in targets])

    def is_missing(self, target: Target, found: Launches, num_launches: int) -> bool:
        """Whether something is to be started to have so many launches of every case."""
        return bool(self._missing(target, found, num_launches))

    def measure(self, target: Target, num_launches: int, num_left: int | None = None) -> Launches:
        """See to it that every case has so many launches, or a row that says why not.

        What has failed by its own fault is not tried again. `num_left` starts are to be made
        at most, with this one. Blocks; raises KeyboardInterrupt when the sweep was interrupted,
        RepositoryError where git fails: that is no fault of the commit's, and has no row.
        """
        found = self._stored.of(target.commit)
        if not self._missing(target, found, num_launches):
            return found
        self.progress.begin(f"{target.label}, {_times(num_launches)}", num_left)
        missing = self._missing(target, found, num_launches)
        after = self._made(target, found, num_launches, missing)
        self._tried[target.name] = num_launches
        self.progress.end(self._outcome(after))
        return after

    def measure_afresh(self, target: Target, num_launches: int) -> Launches:
        """One launch more of what has not so many fresh ones; what is older has lower numbers.

        Of cases with unlike many older launches some get more than one.
        """
        found = self._stored.of(target.commit)
        places = [
            place
            for place in range(len(self.sweep.cases))
            if found.num_done(place) < num_launches and not found.does_not_run(place)
        ]
        if not places:
            return found
        self.progress.begin(f"{target.label}, {_times(num_launches)}")
        number = self._stored.next_launch(target.commit)
        after = self._made(target, found, number + 1, [(place, number) for place in places])
        self.progress.end(self._outcome(after))
        return after

    def _made(
        self, target: Target, found: Launches, num_launches: int, missing: list[tuple[int, int]]
    ) -> Launches:
        """What there is after a start, by which those that are missing were to be made."""
        self.num_starts += 1
        error = self._start(target, num_launches)
        after = self._stored.of(target.commit)
        if error is None or not after.run_ids <= found.run_ids:
            return after
        self._write_failures(target, missing, num_launches, error)
        return self._stored.of(target.commit)

    def _missing(self, target: Target, found: Launches, num_launches: int) -> list[tuple[int, int]]:
        """The first launch that each case lacks: (place of the case, launch)."""
        tried = self._tried.get(target.name, 0)
        lacks = (
            next((n for n in range(num_launches) if self._lacks(found, place, n, tried)), None)
            for place in range(len(self.sweep.cases))
        )
        firsts = [(place, n) for place, n in enumerate(lacks) if n is not None]
        return [] if tried >= num_launches else firsts

    def _lacks(self, found: Launches, place: int, launch: int, tried: int) -> bool:
        """Whether a launch of a case is to be made; `tried` were asked for by this process."""
        if found.does_not_run(place) and (tried or not self._retries_failed):
            return False
        retries = self._retries_failed and launch >= tried
        return found.is_missing(place, launch, retries_failed=retries)

    def _start(self, target: Target, num_launches: int) -> str | None:
        """Run the sweep on a target; what went wrong, None if nothing did."""
        try:
            tree = self._tree_of(target)  # git's own failures are not the commit's
        except SetupError as error:
            return str(error)
        folder = tree / _place_in(self.repository.root)
        command = self._command(tree, num_launches)
        ended = self.checkouts.run(command, tree, folder if folder.is_dir() else tree)
        if ended.exit_code == _INTERRUPTED:
            raise KeyboardInterrupt
        if ended.exit_code == 0:
            return None
        account = ended.account()
        if self._is_of_store(account):  # no fault of the commit's
            raise StoreError(account)
        return account

    def _is_of_store(self, account: str) -> bool:
        line, folder = first_line(account), str(self._store.folder)
        return line.startswith(folder) and not line.startswith(f"{folder}/worktrees")

    def _tree_of(self, target: Target) -> Path:
        if target.commit.is_dirty:
            return self.repository.root
        return self.checkouts.of(target.commit.commit)

    def _command(self, tree: Path, num_launches: int) -> list[str]:
        settings = [
            *self._overrides,
            f"measure.launches={num_launches}",
            f"track.repo={json.dumps(str(tree), ensure_ascii=False)}",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        program = _PROGRAM.format(parent=os.getpid())
        words += [word for one in self._only for word in ("--only", one)]
        options = [*words, "--no-report", "--results", str(self._store.folder)]
        retry = ["--retry-failed"] * self._retries_failed
        return [sys.executable, "-c", program, "sweep", self.sweep.file, *options, *retry]

    def _write_failures(
        self, target: Target, missing: list[tuple[int, int]], num_launches: int, error: str
    ) -> None:
        """A row for each case that should have had one."""
        cases = tuple(
            (case, dataclasses.replace(measure, launches=num_launches))
            for case, measure in self.sweep.cases
        )
        sweep = dataclasses.replace(self.sweep, cases=cases)
        items = items_of(sweep, target.commit)
        named = (sweep_id_of(sweep, items), sweep.name, sweep.file)
        job = Job(new_run_id(), str(self._store.folder), *named, target.commit, items)
        judgement = Judgement("error", error, None, [], None, 0, pd.DataFrame())
        for place, launch in missing:
            index = launch * len(cases) + place  # items are in this order
            write_failure(job, items[index], Begun(index, new_run_id(), 1), judgement)

    def _outcome(self, found: Launches) -> str:
        """In words: the figure of the one case, or how many cases are ok; else why not."""
        num_cases = len(self.sweep.cases)
        failures = [one for place in range(num_cases) if (one := found.failure(place))]
        if failures:
            more = f" ({len(failures)} of {num_cases} cases)" if num_cases > 1 else ""
            return f"{failures[0].status}{more}: {first_line(failures[0].error)}"
        figures = ", ".join(f"{one:,.0f}" for one in found.figures(0, SPEED))
        return f"ok, {num_cases} cases" if num_cases > 1 else f"ok, {figures} tokens/s"


def _as_toml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _times(num_launches: int) -> str:
    return "1 launch" if num_launches == 1 else f"{num_launches} launches"


def _place_in(root: Path) -> Path:
    """The folder that we are in, relative to the repository; its root if we are outside."""
    here = Path.cwd().resolve()
    return here.relative_to(root.resolve()) if here.is_relative_to(root.resolve()) else Path()


@contextlib.contextmanager
def opened(
    file: Path,
    overrides: Sequence[str],
    results: Path,
    *,
    metrics: Sequence[str] = (SPEED,),
    retries_failed: bool = False,
    is_fresh: bool = False,
) -> Iterator[Bench]:
    """A bench for a sweep file; its work trees are removed when it is left.

    With `is_fresh` only launches count that were made just now, by the same code.
    Raises UsageError for a sweep that cannot be used, RepositoryError where no repository is.
    """
    read = read_sweep(file, overrides, default_device(), is_of_this_tree=False)
    check_devices(read)
    check_writable(results, "--results")
    sweep = dataclasses.replace(read, file=str(file.resolve()))
    with Progress() as progress:
        bench = Bench(
            sweep,
            overrides,
            results,
            progress,
            metrics=metrics,
            retries_failed=retries_failed,
            is_fresh=is_fresh,
        )
        try:
            yield bench
        finally:
            bench.checkouts.close()


def measure_sides(
    sweep_file: Path,
    overrides: Sequence[str],
    base: str,
    head: str,
    launches: int,
    results: Path,
) -> tuple[str, str]:
    """Measure two commits in interleaved launches, so many of each; what they are called.

    Older launches do not count: between sessions a machine drifts by more than launches differ, and
    one side would have it alone. What was made within the last hour does, so that one that was
    stopped goes on.

    Full hashes; head is `WORKTREE` where it is what is checked out and that has uncommitted
    changes, which is then measured where it lies. An empty base is the repository's default, an
    empty head what is checked out. Raises PpbenchError.
    """
    with opened(sweep_file, overrides, results, is_fresh=True) as bench:
        repository = bench.repository
        last = bench.target(WORKTREE if head in _CHECKED_OUT else head)
        first = bench.target(base or repository.default_base())
        _check_sides(first, last)
        if last.commit.is_dirty:
            tell(f"{repository.root}: has uncommitted changes; measured as it is, in place")
        for count in range(1, launches + 1):
            # A B, B A, A B, ...: what drifts meanwhile favours neither.
            for side in (first, last) if count % 2 else (last, first):
                found = bench.measure_afresh(side, count)
                if count == 1:
                    _check_runs(bench, side, found)
    return first.name, last.name


def _check_sides(first: Target, last: Target) -> None:
    if first.name == last.name:
        raise UsageError(
            f"{first.label}: is both sides, with no uncommitted changes; name two commits"
        )


def _check_runs(bench: Bench, side: Target, found: Launches) -> None:
    """Raises LaunchError for a side of which no case runs: there is nothing to compare."""
    failures = [found.failure(place) for place in range(len(bench.sweep.cases))]
    if all(failures) and failures[0] is not None:
        told = f"{failures[0].status}: {first_line(failures[0].error)}"
        raise LaunchError(f"{side.label}: does not run: {told}")
