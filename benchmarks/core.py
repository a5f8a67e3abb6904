"""The walks over programs as arrays, over those of an earlier commit and over their goals.

    python -m benchmarks.core [--actions 1000000] [--rounds 6] [--before 4f56b36]
                              [--generated 10000000]

Each turn is a process of its own, ours and that of the earlier commit alternated. It makes a plan
of `interleaved_zb` on 8 ranks, and times, after one turn that is not counted (it loads the machine
code): the simulation with its proof that the plan is legal and never hangs (before: the check, then
the simulation), lowering with the proof of the rendezvous, and the simulation of 1,000 sets of
costs for a plan of 10⁴ computations. Machine code is compiled into an empty folder in the first
turn, and read from there in all others: what the first simulation takes longer than the next one is
what a user waits for it.

One more process tells what memory a plan takes (benchmarks.core_memory): it generates, checks,
lowers and simulates a plan of `--generated` computations.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import results_in_turns

GIT = shutil.which("git") or "git"
Taken = dict[str, float]
SIMULATED, LOWERED, MANY, LOADED = "simulate", "lower", "1,000 sets of costs", "first use"
SCRIPT = """
import json, random, sys, time
from engine.plan.lower import lower
from engine.plan.schedules.registry import build_program

is_ours = len(sys.argv) > 2
if is_ours:
    from engine.plan.predict import Durations, predict, uniform
    from engine.plan.period import Step, periods
    from engine.plan.walk import TransferModel, of_kinds
else:
    from engine.plan.rules import check
    from engine.plan.simulate import Durations, TransferModel, simulate as predict, uniform

def seconds_of(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

def plan(num_actions):
    return build_program("interleaved_zb", 8, max(1, num_actions // 384) * 8, 2)

program, transfers = plan(int(sys.argv[1])), TransferModel(latency_ns=1000)
durations, taken = uniform(program.placement, 3000, 3000, 3000), {}

def simulated():
    if not is_ours:
        check(program)
    return predict(program, durations, transfers).makespan_ns

if is_ours:
    first = seconds_of(simulated)
    lower(program)
    small, chance = plan(10_000), random.Random(0)
    costs = [[[chance.randrange(9999) for _ in range(16)] for _ in "FIW"] for _ in range(1000)]
    kinds = [Durations(*map(tuple, thirds)).by_kind(16) for thirds in costs]
    steps = lambda: (Step(small, [of_kinds(small, each)]) for each in kinds)
    taken["1,000 sets of costs"] = seconds_of(lambda: periods(steps()))
taken["simulate"], taken["lower"] = seconds_of(simulated), seconds_of(lambda: lower(program))
if is_ours:
    taken["first use"] = first - taken["simulate"]
print(json.dumps(taken))
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--actions", type=int, default=1_000_000)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--generated", type=int, default=10_000_000)
    options.add_argument("--before", default="4f56b36", help="The commit to compare with.")
    settings, surroundings = options.parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory(prefix="ppbench-core-") as name:
        tree, cache = Path(name) / "tree", Path(name) / "cache"
        git = [GIT, "worktree"]
        subprocess.run([*git, "add", "--detach", tree, settings.before], check=True, cwd=ROOT)
        try:
            compiling = _taken(ROOT, cache, settings.actions, is_ours=True)
            arms = {
                "ours": lambda: _taken(ROOT, cache, settings.actions, is_ours=True),
                "before": lambda: _taken(tree, cache, settings.actions, is_ours=False),
            }
            measured = results_in_turns(arms, settings.rounds, num_warmup=0)
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True, cwd=ROOT)
    ours, before = (
        {what: [taken[what] for taken in of_arm] for what in of_arm[0]}
        for of_arm in (measured["ours"], measured["before"])
    )
    ratios = [
        Ratio.of(f"{what} and its proofs, before over ours", before[what], ours[what], goal)
        for what, goal in ((SIMULATED, Goal(at_least=40)), (LOWERED, Goal(at_least=30)))
    ]
    ratios += [
        Ratio.of(f"{what}, over {most} s", ours[what], [most] * settings.rounds, Goal(at_most=1))
        for what, most in ((MANY, 1.0), (LOADED, 0.5))
    ]
    compiled = (compiling[LOADED] / 10,)
    ratios.append(Ratio("compiling to simulate, over 10 s", compiled, goal=Goal(at_most=1)))
    figures = [
        Figure(f"{arm}, {what}", tuple(values), "s")
        for arm, of_arm in (("ours", ours), ("before", before))
        for what, values in of_arm.items()
    ]
    ratio, figure = _memory(settings.generated, 4e9)
    ratios.append(ratio)
    figures.append(figure)
    write("core", settings, surroundings, ratios, figures)


def _memory(num_actions: int, most: float) -> tuple[Ratio, Figure]:
    """The bytes that a process takes for a plan, over the most that it may."""
    command = [sys.executable, "-m", "benchmarks.core_memory", str(num_actions)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    taken: Taken = json.loads(done.stdout)
    name = f"bytes, {num_actions:,} computations generated, over {most:,.0f}"
    return (
        Ratio(name, (taken["bytes"] / most,), goal=Goal(at_most=1, is_exact=True)),
        Figure(f"{num_actions:,} computations generated", (taken["s"],), "s"),
    )


def _taken(tree: Path, cache: Path, num_actions: int, *, is_ours: bool) -> Taken:
    """The seconds that a process took with the code of a work tree, by what it did."""
    command = [sys.executable, "-c", SCRIPT, str(num_actions), *(["ours"] if is_ours else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command, check=True, cwd=tree, env=environment, capture_output=True, text=True
    )
    taken: Taken = json.loads(done.stdout)
    return taken


if __name__ == "__main__":
    main()
