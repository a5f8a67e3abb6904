"""Whether verdicts hold on this machine while another job starts and stops at random.

    python -m benchmarks.disturbed [--launches 150] [--seed 25] [--keep DIR]

Each launch runs two cases on two emulated ranks, one with stages 5 % slower than the other's. A job
that fills all cores runs meanwhile for some seconds at a time, at times that are drawn, so that
some launches are disturbed. Every ten launches that follow one another are two sides of five, the
even ones and the odd ones. That gives comparisons of a case with itself, and comparisons of the two
cases, both judged as `ppbench compare` judges them, with each launch's controls. Beside them is
Welch's test alone, at the same level and floor: the verdicts before launches were discounted.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.attribution import ppbench
from benchmarks.controls import burning
from benchmarks.outcome import Figure, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.comparison.slowdowns import in_order, slowdowns_by_run
from ppbench.display.metrics import METRICS
from ppbench.statistics.significance import group, welch
from ppbench.statistics.slowdowns import NOT_KNOWN, is_disturbed
from ppbench.statistics.verdicts import FLOOR, LEVEL, SPEED, Pair, Verdict, compare
from ppbench.store import Store

A_SIDE = 5
SLOWER = 1.05
STAGE_MS = 4.0
IDLE_S, BUSY_S = 14.0, 2.0
"""Mean lengths of the times without and with the other job; both are exponential."""
SWEEP = f"""
name = "disturbed"
device = "emulated"
world_size = 2
num_microbatches = 4
schedule = "1f1b"
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {{warmup_steps = 1, steps = 10, launches = LAUNCHES}}
[grid]
emulated.F_ms = [{STAGE_MS}, {STAGE_MS * SLOWER}]
""" + "".join(
    f"""
[[override]]
where = {{"emulated.F_ms" = {forward_ms}}}
set = {{"emulated.I_ms" = {forward_ms}, "emulated.W_ms" = {forward_ms}}}
"""
    for forward_ms in (STAGE_MS, STAGE_MS * SLOWER)
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--launches", type=int, default=150, help="at least ten")
    options.add_argument("--seed", type=int, default=25, help="of the other job's times")
    options.add_argument("--keep", type=Path, help="a folder for the store; one there is judged")
    settings, surroundings = options.parse_args(), read_surroundings()
    with contextlib.ExitStack() as stack:
        folder = settings.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "runs").is_dir():
            cores = os.cpu_count() or 1
            with burning(settings.seed, 2 * cores, BUSY_S, IDLE_S):
                launch(folder, settings.launches)
        sides = sides_of(folder)
    write("disturbed", settings, surroundings, ratios(sides), figures(sides))


def launch(folder: Path, launches: int) -> None:
    """Run the sweep into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "disturbed.toml"
    file.write_text(SWEEP.replace("LAUNCHES", str(launches)))
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

    def pairs(self, base: Side, head: Side) -> list[Pair]:
        """Even launches of one against odd ones of the other, five of each, and the reverse."""
        size, both = 2 * A_SIDE, []
        for start in range(0, len(base.figures) - size + 1, size):
            places = slice(start, start + size, 2), slice(start + 1, start + size, 2)
            both += [_pair(base, head, *order) for order in (places, places[::-1])]
        return both


def _pair(base: Side, head: Side, of_base: slice, of_head: slice) -> Pair:
    return Pair(
        base.figures[of_base],
        head.figures[of_head],
        base_slowdowns=base.slowdowns[of_base],
        head_slowdowns=head.slowdowns[of_head],
    )


def sides_of(folder: Path) -> Sides:
    """Read both cases' launches; those that failed are left out."""
    runs = Store(folder).runs()
    runs = runs[runs["status"] == "ok"].sort_values("created_at")
    slowdowns = slowdowns_by_run(runs)

    def side(rows: pd.DataFrame) -> Side:
        disturbed = [is_disturbed(slowdowns.get(run_id, NOT_KNOWN)) for run_id in rows["run_id"]]
        known = in_order(rows, slowdowns) or (math.nan,) * len(rows)
        return Side(tuple(rows[SPEED]), known, sum(disturbed))

    is_fast = runs["planned_step_ns"] == runs["planned_step_ns"].min()
    return Sides(side(runs[is_fast]), side(runs[~is_fast]))


def ratios(sides: Sides) -> Iterator[Ratio]:
    """Shares of the comparisons with each verdict."""
    alike = sides.pairs(sides.fast, sides.fast)[::2] + sides.pairs(sides.slow, sides.slow)[::2]
    slower = sides.pairs(sides.fast, sides.slow)
    for name, verdicts in (("", judged), ("Welch's test alone: ", judged_by_welch)):
        same, found = verdicts(alike), verdicts(slower)
        yield _share(f"{name}{len(alike)} of one case, slower", same, Verdict.slower)
        yield _share(f"{name}{len(alike)} of one case, faster", same, Verdict.faster)
        yield _share(f"{name}{len(slower)} of two cases, slower", found, Verdict.slower)


def _share(name: str, verdicts: Sequence[Verdict], of: Verdict) -> Ratio:
    return Ratio(name, (float(np.mean([verdict is of for verdict in verdicts])),))


def judged(pairs: Sequence[Pair]) -> list[Verdict]:
    """Verdicts as `ppbench compare` has them, each comparison on its own."""
    return [compare(METRICS[SPEED], [pair])[0].verdict for pair in pairs]


def judged_by_welch(pairs: Sequence[Pair]) -> list[Verdict]:
    """Verdicts of Welch's test on logarithms, beyond the floor."""
    return [_by_welch(np.log(pair.head), np.log(pair.base)) for pair in pairs]


def _by_welch(head: np.ndarray, base: np.ndarray) -> Verdict:
    difference = welch(group(head), group(base))
    if difference.p >= LEVEL or abs(difference.estimate) <= math.log1p(FLOOR):
        return Verdict.unclear
    return Verdict.faster if difference.estimate > 0 else Verdict.slower


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
    yield Figure("effect, %", (100 * float(medians[0] / medians[1] - 1),))


def _deviation(figures: Sequence[float]) -> float:
    """The standard deviation that a normal distribution with this upper half would have."""
    logs = np.log(figures)
    return float(np.quantile(logs - np.median(logs), 0.841))


def _slow(figures: Sequence[float]) -> float:
    return float(np.mean(np.asarray(figures) < np.median(figures) / 1.05))


if __name__ == "__main__":
    main()
