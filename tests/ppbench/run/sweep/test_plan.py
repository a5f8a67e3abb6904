"""Whether runs stay done after a change of ppbench itself, in a repository with a copy of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repositories import commit, make_repository

from ppbench.run.machine.measuring_code import ROOT
from ppbench.store import Store

SWEEP = """\
name = "own"
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
steps = 2

[emulated]
F_ms = 2
I_ms = 2
W_ms = 2
"""
PLAN = """\
import json
from pathlib import Path
from ppbench.config.reader import read_sweep
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.store import Store

plan = plan_sweep(read_sweep(Path("sweep.toml"), [], "cpu"), Store(Path("results")), Choice())
print(json.dumps([len(plan.missing), plan.sweep_id]))
"""
EXECUTOR = Path("engine/run/executor.py")
REPORT = Path("ppbench/report/pages/report.py")


def python(folder: Path, program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ppbench(folder: Path, *arguments: str) -> str:
    return python(folder, "from ppbench.cli import main; main()", *arguments)


def num_missing(folder: Path) -> int:
    return json.loads(python(folder, PLAN))[0]


def reword(folder: Path) -> None:
    """Reword a docstring of the executor, and rename a private function of the report."""
    executor, report = folder / EXECUTOR, folder / REPORT
    text = executor.read_text()
    assert text.startswith('"""')
    executor.write_text('"""Reworded: ' + text.removeprefix('"""'))
    name = re.search(r"^def (_\w+)\(", report.read_text(), flags=re.MULTILINE)
    assert name is not None
    report.write_text(re.sub(rf"\b{name[1]}\b", f"{name[1]}_renamed", report.read_text()))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A repository of ppbench with a finished sweep; its folder, and the commit that ran it."""
    folder = make_repository(tmp_path_factory.mktemp("own") / "repository")
    for package in ("engine", "ppbench"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=unwanted)
    files = {"sweep.toml": SWEEP, ".gitignore": "results/\n__pycache__/\n", "README.md": "one\n"}
    first = commit(folder, files, "First", day=1)
    ppbench(folder, "sweep", "sweep.toml", "--no-report")
    assert num_missing(folder) == 0
    return folder, first


@pytest.fixture(scope="module")
def reworded(own):
    """The same with a commit more, which rewords a docstring; the number missing before and at it.

    Then the two commits.
    """
    folder, first = own
    reword(folder)
    (folder / "README.md").write_text("two\n")
    uncommitted = num_missing(folder)
    second = commit(folder, {}, "Second", day=2)
    return uncommitted, num_missing(folder), (first, second)


def test_reworded_code_leaves_a_finished_sweep_with_nothing_to_do(reworded):
    uncommitted, committed, _ = reworded
    assert (uncommitted, committed) == (0, 0)


def test_a_changed_constant_of_the_executor_makes_runs_undone(own, reworded):
    folder, _ = own
    path = folder / EXECUTOR
    text = path.read_text()
    path.write_text(f"{text}\n_OTHER = 1\n")
    assert num_missing(folder) == 1
    path.write_text(text)
    assert num_missing(folder) == 0


def test_a_changed_file_beside_the_code_makes_runs_undone(own, reworded):
    folder, _ = own
    path = folder / "sweep.toml"
    path.write_text(f"{SWEEP}# it may be read by a case, as a file of costs is\n")
    assert num_missing(folder) == 1
    path.write_text(SWEEP)


def test_measuring_commits_makes_runs_of_each_though_their_code_is_one(own, reworded):
    folder, _ = own
    _, _, (first, second) = reworded
    ppbench(folder, "backfill", f"{first}..", "sweep.toml", "--max", "2")
    runs = Store(folder / "results").runs(["commit", "status", "code", "sweep_id"])
    assert list(runs["commit"]) == [first, second]
    assert list(runs["status"]) == ["ok", "ok"]
    assert runs["code"].nunique() == 1
    assert runs["sweep_id"].nunique() == 2
    ppbench(folder, "backfill", f"{first}..", "sweep.toml", "--max", "2")
    assert len(Store(folder / "results").runs(["commit"])) == 2
    assert num_missing(folder) == 0
