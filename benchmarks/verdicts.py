"""How soon a question is answered, and how often an answer is false.

    python -m benchmarks.verdicts [answers] [disturbed] [false_claims] [agreement] [history]
        [--tries N] [--budget 60s] [--burning 0] [--commits '']
        [--grid 'schedule = ["afab", "1f1b"]']

`answers` asks a question in an empty folder again and again: `ppbench sweep --budget` asks with
which of two values of a setting two CPU ranks train llama-8m faster, and with `--commits`
`ppbench compare --run --budget` whether the second of two commits is as fast as the first: of
`--commits '18, 19'` the second does some 5 % more work. `--grid 'model.preset = ["tower:build",
"tower:more"]'` is such a pair in one process. `--burning` processes burn a core at times beside it.
`disturbed` asks of two values that mean the same, beside a process that burns a core.

`false_claims` are those of the judge at any look, on made-up rounds and launches of equal sides.
`wrong same` is `same` where the true difference is 2 %, the resolution. `agreement` compares what a
report, `compare`, `check` and `plan` say of every pair in made-up stores. `history` counts alarms
in made-up histories, and right answers of made-up bisections.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loop import burning, ppbench, within
from benchmarks.made_up_launches import MODELS, STEP, Looked, kinds
from benchmarks.made_up_stores import make_store_of_pairs, said_of_pairs
from benchmarks.rows import Row, parser, run
from ppbench.errors import ExitCode
from ppbench.judge.evidence import RESOLUTION, Rounds
from ppbench.judge.verdicts import SPEED, Verdict
from ppbench.statistics.bisection import search_first_bad
from ppbench.statistics.change_points import find_changes

# Answers of the command line

DONE = (0, ExitCode.insufficient)
"""Exit codes of commands: an open verdict is no failure."""
MODEL = "model.preset"
EQUALS = 'model.partition = ["uniform", [4, 4]]'
TOWER = """\
from torch import nn

class Layer(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def build(number={layers}, width=192):
    layers = [Layer(width) for _ in range(number)]
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))

def more():
    return build({layers} + 1)
"""
SWEEP = """\
name = "answers"
device = "cpu"
world_size = 2
seq_len = 64
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 4}}
{settings}
{grid}
"""


def answers(asked: argparse.Namespace) -> Iterator[Row]:
    """Ask a question again and again, and say how long each answer took."""
    budget = asked.budget if asked.seconds else "10s"
    seconds, verdicts = _tries(asked, asked.grid, budget, asked.burning, asked.commits)
    note = ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items())
    yield Row.median(f"time of an answer with --budget {budget}", seconds, "s", note=note)


def disturbed(asked: argparse.Namespace) -> Iterator[Row]:
    """Ask which of two equal values is faster, beside another job."""
    budget = "30s" if asked.seconds else "10s"
    seconds, verdicts = _tries(asked, EQUALS, budget, burning_cores=1)
    num_false = sum(num for verdict, num in verdicts.items() if Verdict(verdict).is_claim)
    yield Row.share("false claims beside another job", num_false, len(seconds))


def _tries(
    asked: argparse.Namespace, grid: str, budget: str, burning_cores: int, commits: str = ""
) -> tuple[list[float], Counter[str]]:
    """Ask in one empty folder after the other; the seconds and the verdicts."""
    key, _, listed = grid.partition("=")
    key, pair = key.strip(), tomllib.loads(f"pair = {listed}")["pair"]
    preset = "tower:build" if commits else "llama-8m"
    settings = {"num_microbatches": "num_microbatches = 4", MODEL: f'model.preset = "{preset}"'}
    lines = "\n".join(line for name, line in settings.items() if name != key)
    grid = "" if commits else f"[grid]\n{grid}"
    text = SWEEP.format(settings=lines, grid=grid)
    seconds, verdicts = list[float](), Counter[str]()
    with burning(asked.seed, burning_cores):
        for number in range(asked.tries) if asked.tries else within(asked.seconds, count()):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "answers.toml").write_text(text)
                (folder / "tower.py").write_text(TOWER.format(layers=18))
                began = time.monotonic()
                if commits:
                    verdict, line = _of_commits(folder, commits, budget)
                else:
                    verdict, line = _of_settings(folder, key, pair, budget)
                seconds.append(time.monotonic() - began)
            verdicts[verdict] += 1
            print(f"  try {number}: {seconds[-1]:.0f} s, {line}", flush=True)
    return seconds, verdicts


def _of_settings(folder: Path, key: str, pair: list[object], budget: str) -> tuple[str, str]:
    """The verdict of a sweep on the second value over the first, with its interval and answer."""
    swept = ("sweep", "answers.toml", "--no-report", "--budget", budget)
    printed = ppbench(*swept, folder=folder, allowed=DONE)
    base = str(pair[0]).replace(" ", "")
    words = ("--across", key, "--base", base, "--format", "json")
    compared = ppbench("compare", *words, folder=folder, allowed=DONE)
    verdict, line = _of_speed(json.loads(compared)["changes"])
    answer = printed.rpartition("\n\n")[2].partition("\n")[0]
    return verdict, line if key == MODEL else f"{line}\n    {answer}"


def _of_commits(folder: Path, layers: str, budget: str) -> tuple[str, str]:
    """The verdict of a comparison of two commits; also with its interval."""
    git = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")
    subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
    for number, layers_of_commit in enumerate(layers.split(",")):
        tower = TOWER.format(layers=int(layers_of_commit))
        (folder / "tower.py").write_text(f"# {number}\n{tower}")
        subprocess.run([*git, "add", "tower.py", "answers.toml"], cwd=folder, check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", f"{number}"], cwd=folder, check=True)
    words = ("HEAD~1", "HEAD", "--run", "answers.toml", "--budget", budget, "--format", "json")
    compared = ppbench("compare", *words, folder=folder, allowed=DONE)
    return _of_speed(json.loads(compared)["changes"])


def _of_speed(changes: list[dict[str, Any]]) -> tuple[str, str]:
    """The verdict on tokens/s, and a line with its interval."""
    speed = next(change for change in changes if change["metric"] == SPEED)
    line = f"{speed['num_head']} launches, {speed['verdict']}"
    if speed["ratio_low"] is not None:
        line += f", {speed['ratio_low'] - 1:+.1%} to {speed['ratio_high'] - 1:+.1%}"
    return speed["verdict"], line


# The judge on made-up figures


def false_claims(asked: argparse.Namespace) -> Iterator[Row]:
    """Judge made-up comparisons of every kind in turn: of equal sides, and of 2 % and 5 %."""
    every = [(name, simulate, list[Looked]()) for name, simulate in kinds()]
    of_2, of_5 = list[Looked](), list[Looked]()
    draws = {name: np.random.default_rng([asked.seed, *name.encode()]) for name, *_ in every}
    for _ in within(asked.seconds, count()):
        for name, simulate, equal in every:
            for difference, found in ((0.0, equal), (RESOLUTION, of_2), (0.05, of_5)):
                found.append(simulate(draws[name], math.log1p(difference)))

    def share(name: str, are: list[bool]) -> Row:
        return Row.share(name, sum(are), len(are))

    equals = [one for *_, equal in every for one in equal]
    yield share("false claims", [one.verdict.is_claim for one in equals])
    yield share("wrong same, of 2 %", [one.verdict is Verdict.same for one in of_2])
    yield share("intervals of 95 % that hold", [one.held for one in equals])
    yield share("5 % found", [one.verdict is Verdict.slower for one in of_5])
    yield Row.median("launches until 5 % is found", [float(one.num_launches) for one in of_5], "")
    for name, _, equal in every:
        yield share(f"{name}: false claims", [one.verdict.is_claim for one in equal])


def agreement(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare what all commands say of the pairs of made-up stores."""
    contradicted, decided_once, nums = Counter[str](), Counter[str](), Counter[str]()
    for number in within(asked.seconds, count()):
        draw = np.random.default_rng([asked.seed, number])
        with tempfile.TemporaryDirectory() as folder:
            make_store_of_pairs(draw, Path(folder))
            for what, one, other in said_of_pairs(Path(folder)):
                both = [(one[pair], other[pair]) for pair in one.keys() & other.keys()]
                differ = [Verdict.open in two for two in both if two[0] is not two[1]]
                nums[what] += len(both)
                decided_once[what] += sum(differ)
                contradicted[what] += len(differ) - sum(differ)
    note = f"of {nums.total():,} pairs in {number + 1:,} stores"
    yield Row.exact("pairs that are contradicted", contradicted.total(), note=note)
    yield Row.exact("pairs that only one of both decides", decided_once.total(), note=note)
    for what, num in nums.items():
        yield Row.exact(f"{what}: contradicted", contradicted[what], note=f"of {num:,}")


NUM_COMMITS, CHANGED_AT, NUM_SEARCHED, MOST_SEARCH_LAUNCHES = 60, 40, 64, 300


def history(asked: argparse.Namespace) -> Iterator[Row]:
    """Make up histories of a launch per commit, and bisections of a change of 5 %."""
    draw = np.random.default_rng(asked.seed)
    alarms, hits = dict[str, list[bool]](), dict[str, list[bool]]()
    are_right: list[bool] = []
    models = {name: MODELS[name] for name in ("normal", "t3", "exponential", "10 % disturbed")}
    for _ in within(asked.seconds, count()):
        for name, model in models.items():
            launches = np.exp(model(draw, NUM_COMMITS))
            changed = launches * np.where(np.arange(NUM_COMMITS) >= CHANGED_AT, 1.05, 1.0)
            steps, of_changed = (
                find_changes([[one] for one in series.tolist()], slow_sign=1).steps
                for series in (launches, changed)
            )
            alarms.setdefault(name, []).append(bool(steps))
            is_hit = any(step.good < CHANGED_AT <= step.last for step in of_changed)
            hits.setdefault(name, []).append(is_hit)
        are_right += _searched(draw)
    every = [one for own in alarms.values() for one in own]
    yield Row.share("histories without a change that alarm", sum(every), len(every))
    for name, own in hits.items():
        yield Row.share(f"{name}: 5 % found", sum(own), len(own))
    if are_right:
        yield Row.share("bisections of 5 % that end right", sum(are_right), len(are_right))


def _searched(draw: np.random.Generator) -> list[bool]:
    """Whether a bisection that says that it is done is right; empty where it is given up."""
    first_bad = int(draw.integers(1, NUM_SEARCHED))
    launches: list[list[Rounds]] = [[] for _ in range(NUM_SEARCHED)]
    for _ in range(MOST_SEARCH_LAUNCHES):
        search = search_first_bad(STEP, launches)
        commit = search.next_commit
        if commit is None:
            return [search.latest == first_bad]
        good, other = np.exp(MODELS["normal"](draw, 2)).tolist()
        launches[commit].append(Rounds((good,), (other * (1 + 0.05 * (commit >= first_bad)),)))
    return []


PARTS = {"answers": answers, "disturbed": disturbed, "false_claims": false_claims}
PARTS |= {"agreement": agreement, "history": history}

if __name__ == "__main__":
    options = parser(__doc__, PARTS)
    options.add_argument("--tries", type=int, help="answers; default: as many as have time")
    options.add_argument("--budget", default="60s", help="of an answer")
    options.add_argument("--grid", default='schedule = ["afab", "1f1b"]', help="TOML of two values")
    options.add_argument("--commits", default="", help="numbers of layers of two commits")
    options.add_argument("--burning", type=int, default=0, help="processes that burn a core")
    options.add_argument("--seed", type=int, default=38)
    run("verdicts", __doc__, PARTS, options)
