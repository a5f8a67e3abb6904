"""Every reading command on stores that are damaged at random: no traceback, nothing else lost.

The expectations are what the same command says of the same store before it was damaged. Commands
run in this process. One that opened the damaged file on the sound store, or listed its folder when
the file is deleted, must read otherwise now; any other reads byte for byte the same, and of these
a random few are run to hold that.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from store_mutations import Mutation, mutate, some_versions

import ppbench
from ppbench.cli.app import app
from ppbench.errors import PpbenchError
from ppbench.store import TABLES, Store

pytestmark = pytest.mark.usefixtures("warm_starts")

COMMAND = typer.main.get_command(app)  # building it takes longer than most commands
A_DAY_AGO = time.time() - 24 * 3600
NUM_ALL, NUM_SAMPLES = 501, 6
NUM_COMMANDS_IN_SAMPLE = 5
NUM_UNCONCERNED = 1
EXPORT = ("export", "--format", "csv", "--table")
VERSIONS = {"loose": ("v1", "v4", "v6"), "sealed": ("v2", "v5", "v6"), "compacted": ("v3", "v5")}
OF_WHOLE_FILES = (
    *("truncated", "deleted", "emptied", "text", "folder", "dangling", "pipe"),
    *("other table", "other run", "renamed", "later"),
)
"""Kinds of damage that show whichever columns are read."""
Words = tuple[str, ...]
Rows = dict[str, list[tuple[str, ...]]]


@dataclass(frozen=True)
class Answer:
    """The end of a command: its exit code, its output, and its warnings with a final error."""

    code: int
    output: str
    notes: str


@dataclass
class FilesRead:
    """Paths that are opened and folders that are listed while it is on."""

    opened: set[str] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    is_on: bool = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in ("open", "os.listdir", "os.scandir"):
            paths = self.opened if event == "open" else self.listed
            paths.add(str(arguments[0]))

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record the files read inside the context, and none from before."""
        self.opened, self.listed, self.is_on = set(), set(), True
        try:
            yield
        finally:
            self.is_on = False


READ = FilesRead()
sys.addaudithook(READ)


def ask(store: Path, words: Words) -> Answer:
    """The command in this process; an error that is no known one is raised."""
    output, notes = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(notes):
        try:
            code = _run(store, words, notes)
        except PpbenchError as error:
            assert "\n" not in str(error), (words, str(error))
            code = 1
            notes.write(str(error))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    output.seek(0)
    return Answer(code, output.read(), notes.getvalue())


def _run(store: Path, words: Words, notes: io.StringIO) -> int:
    if words[0] != "notebook":
        return COMMAND([*words, "--results", str(store)], standalone_mode=False) or 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _use_in_notebook(store, words[1])
        finally:
            notes.write("\n".join(str(warning.message) for warning in caught))
    return 0


def _use_in_notebook(store: Path, run: str) -> None:
    results = ppbench.load(store)
    print(*results.runs["run_id"])
    for name in TABLES:
        print(name, len(results.table(name)))
    ppbench.figures.idle(results)
    ppbench.figures.timeline(results, run=run)


def commands(run: str, other: str, table: str, out: Path) -> list[Words]:
    """Every command that reads a store, about the damaged run, another one or all."""
    figures = ("throughput", "scaling", "bubble", "idle", "memory", "pareto", "steps")
    return [
        ("ls",),
        ("ls", "--format", "json", "--where", "status=ok"),
        ("query", "SELECT count(*), sum(tokens_per_s) FROM runs"),
        ("query", f"SELECT run_id, count(*) FROM {table} GROUP BY run_id"),
        *(("show", name) for name in (run, other, "last")),
        *(("explain", name, "--format", "json") for name in (run, other)),
        ("report", run, other, "-o", str(out / "report.html")),
        ("timeline", run, other, "-o", str(out / "timeline.html")),
        ("timeline", run, "--terminal"),
        ("timeline", run, "--planned", "--terminal"),
        ("trace", run, "-o", str(out / "trace.json")),
        *(("figure", name, "-o", str(out / "figure.json")) for name in figures),
        ("figure", "timeline", run, "-o", str(out / "figure.json")),
        ("figure", "levels_of_memory", run, "-o", str(out / "figure.json")),
        ("compare", run, other),
        ("check", "--base", run, "--head", other),
        ("history", "--all", "--dirty", "-o", str(out / "history.html")),
        ("notebook", other),
    ]


def rows_by_run(text: str) -> Rows:
    rows: Rows = {}
    for row in csv.DictReader(io.StringIO(text)):
        rows.setdefault(row["run_id"], []).append(tuple(map(plain, row.values())))
    return rows


def plain(cell: str) -> str:
    """A number one way: a column that has gaps holds whole numbers as floats."""
    return cell.removesuffix(".0")


@dataclass
class Original:
    """A sound store, its copy that is damaged in turns, and what commands say of it and read."""

    kind: str
    folder: Path
    store: Path
    rows: dict[str, Rows]
    ids: list[str]
    known: dict[Words, tuple[Answer, set[str], set[str]]] = field(default_factory=dict)
    num_calls: int = 0

    def answer(self, words: Words) -> tuple[Answer, set[str], set[str]]:
        """The answer of the sound store, the files opened for it and the folders listed."""
        if words not in self.known:
            with READ.noted():
                answer = ask(self.store, words)
            self.known[words] = (answer, READ.opened, READ.listed)
        return self.known[words]

    def is_concerned(self, words: Words, mutation: Mutation) -> bool:
        """Whether the command can see the damage."""
        _, opened, listed = self.answer(words)
        is_listed = mutation.kind == "deleted" and str(mutation.path.parent) in listed
        return words[0] == "query" or str(mutation.path) in opened or is_listed

    def mended(self, path: Path) -> None:
        """Put the file back as it was."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        shutil.copy2(self.folder / path.relative_to(self.store), path)


@pytest.fixture(scope="module", params=sorted(VERSIONS))
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A store as old versions wrote it, as this one writes it, or compacted."""
    parent = tmp_path_factory.mktemp(request.param)
    folder, store = parent / "original", parent / "results"
    some_versions(folder, VERSIONS[request.param])
    if request.param == "compacted":
        assert ask(folder, ("compact",)).code == 0
    if request.param == "sealed":
        sealed = Store(folder)
        for _, run in sealed.runs().iterrows():
            of_run = [run["run_id"]]
            tables = {name: sealed.table(name, of_run) for name in TABLES if name != "runs"}
            sealed.write_run(dict(run), {n: rows for n, rows in tables.items() if len(rows)})
    for path in folder.rglob("*"):  # a file of this moment counts as one that is being stored
        os.utime(path, (A_DAY_AGO, A_DAY_AGO), follow_symlinks=False)
    shutil.copytree(folder, store, symlinks=True)
    rows = {name: rows_by_run(ask(store, (*EXPORT, name)).output) for name in TABLES}
    return Original(request.param, folder, store, rows, sorted(rows["runs"]))


def test_whatever_is_damaged_is_named_and_costs_nothing_else(
    original: Original, tmp_path: Path, is_thorough: bool
) -> None:
    failures, seeds = [], _seeds(is_thorough)
    for seed in seeds:
        rng = random.Random(f"{original.kind} {seed}")
        mutation = mutate(original.store, rng)
        try:
            check_mutation(original, mutation, rng, tmp_path, is_thorough)
        except Exception as error:  # a traceback is what is looked for
            failures.append(f"{seed} {mutation}: {error!r}\n{traceback.format_exc()}")
            print(failures[-1], flush=True)
        original.mended(mutation.path)
        print(f"{original.kind} {seed} {mutation.kind} {original.num_calls} calls", flush=True)
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} mutations", *failures])


def _seeds(is_thorough: bool) -> list[int]:
    """Which mutations of each kind of store; PPBENCH_SEEDS="3 40:60" names others."""
    num_seeds = (NUM_ALL if is_thorough else NUM_SAMPLES) // len(VERSIONS)
    words = os.environ.get("PPBENCH_SEEDS", f"0:{num_seeds}").split()
    ends = [list(map(int, word.split(":"))) for word in words]
    return [seed for first, *end in ends for seed in range(first, *(end or [first + 1]))]


def check_mutation(
    original: Original, mutation: Mutation, rng: random.Random, out: Path, is_thorough: bool
) -> None:
    """Ask every command that can see the damage; in a sample, a few."""
    ids = original.ids
    run = mutation.path.stem if mutation.path.stem in ids else ids[-1]
    other = next(name for name in reversed(ids) if name != run)
    table = mutation.path.relative_to(original.store).parts[0]
    every = commands(run, other, table, out)
    if is_thorough:
        with_original(original, mutation, every)
        concerned = [words for words in every if original.is_concerned(words, mutation)]
        others = [words for words in every if words not in concerned]
        chosen = [*concerned, *rng.sample(others, min(NUM_UNCONCERNED, len(others)))]
    else:
        chosen = rng.sample(every, NUM_COMMANDS_IN_SAMPLE)
    check_tables(original, mutation, run)
    for words in chosen:
        check_command(original, mutation, words, other)


def with_original(original: Original, mutation: Mutation, every: list[Words]) -> None:
    """Have the answers of the sound store to all these commands."""
    if all(words in original.known for words in every):
        return
    damaged = mutation.path.with_name(".damaged")  # a name that no command reads
    if os.path.lexists(mutation.path):
        mutation.path.rename(damaged)
    shutil.copy2(original.folder / mutation.path.relative_to(original.store), mutation.path)
    for words in every:
        original.answer(words)
    mutation.path.unlink()
    if os.path.lexists(damaged):
        damaged.rename(mutation.path)


def check_tables(original: Original, mutation: Mutation, run: str) -> None:
    """Every table has of every other run what it had, and of the damaged one nothing else."""
    damaged = mutation.path.relative_to(original.store).parts[0]
    is_many = mutation.path.parent.name == "compacted"
    names = TABLES if damaged == "runs" else {damaged, "steps"}  # lost runs are found by steps
    for name in sorted(names):
        answer = ask(original.store, (*EXPORT, name))
        original.num_calls += 1
        assert answer.code == 0 or is_many, (mutation, answer.notes)
        rows = rows_by_run(answer.output)
        for run_id, expected in original.rows[name].items():
            is_lost = damaged in ("runs", name) and (is_many or run_id == run)
            if not is_lost:
                assert rows.get(run_id) == expected, (mutation, name, run_id)
            elif mutation.is_certain:
                assert rows.get(run_id, expected) == expected, (mutation, name, run_id)
        if name == damaged and mutation.is_certain and rows != original.rows[name]:
            assert is_named(mutation, answer.notes), (mutation, answer.notes)


def check_command(original: Original, mutation: Mutation, words: Words, other: str) -> None:
    """No traceback; the damage is named by who reads the file, and others answer as before."""
    answer = ask(original.store, words)
    original.num_calls += 1
    assert answer.code in range(5), (mutation, words, answer.notes)
    is_own = mutation.path.parent.name != "compacted"
    if words[0] == "ls" and is_own:
        lost = [] if mutation.path.parent.name != "runs" else [mutation.path.stem]
        names = [run_id for run_id in original.ids if run_id not in lost]
        assert all(name in answer.output for name in names), (mutation, words, answer.output)
    if words not in original.known:
        return
    before, opened, _ = original.known[words]
    if not original.is_concerned(words, mutation) or (is_own and words[1:2] == (other,)):
        is_same = words[0] == "notebook" or answer.output == before.output
        assert is_same, (mutation, words, answer.output)
    is_read = str(mutation.path) in opened and not _is_of_other_runs(original, mutation, words)
    if is_read and mutation.is_certain and mutation.kind in OF_WHOLE_FILES:
        assert is_named(mutation, answer.notes + answer.output), (mutation, words, answer.notes)


def _is_of_other_runs(original: Original, mutation: Mutation, words: Words) -> bool:
    """Whether a command may need nothing of a file of many runs that it opened.

    Of steps all but three commands look only for runs without a row; of a file of a later version
    only those groups of rows are read, and refused, that have the named run.
    """
    if mutation.path.parent.name != "compacted":
        return False
    is_steps = mutation.path.parent.parent.name == "steps"
    has_steps = "steps" in " ".join(words[:2]) or words[0] in ("report", "notebook", "export")
    return mutation.kind == "later" or (is_steps and not has_steps)


def is_named(mutation: Mutation, text: str) -> bool:
    """Whether the file is named; of a deleted file of many, the folder that lacks it."""
    if mutation.kind in ("deleted", "dangling") and mutation.path.parent.name == "compacted":
        return f"{mutation.path.parent.parent}/" in text
    return str(mutation.path) in text
