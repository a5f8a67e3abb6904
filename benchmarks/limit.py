"""The engine against the physical limit of each schedule on two cores.

    python -m benchmarks.limit [--rounds 8] [--max-rounds 0]

The limit of 1f1b is a step of the unsplit model on one thread x (m + p - 1) / (m p). For every
other schedule it is that step x the share that the simulator predicts when a forward and each half
of a backward take equally long, and messages and everything else take no time. Here p = 2 and m =
8, and computing takes most of the time (hidden 512, 512 tokens). The unsplit step is timed while
the second core is idle. The last ratio is how much slower it is when both cores run one: they share
a cache and the memory, which no schedule can change.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.outcome import MAX_ROUNDS, Figure, Goal, Ratio, parser, write
from benchmarks.pipelines import COMPUTE_BOUND, TWO_UNSPLIT, UNSPLIT, Arm, measure, steps
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Aim, Rounds, Turns
from engine.plan.schedules.registry import SCHEDULES

GOAL = Goal(at_least=0.95)
TOGETHER = 3
"""Schedules per round: with more of them, more time passes between them and the unsplit step."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--max-rounds", type=int, default=0, help=MAX_ROUNDS)
    options.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    settings, surroundings = options.parse_args(), read_surroundings()
    arms = [Arm("engine", name) for name in settings.schedules]
    groups = [arms[first : first + TOGETHER] for first in range(0, len(arms), TOGETHER)]
    ratios: list[Ratio] = []
    figures: list[Figure] = []
    for group in (*groups, [Arm("torch", "1f1b"), TWO_UNSPLIT]):
        aims = tuple(map(_aim, (arm for arm in group if arm.runtime == "engine")))
        rounds = Rounds(settings.rounds, settings.max_rounds, aims)
        turns = measure(COMPUTE_BOUND, [*group, UNSPLIT], rounds)
        ratios += rounds.ratios(turns) or [_ratio(turns, arm) for arm in group]
        figures += steps(turns, COMPUTE_BOUND)
    write("limit", settings, surroundings, ratios, figures)


def _aim(arm: Arm) -> Aim:
    """Tokens per second of an arm over those at its limit."""
    part = COMPUTE_BOUND.limit(arm.schedule)
    return Aim(f"{arm} over its limit", str(UNSPLIT), str(arm), GOAL, part)


def _ratio(turns: Turns, arm: Arm) -> Ratio:
    """The ratio of an arm without a goal."""
    if arm == TWO_UNSPLIT:
        return turns.ratio("two unsplit steps at once over one", str(arm), str(UNSPLIT))
    return replace(_aim(arm).ratio(turns), goal=None)


if __name__ == "__main__":
    main()
