"""Every reading command on stores that are damaged at random: no traceback, nothing else lost.

The expectations are what the same command says of the same store before it was damaged.
"""

from __future__ import annotations

import csv
import io
import random
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from store_mutations import Mutation, all_versions, mutate
from typer.testing import CliRunner

from ppbench.cli import app
from ppbench.errors import PpbenchError
from ppbench.store import TABLES, Store

RUNNER = CliRunner()
NUM_SAMPLES, NUM_ALL = 5, 500
EXPORT = ("export", "--format", "csv", "--table")


def invoke(store: Path, *words: str) -> Result:
    """The command in this process; a known error is its message on stderr."""
    result = RUNNER.invoke(app, [*words, "--results", str(store)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, PpbenchError), (words, result.exc_info)
        assert "\n" not in str(result.exception), words
    return result


def said(result: Result) -> str:
    """All that was said on stderr, a final error included."""
    return f"{result.stderr}{result.exception or ''}"


def commands(run: str, other: str, out: Path) -> list[tuple[str, ...]]:
    """Every command that reads a store, about the damaged run, another one or all."""
    figures = ("throughput", "scaling", "bubble", "idle", "memory", "pareto", "steps")
    return [
        ("ls",),
        ("query", "SELECT count(*), sum(tokens_per_s) FROM runs"),
        *(("show", name) for name in (run, "last")),
        *(("explain", name, "--format", "json") for name in (run, other)),
        ("report", run, other, "-o", str(out / "report.html")),
        ("timeline", run, other, "-o", str(out / "timeline.html")),
        ("timeline", run, "--terminal"),
        ("timeline", run, "--planned", "--terminal"),
        ("trace", run, "-o", str(out / "trace.json")),
        ("trace", run, "--perfetto", "-o", str(out / "trace.pftrace")),
        *(("figure", name, "-o", str(out / "figure.json")) for name in figures),
        ("figure", "timeline", run, "-o", str(out / "figure.json")),
        ("figure", "levels_of_memory", run, "-o", str(out / "figure.json")),
        ("compare", run, other),
        ("history", "--all", "--dirty", "-o", str(out / "history.html")),
    ]


def rows_by_run(text: str) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        found.setdefault(row["run_id"], []).append(tuple(map(plain, row.values())))
    return found


def plain(cell: str) -> str:
    """A number one way: a column that has gaps holds whole numbers as floats."""
    return cell.removesuffix(".0")


@pytest.fixture(scope="module", params=["loose", "sealed", "compacted"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as old versions wrote it, as this one writes it, and compacted."""
    folder = tmp_path_factory.mktemp(request.param) / "results"
    all_versions(folder)
    if request.param == "compacted":
        assert invoke(folder, "compact").exit_code == 0
    if request.param == "sealed":
        store = Store(folder)
        for _, run in store.runs().iterrows():
            tables = {name: store.table(name, [run["run_id"]]) for name in TABLES if name != "runs"}
            store.write_run(dict(run), {n: rows for n, rows in tables.items() if len(rows)})
    return folder


@pytest.fixture(scope="module")
def expected(original: Path) -> dict[str, dict[str, list[tuple[str, ...]]]]:
    return {name: rows_by_run(invoke(original, *EXPORT, name).stdout) for name in TABLES}


def test_whatever_is_damaged_is_named_and_costs_nothing_else(
    original: Path,
    expected: dict[str, dict[str, list[tuple[str, ...]]]],
    tmp_path: Path,
    is_thorough: bool,
) -> None:
    ids = sorted(expected["runs"])
    total = NUM_ALL if is_thorough else NUM_SAMPLES * 3
    for seed in range(total // 3 + 1):
        store = tmp_path / f"{seed}"
        shutil.copytree(original, store, symlinks=True)
        mutation = mutate(store, random.Random(f"{original.parent.name} {seed}"))
        run = mutation.path.stem if mutation.path.stem in ids else ids[-1]
        other = next(name for name in reversed(ids) if name != run)
        check_tables(store, mutation, expected, run)
        for words in commands(run, other, tmp_path):
            check_command(store, mutation, words)
        shutil.rmtree(store)


def check_tables(
    store: Path,
    mutation: Mutation,
    expected: dict[str, dict[str, list[tuple[str, ...]]]],
    run: str,
) -> None:
    """Every table has of every other run what it had, and of the damaged one nothing else."""
    damaged = mutation.path.relative_to(store).parts[0]
    is_many = mutation.path.parent.name == "compacted"
    for name in TABLES:
        result = invoke(store, *EXPORT, name)
        assert result.exit_code == 0 or is_many, (mutation, said(result))
        found = rows_by_run(result.stdout)
        for run_id, rows in expected[name].items():
            is_lost = damaged in ("runs", name) and (is_many or run_id == run)
            if not is_lost:
                assert found.get(run_id) == rows, (mutation, name, run_id)
            elif mutation.is_certain:
                assert found.get(run_id, rows) == rows, (mutation, name, run_id)
        if name == damaged and mutation.is_certain and found != expected[name]:
            assert is_named(mutation, said(result)), (mutation, said(result))


def check_command(store: Path, mutation: Mutation, words: tuple[str, ...]) -> None:
    """No traceback; and if the command says nothing of the damage, it was not concerned."""
    result = invoke(store, *words)
    assert result.exit_code in (0, 1, 2, 3), (mutation, words, said(result))
    is_row = mutation.path.parent == store / "runs"
    if is_row and mutation.is_certain and words[0] == "ls":
        is_there = mutation.path.stem in result.stdout
        assert is_there or is_named(mutation, said(result)), (mutation, words, said(result))


def is_named(mutation: Mutation, text: str) -> bool:
    """Whether the file is named; of a deleted file of many, the folder that lacks it."""
    if mutation.kind in ("deleted", "dangling") and mutation.path.parent.name == "compacted":
        return f"{mutation.path.parent.parent}/" in text
    return str(mutation.path) in text
