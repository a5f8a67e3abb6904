"""`ppbench report` and `ppbench explain` of a sweep of 100 stored runs, over another commit's.

    python -m benchmarks.reports [--before 4f56b36] [--rounds 6] [--max-rounds 0]
                                 [--explained 10] [--stored FOLDER]

The commit `--before` runs the sweep, emulated, whose schema both commits read. Whole commands of
both are then timed in turns, from their start to their end: the report of the sweep; `explain` of
one run; and `explain` of all runs of the sweep. The old command explains one run at a time: it is
run for `--explained` of the runs, and its time is multiplied. With `--stored`, a folder in which
such a sweep left its `results` before, no sweep is run.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.commit_commands import run_command
from benchmarks.commit_steps import work_tree
from benchmarks.outcome import MAX_ROUNDS, Goal, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Aim, Rounds, in_turns, seconds_of, timed_in_turns

LEAST = Goal(at_least=5)
NAME = "hundred"
SWEEP = f"""\
name = "{NAME}"
device = "emulated"
seq_len = 64

[model]
preset = "llama-8m"

[emulated]
F_ms = 2
I_ms = 2
W_ms = 2

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 10

[grid]
schedule = ["afab", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"]
num_microbatches = [4, 8, 12, 16, 24]
world_size = [2, 4]
model.seed = [1, 2]
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--before", default="4f56b36", help="the commit that is compared with")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--max-rounds", type=int, default=0, help=MAX_ROUNDS)
    options.add_argument("--explained", type=int, default=10, help="runs that it explains in turn")
    options.add_argument("--stored", type=Path, help="the folder of an earlier sweep")
    settings, surroundings = options.parse_args(), read_surroundings()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        old = stack.enter_context(work_tree(settings.before))
        if settings.stored:
            shutil.copytree(settings.stored / "results", folder / "results")
        else:
            (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")
            run_command(old, folder, "sweep", "sweep.toml", "--no-report")
        ids = [run["run_id"] for run in json.loads(_listed(folder))]
        new = functools.partial(run_command, ROOT, folder)
        before = functools.partial(run_command, old, folder)
        whole: dict[str, Callable[[], object]] = {
            "report, new": functools.partial(new, "report"),
            "report, old": functools.partial(before, "report"),
            "explain of one run, new": functools.partial(new, "explain", "last"),
            "explain of one run, old": functools.partial(before, "explain", "last"),
        }
        of_commands = _rounds(settings, "report", "explain of one run")
        commands = timed_in_turns(whole, of_commands)
        every = len(ids) // settings.explained
        of_all = _rounds(settings, "explain of all runs")
        explained = in_turns(
            {
                "explain of all runs, new": lambda: seconds_of(lambda: new("explain", NAME)),
                "explain of all runs, old": lambda: (
                    every
                    * seconds_of(lambda: [before("explain", run_id) for run_id in ids[::every]])
                ),
            },
            of_all,
            num_warmup=0,
        )
    report, one_run = of_commands.ratios(commands)
    ratios = [report, *of_all.ratios(explained), one_run]
    write("reports", settings, surroundings, ratios, [*commands.figures(), *explained.figures()])


def _rounds(settings: argparse.Namespace, *names: str) -> Rounds:
    """The rounds of some commands, each of which has a goal."""
    aims = (Aim(f"{name}: old over new", f"{name}, old", f"{name}, new", LEAST) for name in names)
    return Rounds(settings.rounds, settings.max_rounds, tuple(aims))


def _listed(folder: Path) -> str:
    return run_command(ROOT, folder, "ls", "--limit", "100", "--format", "json")


if __name__ == "__main__":
    main()
