"""Measures commits for a sweep, each in a work tree of its own, by `ppbench sweep`.

    commit --git worktree--> files --([track] setup)--> ppbench sweep, in that folder --> store

Each commit has a process of its own, so that the controller and the ranks import the commit's code
and nothing of the caller's. The sweep is today's file for all commits. The number of launches grows
from call to call, so that those of two commits can be interleaved; finished launches are found in
the store, and nothing is started for them.

A commit that cannot even be started has a failure row, so that it is not tried again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import pandas as pd

from ppbench.commits.launches import Launches, StoredLaunches
from ppbench.commits.worktrees import Checkouts, SetupError, run
from ppbench.comparison.known import known_of
from ppbench.comparison.lines import Comparison, Stopped
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.repeats import is_lacking, most_repeats
from ppbench.comparison.sides import WORKTREE
from ppbench.config.case import setting_of
from ppbench.config.reader import read_sweep
from ppbench.config.schema import known_keys
from ppbench.config.sweep import Sweep, parse_only
from ppbench.console import note
from ppbench.display.units import counted
from ppbench.errors import (
    ExitCode,
    LaunchError,
    StoreError,
    SweepInterruptedError,
    UsageError,
    first_line,
)
from ppbench.git import Commit, Repository
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED
from ppbench.run.conductor import Conductor
from ppbench.run.failures.evidence import Diagnosis
from ppbench.run.job import Attempt, Job
from ppbench.run.launch import lifetime
from ppbench.run.machine.environment import default_device
from ppbench.run.machine.measuring_code import code_hash
from ppbench.run.records import write_failure
from ppbench.run.sweep.plan import EACH_COMMIT, check_devices, items_of, sweep_id_of
from ppbench.store import Store, check_writable, new_run_id

Result = TypeVar("Result")
_CODE = Path("ppbench") / "__init__.py"
"""In a repository with this file, each commit is measured by its own ppbench."""
_CHECKED_OUT = ("HEAD", "@", WORKTREE)
_PROGRAM = (
    "import os, runpy; os.environ[{each_commit!r}] = 'yes'; "
    "runpy.run_path({lifetime!r})['die_with_parent']({parent}); "
    "from ppbench.cli import main; main()"
)
"""The program of a commit's process. Only `ppbench.cli.main` is the commit's: it may lack or have
moved everything else."""


class Progress(Protocol):
    """Shows how far the measuring of commits has come."""

    def begin(self, what: str, num_left: int | None = None) -> None:
        """Show that a start is made, one of `num_left`; None if that is not known."""

    def end(self, outcome: str) -> None:
        """Show the outcome of the start."""

    def note(self, line: str) -> None:
        """Show a line that the sweep has printed."""

    def say(self, text: str) -> None:
        """Print a line."""


class _Silent:
    def begin(self, what: str, num_left: int | None = None) -> None: ...
    def end(self, outcome: str) -> None: ...
    def note(self, line: str) -> None: ...
    def say(self, text: str) -> None: ...


SILENT: Progress = _Silent()


@dataclass(frozen=True)
class Target:
    """A commit to measure, or the work tree with its uncommitted changes."""

    commit: Commit

    @property
    def name(self) -> str:
        return WORKTREE if self.commit.is_dirty else self.commit.commit

    @property
    def label(self) -> str:
        changed = " with uncommitted changes" if self.commit.is_dirty else ""
        return f"{self.commit.commit[:9]}{changed} {self.commit.subject}".strip()


def commit_values(commit: Commit) -> dict[str, object]:
    """The columns that identify a commit in a table."""
    return {name: getattr(commit, name) for name in ("author_date", "commit", "subject")}


def read_tracked(file: Path | str, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file for commits whose trees may have other files. Raises UsageError."""
    return read_sweep(Path(file), overrides, default_device(), is_of_this_tree=False)


class Bench:
    """Measures commits for one sweep into one store; its work trees are removed when it is left."""

    def __init__(
        self,
        sweep: Sweep,
        results: Path,
        progress: Progress,
        *,
        overrides: Sequence[str] = (),
        metrics: Sequence[str] = (SPEED,),
        retries_failed: bool = False,
        is_fresh: bool = False,
        after: str = "",
    ) -> None:
        """`overrides` are those that the sweep was read with.

        With `is_fresh` only launches count that were made just now, by the same code, and `after`
        this run. Raises UsageError for a sweep that cannot be used, RepositoryError without a
        repository.
        """
        check_devices(sweep)
        check_writable(results, "--results")
        self.sweep = dataclasses.replace(sweep, file=str(Path(sweep.file).resolve()))
        self.progress, self.results = progress, results
        self.repository = Repository.around(sweep.track.repo)
        self.num_starts = 0
        self._store = Store(results.resolve())
        self._overrides, self._metrics = tuple(overrides), tuple(metrics)
        self._only: tuple[str, ...] = ()
        self._is_fresh, self._after = is_fresh, after
        self._stored = self._look_up()
        self._retries_failed = retries_failed
        self._tried: dict[str, int] = {}  # target -> most launches that were asked for
        folder, setup = self._store.folder, sweep.track.setup
        self.checkouts = Checkouts(self.repository, folder, setup, progress.note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.checkouts.close()

    def _look_up(self) -> StoredLaunches:
        has_own_code = (self.repository.root / _CODE).is_file()
        code = None if has_own_code else code_hash()
        return StoredLaunches(
            self._store,
            self.sweep,
            self._metrics,
            is_fresh=self._is_fresh,
            code=code,
            after=self._after,
        )

    def select(self, only: Sequence[str]) -> None:
        """Reduce the sweep to the cases that match. Raises UsageError if none does."""
        cases = parse_only(only).select(self.sweep.cases)
        self.sweep = dataclasses.replace(self.sweep, cases=cases)
        self._only = tuple(only)
        self._stored = self._look_up()

    def conditions_of_case(self, place: int) -> list[str]:
        """The conditions that only this case meets, as `--only` takes them."""
        keys = [key for key in known_keys() if key.replace(".", "_") in self.sweep.axes]
        values = {key: setting_of(*self.sweep.cases[place], key) for key in keys}
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in values.items()
        ]

    def target(self, name: str) -> Target:
        """The commit of a revision, branch or tag; `WORKTREE` is the tree as it is."""
        if name == WORKTREE:
            return Target(self.repository.state())
        return Target(self.repository.describe(self.repository.resolve(name)))

    def launches(self, targets: Sequence[Target]) -> list[Launches]:
        """The stored launches of each target."""
        return self._stored.of_all([target.commit for target in targets])

    def lacking(self, targets: Sequence[Target], num_launches: int) -> list[Target]:
        """The targets of which any case has fewer launches than this and can have more."""
        return [
            target
            for target, launches in zip(targets, self.launches(targets), strict=True)
            if self._missing(target, launches, num_launches)
        ]

    def measure(self, target: Target, num_launches: int, num_left: int | None = None) -> Launches:
        """Measure until every case has so many launches, or a row that says why not.

        A case that failed for a reason of its own is not tried again. At most `num_left` starts
        remain, this one included. Blocks; raises KeyboardInterrupt when the sweep was interrupted,
        and RepositoryError where git fails: that is not the commit's fault, and has no row.
        """
        stored = self._stored.of(target.commit)
        missing = self._missing(target, stored, num_launches)
        if not missing:
            return stored
        self.progress.begin(f"{target.label}, {counted(num_launches, 'launch')}", num_left)
        (error,) = self._start({0: target}, {0: num_launches - 1}).values()
        after, outcome = self._made(target, stored, num_launches, missing, error)
        self.progress.end(outcome)
        self._tried[target.name] = num_launches
        return after

    def measure_together(self, targets: Sequence[Target], num_launches: int) -> list[Launches]:
        """Launch once more, in turns, targets with fewer fresh launches; return those of each.

        Each commit has its own processes, and one set works at a time. They get the next free
        number of a launch. Where cases have unequal numbers of older launches, some are launched
        more than once.
        """
        stored = self.launches(targets)
        lacking: dict[int, list[int]] = {}  # the places of cases, by the place of their target
        for at, launches in enumerate(stored):
            lacking[at] = [
                place
                for place in range(len(self.sweep.cases))
                if is_lacking(launches.disturbed(place), num_launches)
                and not launches.does_not_run(place)
            ]
        chosen = [at for at, places in lacking.items() if places]
        if not chosen:
            return stored
        numbers = {at: self._stored.next_launch(targets[at].commit) for at in chosen}
        labels = " and ".join(targets[at].label for at in chosen)
        self.progress.begin(f"{labels}, {counted(num_launches, 'launch')}")
        errors = self._start({at: targets[at] for at in chosen}, numbers)
        outcomes = []
        for at in chosen:
            missing = [(place, numbers[at]) for place in lacking[at]]
            made = numbers[at] + 1
            stored[at], text = self._made(targets[at], stored[at], made, missing, errors[at])
            outcomes.append(text)
        self.progress.end("; ".join(outcomes))
        return stored

    def _made(
        self,
        target: Target,
        stored: Launches,
        num_launches: int,
        missing: list[tuple[int, int]],
        error: str | None,
    ) -> tuple[Launches, str]:
        """Return the launches there are after a start, and its outcome in words.

        `missing` is what was expected of it, `error` why it ended early.
        """
        self.num_starts += 1
        after = self._stored.of(target.commit)
        if error is not None and after.run_ids <= stored.run_ids:
            # A failure row for each launch that should have had a row.
            cases = tuple(
                (case, dataclasses.replace(measure, launches=num_launches))
                for case, measure in self.sweep.cases
            )
            sweep = dataclasses.replace(self.sweep, cases=cases)
            items = items_of(sweep, target.commit)
            named = (sweep_id_of(sweep, items, target.commit), sweep.name, sweep.file)
            job = Job(new_run_id(), str(self._store.folder), *named, target.commit, items)
            judgement = Diagnosis("error", error, None, [], None, 0, pd.DataFrame())
            for place, launch in missing:
                index = launch * len(cases) + place  # items are in this order
                write_failure(job, items[index], Attempt(index, new_run_id(), 1), judgement)
            after = self._stored.of(target.commit)
        num_cases = len(self.sweep.cases)
        failures = [row for place in range(num_cases) if (row := after.failure(place))]
        if failures:
            more = f" ({len(failures)} of {num_cases} cases)" if num_cases > 1 else ""
            return after, f"{failures[0].status}{more}: {first_line(failures[0].error)}"
        if num_cases > 1:
            return after, f"ok, {num_cases} cases"
        figures = ", ".join(f"{speed:,.0f}" for speed in after.figures(0, SPEED))
        return after, f"ok, {figures} tokens/s"

    def _missing(
        self, target: Target, stored: Launches, num_launches: int
    ) -> list[tuple[int, int]]:
        """The first launch that each case lacks: (place of the case, launch)."""
        tried = self._tried.get(target.name, 0)  # launches that this process has asked for
        firsts = []
        for place in range(len(self.sweep.cases)) if tried < num_launches else ():
            if stored.does_not_run(place) and (tried or not self._retries_failed):
                continue
            for launch in range(num_launches):
                retries = self._retries_failed and launch >= tried
                if stored.is_missing(place, launch, retries_failed=retries):
                    firsts.append((place, launch))
                    break
        return firsts

    def _start(
        self, targets: Mapping[int, Target], numbers: Mapping[int, int]
    ) -> dict[int, str | None]:
        """Run the sweep on targets at the same time, up to the launch with this number of each.

        Several take turns. Returns the error of each, or None; where one cannot be set up, none
        is started.
        """
        errors: dict[int, str | None] = {}
        trees: dict[int, Path] = {}
        for at, target in targets.items():  # git's own failures are not the commit's
            try:
                trees[at] = (
                    self.repository.root
                    if target.commit.is_dirty
                    else self.checkouts.of(target.commit.commit)
                )
            except SetupError as error:  # the others are not measured in vain
                return {**dict.fromkeys(targets), at: str(error)}
        here, root = Path.cwd().resolve(), self.repository.root.resolve()
        places = list(trees)
        with Conductor(new_run_id(), len(trees)) as conductor:  # a single one asks for no turn
            starts = []
            for number, (at, tree) in enumerate(trees.items()):
                folder = tree / (here.relative_to(root) if here.is_relative_to(root) else Path())
                settings = [
                    *self._overrides,
                    f"measure.launches={numbers[at] + 1}",
                    f"track.repo={json.dumps(str(tree), ensure_ascii=False)}",
                ]
                words = [word for setting in settings for word in ("--set", setting)]
                words += [word for condition in self._only for word in ("--only", condition)]
                words += ["--no-report", "--results", str(self._store.folder)]
                words += ["--retry-failed"] * self._retries_failed
                program = _PROGRAM.format(
                    each_commit=EACH_COMMIT, lifetime=lifetime.__file__, parent=os.getpid()
                )
                command = [sys.executable, "-c", program, "sweep", self.sweep.file, *words]
                turns = conductor.variables(number) if len(trees) > 1 else {}
                inside = folder if folder.is_dir() else tree
                starts.append(self.checkouts.start(command, tree, inside, turns))
            ends = run(starts, self.progress.note, conductor.leave_out)
        for at, ended in zip(places, ends, strict=True):
            errors[at] = None
            if ended.exit_code == ExitCode.interrupted:
                raise KeyboardInterrupt
            if ended.exit_code != 0:
                text, store = ended.error_text(), str(self._store.folder)
                line = first_line(text)
                if line.startswith(store) and not line.startswith(f"{store}/worktrees"):
                    raise StoreError(text)  # not the commit's fault
                errors[at] = text
        return errors


@dataclass
class Rounds:
    """Two commits that are launched together and take turns."""

    bench: Bench
    base: Target
    head: Target
    num_done: int = 0
    """Launches that each side has, if its cases run."""

    @property
    def names(self) -> tuple[str, str]:
        """The full hashes, or `WORKTREE` for a head with uncommitted changes."""
        return self.base.name, self.head.name

    def bring_to(self, num_launches: int) -> float:
        """Launch both sides until each has so many launches; return the rounds that it took.

        Raises LaunchError if no case of a side runs.
        """
        starts = self.bench.num_starts
        for count in range(self.num_done + 1, num_launches + 1):
            sides, places = (self.base, self.head), range(len(self.bench.sweep.cases))
            stored = self.bench.measure_together(sides, count)
            for _ in range(most_repeats(count)):  # disturbed launches are made again
                slowed = [own.disturbed(place) for own in stored for place in places]
                if not any(any(one) and is_lacking(one, count) for one in slowed):
                    break
                self.bench.progress.say("  the machine was disturbed: launched once more")
                stored = self.bench.measure_together(sides, count)
            for side, own in zip(sides, stored, strict=True):
                failures = [own.failure(place) for place in places]
                if count == 1 and all(failures) and failures[0] is not None:
                    why = f"{failures[0].status}: {first_line(failures[0].error)}"
                    raise LaunchError(f"{side.label}: does not run: {why}")
            self.num_done = count
        return (self.bench.num_starts - starts) / 2

    def until_decided(
        self,
        most_launches: int,
        judged: Callable[[Looks], Result],
        compared_of: Callable[[Result], Comparison],
        metrics: Collection[str],
    ) -> tuple[Result, Stopped]:
        """Launch both sides until the verdicts of these metrics are decided. Raises UsageError."""
        known = known_of(self.bench.sweep, self.bench.results, num_sides=2)
        say = self.bench.progress.say
        return measure_until_decided(
            most_launches, self.bring_to, judged, compared_of, metrics, known, say
        )


@contextmanager
def rounds_of(
    sweep: Sweep | None,
    base: str | None,
    head: str,
    results: Path,
    progress: Progress = SILENT,
    after: str = "",
) -> Iterator[Rounds]:
    """Two commits to be measured in turns; their work trees are removed at the end.

    Older launches do not count: between sessions a machine drifts by more than launches differ, and
    that would fall on one side. Launches of the last hour do count, so that a measurement that was
    stopped goes on, but only those `after` this run.

    A head with uncommitted changes is measured in place. Without a base it is the repository's
    default. Raises PpbenchError.
    """
    if sweep is None:
        raise UsageError("--run: needs SWEEP, the sweep file to be measured")
    with Bench(sweep, results, progress, is_fresh=True, after=after) as bench:
        repository = bench.repository
        base = base or repository.default_base(None if head == WORKTREE else head)
        first = bench.target(base)
        last = bench.target(WORKTREE if head in _CHECKED_OUT else head)
        if first.name == last.name:
            raise UsageError(
                f"{first.label}: is both sides, with no uncommitted changes; name two commits"
            )
        if last.commit.is_dirty:
            note(f"{repository.root}: has uncommitted changes; measured as it is, in place")
        for side, launches in zip((first, last), bench.launches((first, last)), strict=True):
            nums = [launches.num_done(place) for place in range(len(bench.sweep.cases))]
            if any(nums):
                count = " to ".join(map(str, dict.fromkeys((min(nums), max(nums)))))
                word = "launch" if count == "1" else "launches"
                note(
                    f"{side.label}: takes {count} {word} of the last hour, and makes only what is "
                    "missing; to make all anew, name another store: --results DIR"
                )
        rounds = Rounds(bench, first, last)
        try:
            yield rounds
        except KeyboardInterrupt:
            done = counted(rounds.num_done, "launch")
            raise SweepInterruptedError(
                f"interrupted after {done} of each side; what is finished is kept"
            ) from None
