"""Schedules that split the backward, over 1f1b, on both runtimes.

    python -m benchmarks.zero_bubble [--rounds 10]

The ratio is tokens per second over those of 1f1b on the same runtime, on two ranks with the demo's
model. The figures have the simulated ratio, where a forward and each half of a backward take
equally long.
"""

from __future__ import annotations

from benchmarks.outcome import Figure, Ratio, parser, write
from benchmarks.pipelines import DEMO, Arm, measure, steps
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Turns
from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES, build_program
from ppbench.config.feasibility import SPLIT as SPLIT_OF_TORCH

AGAINST = "1f1b"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    settings, surroundings = options.parse_args(), read_surroundings()
    names = [name for name in SCHEDULES if _is_split(name)]
    ours = [Arm("engine", name) for name in (AGAINST, *names)]
    theirs = [Arm("torch", name) for name in (AGAINST, *SPLIT_OF_TORCH)]
    turns = measure(DEMO, [*ours, *theirs], settings.rounds)
    ratios = [_over(turns, arm) for arm in (*ours, *theirs) if arm.schedule != AGAINST]
    write(
        "zero_bubble",
        settings,
        surroundings,
        ratios,
        [*map(_simulated, names), *steps(turns, DEMO)],
    )


def _is_split(schedule: str) -> bool:
    return any(a.op is Op.I for row in build_program(schedule, 2, 8).actions for a in row)


def _over(turns: Turns, arm: Arm) -> Ratio:
    against = Arm(arm.runtime, AGAINST)
    return turns.ratio(f"{arm} over {AGAINST}", str(against), str(arm))


def _simulated(schedule: str) -> Figure:
    ratio = DEMO.limit(AGAINST) / DEMO.limit(schedule)
    return Figure(f"{schedule} over {AGAINST}, simulated", (ratio,))


if __name__ == "__main__":
    main()
