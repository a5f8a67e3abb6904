"""Commands of this work tree and of another commit in turns: what a change costs whoever runs them.

    python -m benchmarks.commit_commands COMMIT [--rounds 12] [--runs 20000]

Both sides have a store of their own with the same runs, run the same sweep and draw the same runs,
as whole processes from their start to their end. The sweep is emulated and its actions take a
millisecond, so that what is compared is the cost of a case beside its steps. A command may take at
most 2 % longer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.commit_steps import work_tree
from benchmarks.outcome import Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Turns, timed_in_turns

MOST = Goal(at_most=1.02)
PPBENCH = "from ppbench.cli import main; main()"
SWEEP = """\
name = "short"
device = "emulated"
world_size = 2
seq_len = 8

[model]
preset = "llama-tiny"

[emulated]
F_ms = 1
I_ms = 1
W_ms = 1

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 3

[grid]
schedule = ["afab", "1f1b"]
num_microbatches = [2, 4]
"""
LARGE = "import sys; from pathlib import Path; from benchmarks.store import make_compacted; "
LARGE += "make_compacted(Path(sys.argv[1]), int(sys.argv[2]))"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("commit", help="the commit that this work tree is compared with")
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--runs", type=int, default=20_000, help="runs of the large store")
    settings, surroundings = options.parse_args(), read_surroundings()
    compared: dict[str, Turns] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {"new": ROOT, "old": stack.enter_context(work_tree(settings.commit))}
        for side, tree in sides.items():
            (folder / side).mkdir()
            (folder / side / "short.toml").write_text(SWEEP, encoding="utf-8")
            run_python(tree, folder / side, LARGE, "large", str(settings.runs))
            run_python(tree, folder / side, PPBENCH, "sweep", "short.toml", "--no-report")
        for name, words in _commands().items():
            arms: dict[str, Callable[[], object]] = {
                f"{name}, {side}": functools.partial(
                    run_python, tree, folder / side, PPBENCH, *words
                )
                for side, tree in sides.items()
            }
            compared[name] = timed_in_turns(arms, settings.rounds)
            print(_ratio(name, compared[name]), flush=True)
    ratios = [_ratio(name, turns) for name, turns in compared.items()]
    figures = [figure for turns in compared.values() for figure in turns.figures()]
    write("commit_commands", settings, surroundings, ratios, figures)


def _ratio(name: str, turns: Turns) -> Ratio:
    return turns.ratio(f"{name}: new over old", f"{name}, new", f"{name}, old", MOST)


def _commands() -> dict[str, list[str]]:
    return {
        "--help": ["--help"],
        "ls": ["ls"],
        "ls of a large store": ["ls", "--results", "large", "--limit", "20"],
        "ls --where of a large store": ["ls", "--results", "large", "--where", "world_size=2"],
        "explain": ["explain", "last"],
        "report": ["report"],
        "timeline": ["timeline", "last"],
        "sweep": ["sweep", "short.toml", "--rerun", "--no-report"],
    }


def run_python(tree: Path, folder: Path, code: str, *words: str) -> None:
    """Run Python code of a work tree in a folder, with these arguments."""
    subprocess.run(
        [sys.executable, "-c", code, *words],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )


if __name__ == "__main__":
    main()
