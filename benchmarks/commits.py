"""This work tree and another commit in turns: what a change costs whoever trains or runs commands.

    python -m benchmarks.commits COMMIT [--parts steps commands] [--seconds 600]

`steps`: both trees sweep the small model of `benchmarks.against_torch`, and emulated ranks whose
actions take next to no time. A round is a sweep of each. `commands`: both run the same commands on
stores with the same runs. These ratios belong to a commit, not to the page, and are printed only.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.against_torch import SMALL, write_model
from benchmarks.claims import Goal
from benchmarks.commands import make_compacted
from benchmarks.loop import in_turns, ppbench, seconds_of, swept, within, work_tree
from benchmarks.rows import NO_STARTS, ROOT, Row
from ppbench.judge.evidence import Rounds

NEW, OLD = "new", "old"
MOST = Goal(at_most=1.02)
COMPUTING = """\
name = "computing"
device = "cpu"
schedule = "1f1b"
world_size = 2
seq_len = 32
num_microbatches = 16
model.preset = "{model}"
measure = {{warmup_steps = 2, max_warmup_steps = 2, steps = 20}}
"""
SHORT = """\
name = "short"
device = "emulated"
world_size = 2
seq_len = 8
model.preset = "llama-tiny"
emulated = {F_ms = 0.01, I_ms = 0.01, W_ms = 0.01}
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 20}
[grid]
schedule = ["afab", "1f1b"]
num_microbatches = [4, 16]
"""
WORDS = (
    "--help",
    "ls",
    "ls --results large --limit 20",
    "ls --results large --where world_size=2",
    "explain last",
    "report",
    "timeline last",
    "sweep sweep.toml --rerun --no-report",
)


def steps(trees: Mapping[str, Path], asked: argparse.Namespace) -> Iterator[Row]:
    """Compare the steps of sweeps; a round is a launch of each side."""
    with tempfile.TemporaryDirectory() as name:
        model, numbers = write_model(Path(name) / "model", SMALL), count()
        for text in (COMPUTING.format(model=model), SHORT):

            def step_ns(tree: Path, text: str = text) -> float:
                runs = swept(Path(name) / f"{next(numbers)}", text, tree=tree)
                return float(runs["step_ns"].mean())

            arms: dict[str, Callable[[], float]]
            arms = {side: partial(step_ns, tree) for side, tree in trees.items()}
            turns = in_turns(arms, within(asked.seconds / 2, count(), fewest=3))
            launches = [
                Rounds((old,), (new,)) for old, new in zip(turns[OLD], turns[NEW], strict=True)
            ]
            kind = text.partition('"')[2].partition('"')[0]
            yield Row.ratio(f"step, {kind}: new over old", launches, MOST)


def commands(trees: Mapping[str, Path], asked: argparse.Namespace) -> Iterator[Row]:
    """Compare whole commands; both sides have stores of their own."""
    with tempfile.TemporaryDirectory() as name:
        for side, tree in trees.items():
            swept(Path(name) / side, SHORT, tree=tree)
            make_compacted(Path(name) / side / "large", 20_000)
        for words in WORDS:
            arms = {
                side: partial(
                    seconds_of,
                    partial(ppbench, *words.split(), folder=Path(name) / side, tree=tree),
                )
                for side, tree in trees.items()
            }
            turns = in_turns(arms, within(asked.seconds / len(WORDS), count(), fewest=4))
            rounds = [Rounds(tuple(turns[OLD]), tuple(turns[NEW]))]
            yield Row.ratio(f"{words}: new over old", rounds, MOST, starts=NO_STARTS)


PARTS = {"steps": steps, "commands": commands}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("commit", help="the commit that this work tree is compared with")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--seconds", type=float, default=600, help="of a part")
    asked = options.parse_args()
    with work_tree(asked.commit) as old:
        for part in asked.parts:
            for row in PARTS[part]({NEW: ROOT, OLD: old}, asked):
                print(row, flush=True)


if __name__ == "__main__":
    main()
