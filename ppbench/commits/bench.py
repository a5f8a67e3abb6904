"""Measures commits for a sweep, each in a work tree of its own, by `ppbench sweep`.

    commit --git worktree--> files --([track] setup)--> ppbench sweep, in that folder --> store

Each commit has a process of its own, so that the controller and the ranks import the commit's code
and nothing of the caller's. The sweep is today's file for all commits. A policy says which commits
have a part in the next launch, in which they take turns; finished launches are found in the store,
and nothing is started for them.

Launches are found by what they measured, not by the key with which sweeps resume: that includes
files of the tree and the code that measures, which differ between the commits that are compared. A
commit that cannot even be started has a failure row, so that it is not tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pandas as pd

from ppbench.commits.launches import Launches
from ppbench.commits.worktrees import Checkouts, SetupError, run, start_in
from ppbench.comparison.launches import (
    COLUMNS,
    FINAL,
    fresh,
    key_of,
    key_text,
    keys_of,
    newest_launches,
)
from ppbench.comparison.measurement import Budget
from ppbench.comparison.sides import WORKTREE
from ppbench.config.conditions import conditions_of, parse_only
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep, note_unmet
from ppbench.console import note
from ppbench.display.units import counted, duration
from ppbench.errors import (
    ExitCode,
    LaunchError,
    RepositoryError,
    StoreError,
    SweepInterruptedError,
    UsageError,
    first_line,
)
from ppbench.git import Commit, Repository, read_commit
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

AT_ONCE = 2
"""Launches that two commits make in one start: a start imports, which takes as long as some."""
_CODE = Path("ppbench") / "__init__.py"
"""In a repository with this file, each commit is measured by its own ppbench."""
Policy = Callable[[list[Launches]], "Part"]
"""Says from the launches so far which targets have a part in the next launch."""
_CHECKED_OUT = ("HEAD", "@", WORKTREE)
_PROGRAM = (
    "import os, runpy; os.environ[{each_commit!r}] = 'yes'; "
    "runpy.run_path({lifetime!r})['die_with_parent']({parent}); "
    "from ppbench.cli import main; main()"
)
"""The program of a commit's process. Only `ppbench.cli.main` is the commit's: it may lack or have
moved everything else."""


class Progress:
    """Shows how far the measuring of commits has come; this one shows nothing."""

    def begin(self, what: str, num_left: int | None = None) -> None:
        """Show that a start is made, one of `num_left`; None if that is not known."""

    def end(self, outcome: str) -> None:
        """Show the outcome of the start."""

    def note(self, line: str) -> None:
        """Show a line that the sweep has printed."""

    def say(self, text: str) -> None:
        """Print a line."""


SILENT = Progress()


@dataclass(frozen=True)
class Target:
    """A commit to measure, or the tree as it is, which is measured in place."""

    commit: Commit
    is_in_place: bool = False

    @property
    def name(self) -> str:
        return WORKTREE if self.is_in_place else self.commit.commit

    @property
    def label(self) -> str:
        changed = " with uncommitted changes" if self.commit.is_dirty else ""
        subject = self.commit.subject or ""
        return f"{self.commit.commit[:9]}{changed} {subject}".strip() or "the tree as it is"


@dataclass(frozen=True)
class Part:
    """The targets, by their places, that have a part in the next start; without any it ends.

    A place that stands twice has two sets of processes.
    """

    places: Sequence[int] = ()
    num_left: int | None = None  # starts, this one included; None if that is not known
    num_launches: int = 1  # that each of them makes in one start


def commit_values(commit: Commit) -> dict[str, object]:
    """The columns that identify a commit in a table."""
    return {name: getattr(commit, name) for name in ("author_date", "commit", "subject")}


def read_tracked(file: Path | str, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file for commits whose trees may have other files. Raises UsageError."""
    read = read_sweep(Path(file), overrides, default_device(), is_of_this_tree=False)
    note_unmet(read)
    return read


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
        budget_s: float = 0.0,
    ) -> None:
        """`overrides` are those that the sweep was read with.

        With `is_fresh` only launches count that were made just now, by the same code, and `after`
        this run. With `retries_failed` the failures of earlier commands do not count. Raises
        UsageError for a sweep that cannot be used.
        """
        check_devices(sweep)
        check_writable(results, "--results")
        self.sweep = dataclasses.replace(sweep, file=str(Path(sweep.file).resolve()))
        self.progress = progress
        self.budget = Budget(budget_s)
        self.rounds_budget_s = budget_s
        """The budget by which launches have more rounds than planned; 0 for as many as planned."""
        self._num_starts, self._start_s = 0, 0.0  # how many were made; how long the last one took
        self.starts: Counter[str] = Counter()  # that this process has made, by target
        self._store = Store(results.resolve())
        self._overrides, self._only = tuple(overrides), tuple[str, ...]()
        self._retries_failed, self._is_fresh, self._after = retries_failed, is_fresh, after
        self._fails_after = new_run_id() if retries_failed else ""
        self._begun = datetime.now(UTC)  # later launches stay fresh, however long measuring takes
        columns = [*COLUMNS, "process_start", "rounds", *metrics]
        self._columns = list(dict.fromkeys(columns))
        self._root = sweep.track.repo.resolve()
        with contextlib.suppress(RepositoryError):  # a tree in place may be in none
            self._root = self.repository.root.resolve()
        # In a repository with its own ppbench, each commit is measured by its own code.
        self._code = None if (self._root / _CODE).is_file() else code_hash()
        self._stack = contextlib.ExitStack()

    @functools.cached_property
    def repository(self) -> Repository:
        """Raises RepositoryError where there is none."""
        return Repository.around(self.sweep.track.repo)

    @functools.cached_property
    def _checkouts(self) -> Checkouts:
        folder, setup = self._store.folder, self.sweep.track.setup
        checkouts = Checkouts(self.repository, folder, setup, self.progress.note)
        self._stack.callback(checkouts.close)
        return checkouts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._stack.close()
        if isinstance(error, KeyboardInterrupt):
            starts = counted(self._num_starts, "start")
            raise SweepInterruptedError(
                f"interrupted after {starts}; what is finished is kept"
            ) from None

    def select(self, only: Sequence[str]) -> None:
        """Reduce the sweep to the cases that match. Raises UsageError if none does."""
        cases = parse_only(only, default_device()).select(self.sweep.cases)
        self.sweep = dataclasses.replace(self.sweep, cases=cases)
        self._only = tuple(only)

    def conditions_of_case(self, place: int) -> list[str]:
        """The conditions that only this case meets, as `--only` takes them."""
        return conditions_of(self.sweep.cases[place], self.sweep.axes)

    def target(self, name: str) -> Target:
        """The commit of a revision, branch or tag; `WORKTREE` is the tree if it has changes."""
        if name == WORKTREE:
            state = self.repository.state()
            return Target(state, is_in_place=state.is_dirty)
        return Target(self.repository.describe(self.repository.resolve(name)))

    def target_here(self) -> Target:
        """The tree as it is, in a repository or not."""
        here = read_commit(self.sweep.track.repo) or Commit("")
        return Target(here, is_in_place=True)

    def launches(self, targets: Sequence[Target]) -> list[Launches]:
        """The stored launches of each target that count."""
        found = []
        for rows in self._rows(targets):
            own = rows
            if self._is_fresh:
                own = fresh(self._of_code(rows), self._begun)
                own = own[own["run_id"] > self._after]
            found.append(Launches(newest_launches(own).sort_values("launch", kind="stable")))
        return found

    def _next_launches(self, targets: Sequence[Target]) -> list[int]:
        """The first launch number of each, of all cases, that a sweep would not find."""
        numbers = []
        for rows in self._rows(targets):
            own = self._of_code(rows[rows["status"].isin(("ok", *FINAL))])
            numbers.append(0 if own.empty else int(own["launch"].max()) + 1)
        return numbers

    def _rows(self, targets: Sequence[Target]) -> list[pd.DataFrame]:
        """The rows of each target's cases, without the failures that do not count."""
        places = {key_of(*planned): place for place, planned in enumerate(self.sweep.cases)}
        runs = self._store.runs(self._columns)
        runs["place"] = [places.get(key, -1) for key in keys_of(runs)]
        is_counted = runs["status"].eq("ok") | (runs["run_id"] > self._fails_after)
        runs = runs[is_counted & (runs["place"] >= 0)]
        shas, changes = (runs[name].map(key_text) for name in ("commit", "changes"))
        commits = (target.commit for target in targets)
        return [runs[(shas == one.commit) & (changes == one.changes)] for one in commits]

    def _of_code(self, runs: pd.DataFrame) -> pd.DataFrame:
        """The rows that were measured by the code that measures: else that of the newest."""
        if runs.empty:
            return runs
        codes = runs["code"].map(key_text)
        return runs[codes == (codes.iloc[-1] if self._code is None else self._code)]

    def lacks(self, target: Target, launches: Launches, count: int) -> bool:
        """Whether a case that runs has fewer launches than this.

        Nothing lacks where this process has made so many starts, whatever came of them.
        """
        cases = range(len(self.sweep.cases))
        is_short = [launches.num_done(at) < count and not launches.does_not_run(at) for at in cases]
        return any(is_short) and self.starts[target.name] < count

    def measure(self, targets: Sequence[Target], policy: Policy) -> list[Launches]:
        """Launch targets until the policy names none, and return the launches of each.

        Those with a part in a launch take turns: each has its own processes, and one set works at a
        time. They get the next free number of a launch. A commit that cannot be started has a
        failure row for each case. Nothing is started that would end after the budget.

        Blocks; raises KeyboardInterrupt when the sweep was interrupted, RepositoryError where git
        fails: that is not the commit's fault, and has no row; UsageError if the budget is too short
        for the first start, which is kept.
        """
        launches = self.launches(targets)
        while (part := policy(launches)).places:
            if self._num_starts and not self.budget.allows(self._start_s):
                if self._num_starts == 1 and self._start_s > self.budget.seconds:
                    raise UsageError(
                        f"--budget: {duration(self.budget.seconds)} is too short for one round; "
                        f"the first took {duration(self._start_s)}, and is kept; give more time"
                    )
                break
            began_s = self.budget.passed_s
            chosen = [targets[place] for place in part.places]
            numbers = self._next_launches(chosen)
            for at, target in enumerate(chosen):
                numbers[at] += part.num_launches * chosen[:at].count(target)
            labels = (
                f"{target.label}, {counted(number + part.num_launches, 'launch')}"
                for target, number in zip(chosen, numbers, strict=True)
            )
            self.progress.begin(" and ".join(labels), part.num_left)
            before = {run_id for own in launches for run_id in own.rows["run_id"]}
            errors = self._start(chosen, numbers, part.num_launches)
            after = self.launches(chosen)
            for at, error in errors.items():
                self.starts[chosen[at].name] += part.num_launches
                is_new = bool(set(after[at].rows["run_id"]) - before)
                if error is not None and not is_new:
                    self._write_failures(chosen[at], numbers[at], error)
            launches = self.launches(targets)
            outcomes = (self._outcome(launches[part.places[at]]) for at in sorted(errors))
            self.progress.end("; ".join(dict.fromkeys(outcomes)))
            self._num_starts += 1
            self._start_s = self.budget.passed_s - began_s
        return launches

    def _write_failures(self, target: Target, number: int, error: str) -> None:
        """Store a row for each case of a launch that left none."""
        cases = tuple(
            (case, dataclasses.replace(measure, launches=number + 1))
            for case, measure in self.sweep.cases
        )
        sweep = dataclasses.replace(self.sweep, cases=cases)
        commit = target.commit if target.commit.commit else None
        items = items_of(sweep, commit)
        named = (sweep_id_of(sweep, items, commit), sweep.name, sweep.file)
        job = Job(new_run_id(), str(self._store.folder), *named, commit, items)
        judgement = Diagnosis("error", error, None, [], None, 0, pd.DataFrame())
        for index in range(number * len(cases), len(items)):  # items come launch by launch
            write_failure(job, items[index], Attempt(index, new_run_id(), 1), judgement)

    def _outcome(self, launches: Launches) -> str:
        """What a target has after a start, in words."""
        num_cases = len(self.sweep.cases)
        failures = [one for place in range(num_cases) if (one := launches.failure(place))]
        if failures:
            more = f" ({len(failures)} of {num_cases} cases)" if num_cases > 1 else ""
            return f"{failures[0].status}{more}: {failures[0].error}"
        if num_cases > 1:
            return f"ok, {num_cases} cases"
        figures = ", ".join(f"{speed:,.0f}" for speed in launches.figures(0, SPEED))
        return f"ok, {figures} tokens/s"

    def _start(
        self, targets: Sequence[Target], numbers: Sequence[int], num_launches: int
    ) -> dict[int, str | None]:
        """Run the sweep on targets at the same time: from this launch of each so many launches.

        Several take turns. Returns the error of each, or None, by its place; where one cannot be
        set up, none is started, and that one alone is told of.
        """
        trees = []
        for at, target in enumerate(targets):  # git's own failures are not the commit's
            in_place, sha = target.is_in_place, target.commit.commit
            try:
                trees.append(self._root if in_place else self._checkouts.of(sha))
            except SetupError as error:
                return {at: str(error)}
        here, root = Path.cwd().resolve(), self._root
        budget_s, is_later = self.rounds_budget_s, self._num_starts > 0
        # A single set asks for no turn.
        with Conductor(new_run_id(), len(trees), budget_s, is_later=is_later) as conductor:
            starts = []
            for at, tree in enumerate(trees):
                folder = tree / (here.relative_to(root) if here.is_relative_to(root) else Path())
                settings = [
                    *self._overrides,
                    f"measure.launches={numbers[at] + num_launches}",
                    f"track.repo={json.dumps(str(tree), ensure_ascii=False)}",
                ]
                words = [word for setting in settings for word in ("--set", setting)]
                words += [word for condition in self._only for word in ("--only", condition)]
                words += ["--no-report", "--results", str(self._store.folder)]
                is_first = not self.starts[targets[at].name]  # failed launches are made once more
                words += ["--retry-failed"] * (self._retries_failed and is_first)
                program = _PROGRAM.format(
                    each_commit=EACH_COMMIT, lifetime=lifetime.__file__, parent=os.getpid()
                )
                command = [sys.executable, "-c", program, "sweep", self.sweep.file, *words]
                turns = conductor.variables(at, numbers[at]) if len(trees) > 1 else {}
                inside = folder if folder.is_dir() else tree
                starts.append(start_in(root, command, tree, inside, turns))
            ends = run(starts, self.progress.note, conductor.leave_out)
        errors: dict[int, str | None] = {}
        for at, ended in enumerate(ends):
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
class TwoSides:
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

    def launches(self) -> list[Launches]:
        """The launches of each side that count: those in which they took turns."""
        return self._in_turns(self.bench.launches((self.base, self.head)))

    @staticmethod
    def _in_turns(launches: Sequence[Launches]) -> list[Launches]:
        base, head = launches
        return [base.beside(head), head.beside(base)]

    def bring_to(self, num_launches: int) -> float:
        """Launch both sides until each has so many launches; return the rounds that it took.

        Raises LaunchError if no case of a side runs.
        """
        sides, asked, num_rounds = (self.base, self.head), self.num_done, 0

        def policy(launches: list[Launches]) -> Part:
            """The sides that lack a launch; all launches that the same sides lack in one start."""
            nonlocal asked, num_rounds
            launches = self._in_turns(launches)
            for side, own in zip(sides, launches, strict=True):
                failures = [own.failure(place) for place in range(len(self.bench.sweep.cases))]
                if all(failures):
                    raise LaunchError(f"{side.label}: does not run: {failures[0]}")
            lacking = {
                count: [at for at in (0, 1) if self.bench.lacks(sides[at], launches[at], count)]
                for count in range(asked + 1, num_launches + 1)
            }
            first = next((count for count, some in lacking.items() if some), None)
            if first is None:
                self.num_done = asked + len(lacking)
                return Part()
            num = sum(some == lacking[first] for some in lacking.values())
            self.num_done, asked = first - 1, first - 1 + num
            num_rounds += num
            return Part(lacking[first], num_launches=num)

        self.bench.measure(sides, policy)
        return num_rounds


@contextlib.contextmanager
def rounds_of(
    sweep: Sweep | None,
    base: str | None,
    head: str,
    results: Path,
    progress: Progress = SILENT,
    after: str = "",
) -> Iterator[TwoSides]:
    """Two commits to be measured in turns; their work trees are removed at the end.

    Older launches do not count: between sessions a machine drifts by more than launches differ, and
    that would fall on one side. Launches of the last hour in which both took turns do count, so
    that a measurement that was stopped goes on, but only those `after` this run. What failed is
    tried again: whatever was the cause, the setup for example, may have been mended.

    A head with uncommitted changes is measured in place. Without a base it is the repository's
    default. Raises PpbenchError.
    """
    if sweep is None:
        raise UsageError("--run: needs SWEEP, the sweep file to be measured")
    with Bench(sweep, results, progress, retries_failed=True, is_fresh=True, after=after) as bench:
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
        sides = TwoSides(bench, first, last)
        for side, launches in zip((first, last), sides.launches(), strict=True):
            nums = [launches.num_done(place) for place in range(len(bench.sweep.cases))]
            if any(nums):
                count = " to ".join(map(str, dict.fromkeys((min(nums), max(nums)))))
                word = "launch" if count == "1" else "launches"
                note(
                    f"{side.label}: takes {count} {word} of the last hour, and makes only what is "
                    "missing; to make all anew, name another store: --results DIR"
                )
        yield sides
