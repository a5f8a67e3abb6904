"""The loop in turns, and what arms are made of: processes, sweeps, ranks of another work tree."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from benchmarks.rows import ROOT
from ppbench.judge.evidence import Rounds
from ppbench.run.rounds import order_of

T = TypeVar("T")


def within(seconds: float, items: Iterable[T], fewest: int = 1) -> Iterator[T]:
    """The items that are begun within so many seconds; the first few in any case."""
    began = time.monotonic()
    for place, item in enumerate(items):
        if place >= fewest and time.monotonic() - began >= seconds:
            return
        yield item


def in_turns(
    arms: Mapping[str, Callable[[], T]], rounds: Iterable[int], num_warmup: int = 1
) -> dict[str, list[T]]:
    """What each arm returned in each round, in the order of a sweep's rounds.

    The order depends on the names alone, so that several ranks can do this together.
    """
    found: dict[str, list[T]] = {name: [] for name in arms}
    names = list(arms)
    for round_index in range(num_warmup):
        for place in order_of(len(names), round_index):
            arms[names[place]]()
    for round_index in rounds:
        for place in order_of(len(names), num_warmup + round_index):
            found[names[place]].append(arms[names[place]]())
    return found


def sides(turns: Mapping[str, list[float]], base: str, head: str) -> Rounds:
    """Two arms of one launch, for the judge."""
    return Rounds(tuple(turns[base]), tuple(turns[head]))


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the work, begun after a garbage collection; its result is freed afterwards."""
    gc.collect()
    began = time.perf_counter()
    kept = work()
    took = time.perf_counter() - began
    del kept
    return took


def run_python(
    *words: object, folder: Path = ROOT, tree: Path = ROOT, allowed: Container[int] = (0,)
) -> str:
    """Run Python with the code of a work tree, and return what it printed; exits if it fails."""
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in allowed:
        said = done.stderr[-2000:]
        sys.exit(f"{' '.join(command)}: ended with exit code {done.returncode}\n{said}")
    return done.stdout


def ppbench(*words: object, **how: Any) -> str:
    """Run a command of ppbench, as a user does; `how` is that of `run_python`."""
    return run_python("-m", "ppbench", *words, **how)


def swept(folder: Path, text: str, **how: Any) -> pd.DataFrame:
    """Run a sweep file into `folder/results`, and return the rows of its runs."""
    from ppbench import load

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.toml").write_text(text, encoding="utf-8")
    ppbench("sweep", "sweep.toml", "--no-report", folder=folder, **how)
    return load(folder / "results").runs.sort_values("created_at")


@contextlib.contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit; it is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


BURN = """\
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    time.sleep(draw.expovariate(1 / 16))
    until = time.monotonic() + draw.expovariate(1 / 8)
    while time.monotonic() < until:
        pass
"""


@contextlib.contextmanager
def burning(seed: int, num_cores: int) -> Iterator[None]:
    """Burn so many cores for some seconds now and then, at random, until the block ends."""
    commands = [[sys.executable, "-c", BURN, f"{seed + at}"] for at in range(num_cores)]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
