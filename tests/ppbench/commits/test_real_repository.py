"""Bisect, backfill, compare, check and history on one repository of five commits: the last
makes a stage take three times as long, and the third does not run.

The ranks are emulated, so that two cores do: the costs of the stages are a file in the repository.
The change is large against some milliseconds by which a rank may wake up late, so that few short
launches tell, also beside other tests on the same cores. Their median counts, so two of the five
may be disturbed. Starts take seconds each, so all tests look at one store, and no commit is
measured more often than need be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import inside, printed
from repositories import commit, make_repository

from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

NUM_COMMITS, SLOWER, BROKEN = 5, 5, 3  # a bisection tries the third first
SWEEP = """\
name = "tracked"
device = "emulated"
schedule = "1f1b"
world_size = 2
num_microbatches = 2
seq_len = 32

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 5

[emulated]
costs = "costs.toml"
"""
COSTS = "F_ms = [{F}, {slow}]\nI_ms = [{half}, {half_slow}]\nW_ms = [{half}, {half_slow}]\n"
F_MS = 20.0
PATIENCE_S = 570


def costs(number: int) -> str:
    if number == BROKEN:
        return "F_ms = [20, oops\n"
    factor = 3.0 if number >= SLOWER else 1.0
    halves = {"half": F_MS / 2, "half_slow": F_MS / 2 * factor}
    return COSTS.format(F=F_MS, slow=F_MS * factor, **halves)


def measuring(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as it starts ranks."""
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Its folder, and its commits by their numbers from 1."""
    folder = make_repository(tmp_path_factory.mktemp("real") / "repository")
    files = {"sweep.toml": SWEEP, ".gitignore": "results/\nreports/\n"}
    numbers = range(1, NUM_COMMITS + 1)
    shas = {
        n: commit(folder, {**files, "costs.toml": costs(n), "n": f"{n}"}, f"Number {n}", day=n)
        for n in numbers
    }
    return folder, shas


@pytest.fixture(scope="module")
def bisected(repository):
    """The bisection of all commits, into an empty store."""
    folder, shas = repository
    words = ("bisect", shas[1], shas[NUM_COMMITS], "sweep.toml", "--confidence", "95%")
    return measuring(folder, *words)


@pytest.fixture(scope="module")
def backfilled(repository, bisected):
    """A backfill: what the bisection has measured is there already."""
    folder, shas = repository
    return measuring(folder, "backfill", f"{shas[1]}..", "sweep.toml", "--format", "json")


def test_bisect_names_the_commit_that_made_the_stage_slower(repository, bisected):
    _, shas = repository
    assert bisected.returncode == 0, bisected.stderr
    line = next(one for one in bisected.stdout.splitlines() if one.startswith("first bad"))
    day = f"2026-01-{SLOWER + 1:02}T00:00:00+00:00"
    assert line == f"first bad commit: {shas[SLOWER]} {day} Number {SLOWER}"
    assert "change: tokens_per_s -" in bisected.stdout
    assert f"skipped: {shas[BROKEN][:9]} Number {BROKEN}: error: " in bisected.stdout
    assert "costs.toml:1: not valid TOML" in bisected.stdout
    assert f"compare: ppbench compare {shas[SLOWER - 1]} {shas[SLOWER]}" in bisected.stdout
    assert "timelines: ppbench timeline " in bisected.stdout


def test_backfill_measures_commits_and_lists_the_one_that_does_not_run(repository, backfilled):
    folder, shas = repository
    assert backfilled.returncode == 0, backfilled.stderr
    rows = {row["commit"]: row for row in json.loads(backfilled.stdout)["rows"]}
    assert list(rows) == list(shas.values())  # oldest first
    assert {sha: row["status"] for sha, row in rows.items()} == {
        sha: "error" if number == BROKEN else "ok" for number, sha in shas.items()
    }
    fast = [rows[sha]["tokens_per_s"] for number, sha in shas.items() if number < SLOWER]
    slow = [rows[sha]["tokens_per_s"] for number, sha in shas.items() if number >= SLOWER]
    assert min(one for one in fast if one is not None) > max(slow)
    stored = Store(folder / "results").runs()
    failed = stored[stored["commit"] == shas[BROKEN]]
    assert list(failed["status"]) == ["error"]
    assert list(failed["subject"]) == [f"Number {BROKEN}"]
    assert list(failed["parent"]) == [shas[BROKEN - 1]]


def test_bisect_and_backfill_start_nothing_for_what_is_stored(repository, backfilled, monkeypatch):
    folder, shas = repository
    before = len(Store(folder / "results").runs(["run_id"]))
    words = (shas[1], shas[NUM_COMMITS], "sweep.toml", "--confidence", "95%", "--format", "json")
    found = json.loads(inside("bisect", *words, folder=folder))
    assert [one["commit"] for one in found["first_bad"]] == [shas[SLOWER]]
    assert found["num_made"] == 0
    monkeypatch.chdir(folder)
    whole = printed("backfill", f"{shas[1]}..", "sweep.toml", "--max", "4")
    assert any("4 of 4 commits are measured already" in note for note in whole.notes)
    assert len(Store(folder / "results").runs(["run_id"])) == before
    assert not (folder / "results" / "worktrees").exists()
    assert not (folder / ".git" / "worktrees").exists()


@pytest.fixture(scope="module")
def compared(repository, backfilled):
    """The commit and the one before it, launched until it is decided; some are there already."""
    folder, shas = repository
    return measuring(folder, "compare", shas[SLOWER - 1], shas[SLOWER], "sweep.toml", "--run")


def test_compare_ends_as_soon_as_it_is_decided(repository, compared):
    folder, shas = repository
    assert "stopped: decided after " in compared.stdout
    assert "one launch of both sides takes about " in compared.stderr
    before = len(Store(folder / "results").runs(["run_id"]))
    words = (shas[SLOWER - 1], shas[SLOWER], "sweep.toml", "--run", "--format", "json")
    looks = json.loads(inside("compare", *words, folder=folder))["looks"]
    assert looks["is_decided"]
    assert looks["launches"][-1] < looks["max_launches"]
    assert len(Store(folder / "results").runs(["run_id"])) == before  # it takes the same looks
    assert compared.returncode == 0, compared.stderr
    assert "slower" in compared.stdout
    assert "compute of stage 1 changed: " in compared.stdout
    assert "stage 0 changed" not in compared.stdout


def test_check_ends_with_1_for_that_commit(repository, compared, monkeypatch):
    folder, shas = repository
    monkeypatch.chdir(folder)
    done = printed("check", "--base", shas[SLOWER - 1], "--head", shas[SLOWER])
    assert done.exit_code == 1, done
    assert shas[SLOWER][:9] in done.text
    assert f"Number {SLOWER}" in done.text


def test_history_names_that_commit(repository, compared):
    folder, shas = repository
    found = inside("history", "--no-page", folder=folder)
    changes = [line for line in found.splitlines() if ", worse" in line]
    assert len(changes) == 1
    assert shas[SLOWER][:9] in changes[0]
    assert f"Number {SLOWER}" in changes[0]
