"""Whether runs stay done after a change of ppbench itself, in a repository with a copy of it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import TINY
from repositories import commit, make_repository
from stored_runs import run_row

from ppbench.config.case import Case
from ppbench.config.reader import read_sweep
from ppbench.run.machine import measuring_code
from ppbench.run.machine.measuring_code import ROOT, code_hash
from ppbench.run.sweep import plan
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.store import Store

SWEEP = f"""\
name = "own"
device = "cpu"
schedule = "1f1b"
world_size = 1
num_microbatches = 2
seq_len = 32
{TINY}steps = 2
"""
EXECUTOR = Path("engine/run/executor.py")
REPORT = Path("ppbench/report/pages/report.py")


@dataclass(frozen=True)
class Own:
    """A repository of ppbench with a sweep of its own."""

    folder: Path

    def missing(self) -> list[str]:
        """The resume keys of the runs that are not done, as a new process finds them."""
        code_hash.cache_clear()
        sweep = read_sweep(self.folder / "sweep.toml", [], "cpu")
        planned = plan_sweep(sweep, Store(self.folder / "results"), Choice())
        return [item.resume_key for item in planned.missing]


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
    """A repository of ppbench with a finished sweep, whose code is the code that runs."""
    folder = make_repository(tmp_path_factory.mktemp("own") / "repository")
    for package in ("engine", "ppbench"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    files = {"sweep.toml": SWEEP, ".gitignore": "results/\n", "README.md": "one\n"}
    first, repository = commit(folder, files, "First", day=1), Own(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        for module in (measuring_code, plan):
            patch.setattr(module, "ROOT", folder)
        (key,) = repository.missing()
        row = run_row(1, Case(), resume_key=key, commit=first)
        Store(folder / "results").write_run(row, {})
        assert repository.missing() == []
        yield repository
    code_hash.cache_clear()


@pytest.fixture(scope="module")
def reworded(own):
    """The same with a commit more, which rewords a docstring; what is missing before and at it."""
    reword(own.folder)
    (own.folder / "README.md").write_text("two\n")
    uncommitted = own.missing()
    commit(own.folder, {}, "Second", day=2)
    return uncommitted, own.missing()


def test_reworded_code_leaves_a_finished_sweep_with_nothing_to_do(reworded):
    uncommitted, committed = reworded
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
