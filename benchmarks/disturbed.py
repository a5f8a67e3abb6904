"""Whether verdicts hold on this machine while another job starts and stops at random.

    python -m benchmarks.disturbed [--launches 150] [--seed 25] [--ranks emulated] [--keep DIR]

Each launch runs two cases on two ranks, one of which takes 5 % longer a step. Ranks that train have
20 microbatches in place of 19, which with the bubble is one time in twenty more; emulated ones have
longer stages. Another job burns a core meanwhile for some seconds at a time, at times and by shares
that are drawn, so that some launches are disturbed. Ranks that sleep do not feel that, however many
jobs there are: beside them it has a higher priority, on all cores, for which it takes root.

Every ten launches that follow one another are two sides of five, the even ones and the odd ones.
That gives comparisons of a case with itself, and comparisons of the two cases, all judged by the
step's time as `ppbench compare` judges them, with each launch's controls. Sides of five that are
drawn from all launches tell more than those that follow one another, but overlap.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.attribution import ppbench
from benchmarks.controls import burning
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.comparison.evidence import in_order, slowdowns_by_run
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Evidence, Launches
from ppbench.judge.slowdowns import NOT_KNOWN, is_disturbed
from ppbench.judge.verdicts import Verdict, judge
from ppbench.store import Store

A_SIDE = 5
STEP = "step_ns"
NUM_DRAWN = 1000
FALSE, FOUND = Goal(at_most=0.01), Goal(at_least=0.9)


@dataclass(frozen=True)
class Setup:
    """The two cases, and the other job."""

    sweep: str
    idle_s: float  # mean lengths of the times without and with the other job, both exponential
    busy_s: float
    num_burnt: int  # cores
    shares: tuple[float, float]  # of their time, at least and at most
    is_urgent: bool = False


CASES = """
name = "disturbed"
device = "{device}"
world_size = 2
schedule = "1f1b"
data.source = "synthetic"
measure = {{warmup_steps = 1, max_warmup_steps = 2, steps = {steps}, launches = LAUNCHES}}
"""
STAGE_MS = (4.0, 4.2)
EMULATED = (
    CASES.format(device="emulated", steps=10)
    + f"""
num_microbatches = 4
model.preset = "llama-tiny"
[grid]
emulated.F_ms = {list(STAGE_MS)}
"""
    + "".join(
        f"""
[[override]]
where = {{"emulated.F_ms" = {stage_ms}}}
set = {{"emulated.I_ms" = {stage_ms}, "emulated.W_ms" = {stage_ms}}}
"""
        for stage_ms in STAGE_MS
    )
)
TRAINED = (
    CASES.format(device="cpu", steps=5)
    + """
seq_len = 16
model.preset = "llama-8m"
[grid]
num_microbatches = [19, 20]
"""
)
SETUPS = {
    "trained": Setup(TRAINED, idle_s=40.0, busy_s=6.0, num_burnt=1, shares=(0.3, 1.0)),
    "emulated": Setup(EMULATED, 30.0, 4.0, os.cpu_count() or 1, (0.4, 0.7), is_urgent=True),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--launches", type=int, default=150, help="at least ten")
    options.add_argument("--seed", type=int, default=25, help="of the other job's times")
    options.add_argument("--ranks", choices=SETUPS, default="emulated")
    options.add_argument("--keep", type=Path, help="a folder for the store; one there is judged")
    settings, surroundings = options.parse_args(), read_surroundings()
    if settings.launches < 2 * A_SIDE:
        options.error(f"--launches {settings.launches}: expected {2 * A_SIDE} or more")
    with contextlib.ExitStack() as stack:
        folder = settings.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "runs").is_dir():
            launch(folder, SETUPS[settings.ranks], settings.launches, settings.seed)
        sides = sides_of(folder)
    draw = random.Random(settings.seed)
    write("disturbed", settings, surroundings, ratios(sides, draw), figures(sides))


def launch(folder: Path, setup: Setup, launches: int, seed: int) -> None:
    """Run the sweep into the folder, beside the other job."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "disturbed.toml"
    file.write_text(setup.sweep.replace("LAUNCHES", str(launches)))
    if setup.is_urgent and os.geteuid():
        raise SystemExit("--ranks emulated: needs root, for a job of higher priority")
    job = setup.num_burnt, setup.busy_s, setup.idle_s, setup.shares
    with burning(seed, *job, is_urgent=setup.is_urgent):
        ppbench("sweep", str(file), "--results", str(folder), "--no-report")


@dataclass(frozen=True)
class Side:
    """Launches of one case, in order."""

    figures: tuple[float, ...]
    slowdowns: tuple[float, ...]  # of the machine; NaN where unknown
    num_disturbed: int


@dataclass(frozen=True)
class Sides:
    """The launches of both cases."""

    fast: Side
    slow: Side

    def pairs(self, base: Side, head: Side) -> list[Evidence]:
        """Even launches of one against odd ones of the other, five of each, and the reverse."""
        size, both = 2 * A_SIDE, []
        for start in range(0, len(base.figures) - size + 1, size):
            even, odd = range(start, start + size, 2), range(start + 1, start + size, 2)
            both += [_pair(base, head, *order) for order in ((even, odd), (odd, even))]
        return both

    def drawn(self, base: Side, head: Side, draw: random.Random) -> list[Evidence]:
        """Five launches of one against five others of the other, drawn many times."""
        drawn = (draw.sample(range(len(base.figures)), 2 * A_SIDE) for _ in range(NUM_DRAWN))
        return [_pair(base, head, ten[:A_SIDE], ten[A_SIDE:]) for ten in drawn]


def _pair(base: Side, head: Side, of_base: Sequence[int], of_head: Sequence[int]) -> Evidence:
    def at(values: Sequence[float], places: Sequence[int]) -> tuple[float, ...]:
        return tuple(values[place] for place in places)

    return Evidence(
        Launches(at(base.figures, of_base), at(base.slowdowns, of_base)),
        Launches(at(head.figures, of_head), at(head.slowdowns, of_head)),
    )


def sides_of(folder: Path) -> Sides:
    """Read both cases' launches; those that failed are left out."""
    runs = Store(folder).runs()
    runs = runs[runs["status"] == "ok"].sort_values("created_at")
    slowdowns = slowdowns_by_run(runs)

    def side(rows: pd.DataFrame) -> Side:
        disturbed = [is_disturbed(slowdowns.get(run_id, NOT_KNOWN)) for run_id in rows["run_id"]]
        known = in_order(rows, slowdowns) or (math.nan,) * len(rows)
        return Side(tuple(rows[STEP]), known, sum(disturbed))

    medians_ns = runs.groupby("case_id")[STEP].transform("median")
    is_fast = medians_ns == medians_ns.min()
    return Sides(*(side(rows) for rows in _of_both(runs[is_fast], runs[~is_fast])))


def _of_both(*cases: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of the launches that have both cases, so that places are launches."""
    shared = set.intersection(*(set(rows["launch"]) for rows in cases))
    return (rows[rows["launch"].isin(shared)] for rows in cases)


def ratios(sides: Sides, draw: random.Random) -> Iterator[Ratio]:
    """Shares of the comparisons with each verdict."""
    fast, slow = sides.fast, sides.slow
    alike = sides.pairs(fast, fast)[::2] + sides.pairs(slow, slow)[::2]
    yield from _shares("", alike, sides.pairs(fast, slow))
    alike = sides.drawn(fast, fast, draw) + sides.drawn(slow, slow, draw)
    yield from _shares("drawn, ", alike, sides.drawn(fast, slow, draw))


def _shares(start: str, alike: Sequence[Evidence], slower: Sequence[Evidence]) -> Iterator[Ratio]:
    same, found = judged(alike), judged(slower)
    yield _share(f"{start}{len(alike)} of one case, slower", same, Verdict.slower, FALSE)
    yield _share(f"{start}{len(alike)} of one case, faster", same, Verdict.faster)
    yield _share(f"{start}{len(slower)} of two cases, slower", found, Verdict.slower, FOUND)


def _share(name: str, verdicts: Sequence[Verdict], of: Verdict, goal: Goal | None = None) -> Ratio:
    share = float(np.mean([verdict is of for verdict in verdicts]))
    return Ratio(name, (share,), goal=goal)


def judged(pairs: Sequence[Evidence]) -> list[Verdict]:
    """Verdicts as `ppbench compare` has them, each comparison on its own."""
    return [judge(METRICS[STEP], [pair])[0].verdict for pair in pairs]


def figures(sides: Sides) -> Iterator[Figure]:
    """Figures that describe the launches."""
    measures: dict[str, Callable[[Side], float]] = {
        "deviation of the faster half, %": lambda side: 100 * _deviation(side.figures),
        "launches over 5 % slower than the median, %": lambda side: 100 * _slow(side.figures),
        "launches with disturbed controls, %": lambda side: (
            100 * side.num_disturbed / len(side.figures)
        ),
    }
    for name, measure in measures.items():
        yield Figure(name, (measure(sides.fast), measure(sides.slow)))
    medians = np.median(sides.fast.figures), np.median(sides.slow.figures)
    yield Figure("effect, %", (100 * float(medians[1] / medians[0] - 1),))


def _deviation(figures: Sequence[float]) -> float:
    """The standard deviation that a normal distribution with this faster half would have."""
    logs = np.log(figures)
    return float(np.quantile(np.median(logs) - logs, 0.841))


def _slow(figures: Sequence[float]) -> float:
    return float(np.mean(np.asarray(figures) > np.median(figures) * 1.05))


if __name__ == "__main__":
    main()
