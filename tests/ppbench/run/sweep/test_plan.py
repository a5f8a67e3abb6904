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
from stored_runs import run_row

from ppbench.config.case import Case
from ppbench.run.machine.measuring_code import ROOT
from ppbench.store import Store

SWEEP = """\
name = "own"
device = "cpu"
schedule = "1f1b"
world_size = 1
num_microbatches = 2
seq_len = 32

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 2
"""
PLAN = """\
import json, os, sys
from pathlib import Path
from ppbench.config.reader import read_sweep
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.store import Store

for _ in sys.stdin:
    if (process := os.fork()) == 0:
        read = read_sweep(Path("sweep.toml"), [], "cpu")
        missing = plan_sweep(read, Store(Path("results")), Choice()).missing
        print(json.dumps([item.resume_key for item in missing]), flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""
"""Plans anew, as a new process does, for each line: imports are most of what that takes."""

EXECUTOR = Path("engine/run/executor.py")
REPORT = Path("ppbench/report/pages/report.py")


class Own:
    """A repository of ppbench, its first commit, and a process of its code that plans its sweep."""

    def __init__(self, folder: Path, first: str) -> None:
        self.folder, self.first = folder, first
        self.planner = subprocess.Popen(
            [sys.executable, "-c", PLAN],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def missing(self) -> list[str]:
        """The resume keys of the runs that are not done."""
        assert self.planner.stdin is not None
        assert self.planner.stdout is not None
        print(file=self.planner.stdin, flush=True)
        keys: list[str] = json.loads(self.planner.stdout.readline())
        return keys


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
    """A repository of ppbench with a finished sweep."""
    folder = make_repository(tmp_path_factory.mktemp("own") / "repository")
    for package in ("engine", "ppbench"):
        shutil.copytree(ROOT / package, folder / package)  # as it is compiled, too
    files = {"sweep.toml": SWEEP, ".gitignore": "results/\n__pycache__/\n", "README.md": "one\n"}
    first = commit(folder, files, "First", day=1)
    repository = Own(folder, first)
    (key,) = repository.missing()
    Store(folder / "results").write_run(run_row(1, Case(), resume_key=key, commit=first), {})
    assert repository.missing() == []
    yield repository
    repository.planner.communicate()


@pytest.fixture(scope="module")
def reworded(own):
    """The same with a commit more, which rewords a docstring; what is missing before and at it.

    Then the two commits.
    """
    reword(own.folder)
    (own.folder / "README.md").write_text("two\n")
    uncommitted = own.missing()
    second = commit(own.folder, {}, "Second", day=2)
    return uncommitted, own.missing(), (own.first, second)


def test_reworded_code_leaves_a_finished_sweep_with_nothing_to_do(reworded):
    uncommitted, committed, _ = reworded
    assert (uncommitted, committed) == ([], [])


def test_a_changed_constant_of_the_executor_makes_runs_undone(own, reworded):
    path = own.folder / EXECUTOR
    text = path.read_text()
    path.write_text(f"{text}\n_OTHER = 1\n")
    assert len(own.missing()) == 1
    path.write_text(text)
    assert own.missing() == []


def test_a_changed_file_beside_the_code_makes_runs_undone(own, reworded):
    path = own.folder / "sweep.toml"
    path.write_text(f"{SWEEP}# it may be read by a case, as a file of costs is\n")
    assert len(own.missing()) == 1
    path.write_text(SWEEP)
