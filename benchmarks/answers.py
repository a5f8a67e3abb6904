"""How long it takes until a question has an answer, and what the answers are.

    python -m benchmarks.answers [--tries 20] [--budget 60s] [--burning 0]
        [--grid 'schedule = ["afab", "1f1b"]'] [--commits '']

Each try asks the same question in an empty folder: `ppbench sweep --budget` asks which of two
values of a setting two CPU ranks train `llama-8m` faster with, `ppbench compare --run --budget`
whether the second of two commits is as fast as the first. `--burning` processes start and stop at
random beside it. A line is printed for each try, and the medians and counts at the end.

Two values of `model.partition` that mean the same, `["uniform", [4, 4]]`, are a comparison of
equals. Two commits train a model of many small layers, and differ by their number: with
`--commits '18, 19'` the second does some 5 % more work, with the same number twice they are equal.
`model.preset = ["tower:build", "tower:more"]` are such a pair in one process, of 18 and 19 layers.
An uneven partition is no such difference where two cores share an execution unit: what one rank
waits, the other is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.controls import burning
from ppbench.errors import ExitCode

MODEL = "model.preset"
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
{microbatches}
seq_len = {seq_len}
{model}
[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = {steps}
{grid}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--grid", default='schedule = ["afab", "1f1b"]', help="TOML of two values")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="fewest steps of a launch")
    parser.add_argument("--commits", default="", help="numbers of layers of two commits")
    parser.add_argument(
        "--burning", type=int, default=0, help="processes that burn a core at times"
    )
    parser.add_argument("--seed", type=int, default=7, help="of their times")
    asked = parser.parse_args()
    key, _, listed = asked.grid.partition("=")
    axis = key.strip().replace(".", "_")
    pair = tomllib.loads(f"pair = {listed}")["pair"]
    microbatches = f"num_microbatches = {asked.microbatches}"
    preset = "tower:build" if asked.commits else "llama-8m"
    text = SWEEP.format(
        microbatches="" if axis == "num_microbatches" else microbatches,
        seq_len=asked.seq_len,
        steps=asked.steps,
        model="" if key.strip() == MODEL else f'model.preset = "{preset}"',
        grid="" if asked.commits else f"[grid]\n{asked.grid}",
    )
    seconds, verdicts = [], Counter[str]()
    beside = burning(asked.seed, asked.burning) if asked.burning else contextlib.nullcontext()
    with beside:
        for number in range(asked.tries):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "answers.toml").write_text(text)
                (folder / "tower.py").write_text(TOWER.format(layers=18))
                began = time.monotonic()
                if asked.commits:
                    verdict, line = of_commits(folder, asked.commits, asked.budget)
                else:
                    verdict, line = of_settings(folder, key.strip(), pair, asked.budget)
                seconds.append(time.monotonic() - began)
            verdicts[verdict] += 1
            print(f"try {number}: {seconds[-1]:.0f} s, {line}", flush=True)
    print(f"median {statistics.median(seconds):.0f} s; second over first: {dict(verdicts)}")


def of_settings(folder: Path, key: str, pair: list[object], budget: str) -> tuple[str, str]:
    """The verdict of a sweep on the second value over the first, with its interval and answer.

    Two models do different work, so that a sweep asks nothing of them; it makes ten launches.
    """
    until = ("--set", "measure.launches=10") if key == MODEL else ("--budget", budget)
    out = run(folder, "sweep", "answers.toml", "--no-report", *until)
    base = str(pair[0]).replace(" ", "")
    words = ("--across", key, "--base", base, "--format", "json")
    changes = json.loads(run(folder, "compare", *words))["changes"]
    answer = out.rpartition("\n\n")[2].partition("\n")[0]
    verdict, line = of_speed(changes)
    return verdict, line if key == MODEL else f"{line}\n    {answer}"


def of_commits(folder: Path, layers: str, budget: str) -> tuple[str, str]:
    """The verdict of a comparison of two commits; also with its interval."""
    git = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")
    subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
    for number, count in enumerate(layers.split(",")):
        (folder / "tower.py").write_text(f"# {number}\n{TOWER.format(layers=int(count))}")
        subprocess.run([*git, "add", "tower.py", "answers.toml"], cwd=folder, check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", f"{number}"], cwd=folder, check=True)
    words = ("HEAD~1", "HEAD", "--run", "answers.toml", "--budget", budget, "--format", "json")
    return of_speed(json.loads(run(folder, "compare", *words))["changes"])


def of_speed(changes: list[dict[str, Any]]) -> tuple[str, str]:
    """The verdict on tokens/s, and a line with its interval."""
    speed = next(change for change in changes if change["metric"] == "tokens_per_s")
    line = f"{speed['num_head']} launches, {speed['verdict']}"
    if speed["ratio_low"] is not None:
        line += f", {speed['ratio_low'] - 1:+.1%} to {speed['ratio_high'] - 1:+.1%}"
    return speed["verdict"], line


def run(folder: Path, *words: str) -> str:
    """Run a command of ppbench there, and return what it printed."""
    command = [sys.executable, "-m", "ppbench", *words, "--results", str(folder / "results")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, ExitCode.insufficient):
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
