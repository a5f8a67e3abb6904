"""The engine over torch.distributed.pipelining, schedule by schedule, in three regimes.

    python -m benchmarks.runtimes [--overhead-rounds 40] [--demo-rounds 16] [--compute-rounds 12]
                                  [--max-rounds 0]

For each schedule that both support, the ratio is tokens per second of the engine over tokens per
second of torch, on two ranks: a step of torch over a step of the engine, each once in a round. The
three regimes are overhead-bound (hidden 128, 4 layers, 32 tokens, 16 microbatches), the demo's
model (256 tokens, 8 microbatches), and compute-bound (hidden 512, 512 tokens, 4 microbatches). The
unsplit model is timed in the same rounds and gives the time lost per action: the time of a step
above its schedule's limit (`benchmarks.limit`), over the number of computations of a rank. It
consists of the runtime's own work, waiting for messages, and the slowdown of two ranks that compute
at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.outcome import MAX_ROUNDS, Figure, Goal, Ratio, parser, write
from benchmarks.pipelines import (
    COMPUTE_BOUND,
    DEMO,
    OVERHEAD_BOUND,
    UNSPLIT,
    Arm,
    Regime,
    lost_per_action,
    measure,
    steps,
)
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Aim, Rounds
from ppbench.config.feasibility import SPLIT, TORCH_SCHEDULES

EACH = Goal(at_least=1.0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--overhead-rounds", type=int, default=40)
    options.add_argument("--demo-rounds", type=int, default=16)
    options.add_argument("--compute-rounds", type=int, default=12)
    options.add_argument("--max-rounds", type=int, default=0, help=MAX_ROUNDS)
    options.add_argument("--schedules", nargs="+", default=list(TORCH_SCHEDULES))
    settings, surroundings = options.parse_args(), read_surroundings()
    compute_bound = dataclasses.replace(COMPUTE_BOUND, num_microbatches=4)  # half the time
    regimes = (
        (OVERHEAD_BOUND, settings.overhead_rounds),
        (DEMO, settings.demo_rounds),
        (compute_bound, settings.compute_rounds),
    )
    ratios: list[Ratio] = []
    figures: list[Figure] = []
    for regime, num_rounds in regimes:
        most = settings.max_rounds
        parts = [_over_torch(regime, name, num_rounds, most) for name in settings.schedules]
        of_regime = [ratio for ratio, _ in parts]
        ratios += [*of_regime, *_means(regime, of_regime)]
        figures += [figure for _, of_schedule in parts for figure in of_schedule]
    write("runtimes", settings, surroundings, ratios, figures)


def _over_torch(
    regime: Regime, schedule: str, num_rounds: int, most: int
) -> tuple[Ratio, list[Figure]]:
    arms = ours, theirs = Arm("engine", schedule), Arm("torch", schedule)
    name = f"{regime.name}, {schedule}: engine over torch"
    rounds = Rounds(num_rounds, most, (Aim(name, str(theirs), str(ours), EACH),))
    turns = measure(regime, [*arms, UNSPLIT], rounds)
    (ratio,) = rounds.ratios(turns)
    lost = [lost_per_action(turns, regime, arm) for arm in arms]
    return ratio, [*steps(turns, regime), *lost]


def _means(regime: Regime, ratios: Sequence[Ratio]) -> list[Ratio]:
    """Geometric means over all schedules, and over those that split the backward, if any."""
    goal = Goal(at_least=1.15) if regime is OVERHEAD_BOUND else None
    means = [Ratio.geometric_mean(f"{regime.name}: geometric mean", ratios, goal)]
    split = [ratio for ratio in ratios if any(f" {name}:" in ratio.name for name in SPLIT)]
    if split:
        name = f"{regime.name}: geometric mean of zero bubble"
        means.append(Ratio.geometric_mean(name, split, Goal(at_least=1.05)))
    return means


if __name__ == "__main__":
    main()
