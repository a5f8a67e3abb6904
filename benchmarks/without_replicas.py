"""Steps of a pipeline without replicas over those of an earlier commit: the cost of their code.

    python -m benchmarks.without_replicas [--turns 10] [--steps 300] [--before 11faf1b]

Each turn is a process of its own, which starts two ranks and times steps of 1F1B: ours and that of
the commit before there were replicas, alternated. A turn counts by the median of its steps. Where
computations are short, the host's work for each action is most of a step.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.outcome import Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Turns, in_turns

GIT = shutil.which("git") or "git"
MOST = Goal(at_most=1.01)
SCRIPT = """
import json, statistics, sys
from benchmarks.pipelines import DEMO, OVERHEAD_BOUND, Arm, measure

regime = {"overhead-bound": OVERHEAD_BOUND, "demo": DEMO}[sys.argv[1]]
(steps,) = measure(regime, [Arm("engine", "1f1b")], int(sys.argv[2])).values.values()
print(json.dumps(statistics.median(steps)))
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=10)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--before", default="11faf1b", help="The commit to compare with.")
    settings, surroundings = options.parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory(prefix="ppbench-without-replicas-") as name:
        tree, git = Path(name) / "tree", [GIT, "worktree"]
        subprocess.run([*git, "add", "--detach", tree, settings.before], check=True, cwd=ROOT)
        try:
            measured = {
                regime: in_turns(_arms(tree, regime, num_steps), settings.turns)
                for regime, num_steps in (
                    ("overhead-bound", settings.steps),
                    ("demo", max(1, settings.steps // 10)),
                )
            }
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True, cwd=ROOT)
    ratios = [_ratio(regime, turns) for regime, turns in measured.items()]
    figures = [figure for turns in measured.values() for figure in turns.figures()]
    write("without_replicas", settings, surroundings, ratios, figures)


def _ratio(regime: str, turns: Turns) -> Ratio:
    ours, before = turns.values
    return turns.ratio(f"{regime} step, ours over before", ours, before, MOST)


def _arms(tree: Path, regime: str, num_steps: int) -> dict[str, Callable[[], float]]:
    trees = {"ours": ROOT, "before": tree}
    return {
        f"{regime}, {arm}": functools.partial(step_s, own, regime, num_steps)
        for arm, own in trees.items()
    }


def step_s(tree: Path, regime: str, num_steps: int) -> float:
    """The median step of a process with the code of a work tree."""
    command = [sys.executable, "-c", SCRIPT, regime, str(num_steps)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, check=True, cwd=tree, env=environment, capture_output=True, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
