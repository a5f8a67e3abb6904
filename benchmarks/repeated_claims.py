"""How often true and false claims hold when they are measured again.

    python -m benchmarks.repeated_claims [--comparisons 2000]

Made-up launches, five a side, with normal noise between them. First come claims: comparisons of a
commit with a slower one, of which those count that say `slower`. Each is then measured again, with
the same change if it is a true claim, or with none. The second table has two sides that share
sessions which drift by 2 %, without a change between them: how often that is called one.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from ppbench.display.metrics import METRICS
from ppbench.statistics.drift import without_drift
from ppbench.statistics.replication import Outcome, judge_again
from ppbench.statistics.verdicts import SPEED, Change, Pair, Verdict, compare

LAUNCHES, FLOOR, DRIFT, NOISE = 5, 0.01, 0.02, 0.012
METRIC = METRICS[SPEED]
TRUE = ((0.003, FLOOR), (0.003, 0.02), (0.01, FLOOR), (0.01, 0.05))
"""Noise between launches, and by how much head is slower."""
FALSE = ((0.003, 0.02), (0.01, 0.02))
"""Noise, and what was claimed; nothing is true."""
SHARED = ((2, 2), (2, 5), (3, 3))
"""Sessions, and launches of each side in each."""


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--comparisons", type=int, default=2000)
    num = options.parse_args().comparisons
    draw = np.random.default_rng(1)
    for noise, slower in TRUE:
        print(
            f"noise {noise:.1%}, slower by {slower:.1%}: {_again(draw, noise, slower, slower, num)}"
        )
    for noise, slower in FALSE:
        counts = _again(draw, noise, slower, 0.0, num // 2)
        print(f"noise {noise:.1%}, nothing, claimed {slower:.1%}: {counts}")
    for sessions, each in SHARED:
        verdicts = Counter(_shared(draw, sessions, each) for _ in range(num))
        slower, faster = (verdicts[word] / num for word in (Verdict.slower, Verdict.faster))
        print(
            f"{sessions} sessions of {each} launches a side, no change: slower {slower:.2%}, "
            f"faster {faster:.2%}"
        )


def _again(draw: np.random.Generator, noise: float, claimed: float, true: float, num: int) -> str:
    """The outcomes of claims of which so much is true."""
    every = (_compared(draw, noise, claimed) for _ in range(num))
    claims = [change for change in every if change.verdict is Verdict.slower]
    counts = Counter(judge_again(METRIC, c, _compared(draw, noise, true)) for c in claims)
    shares = (f"{outcome} {counts[outcome] / max(len(claims), 1):.1%}" for outcome in Outcome)
    return f"{len(claims)} claims: {', '.join(shares)}"


def _compared(draw: np.random.Generator, noise: float, slower: float) -> Change:
    base, head = (
        tuple(np.exp(draw.normal(level, noise, LAUNCHES)).tolist())
        for level in (0.0, np.log1p(-slower))
    )
    return compare(METRIC, [Pair(base, head)])[0]


def _shared(draw: np.random.Generator, sessions: int, each: int) -> Verdict:
    """The verdict on two equal sides that were measured in the same sessions."""
    numbers = np.repeat(np.arange(sessions), each)
    levels = draw.normal(0, DRIFT, sessions)[numbers]
    base, head = (
        tuple(np.exp(levels + draw.normal(0, NOISE, len(numbers))).tolist()) for _ in range(2)
    )
    both = without_drift(METRIC, (base, head), (numbers.tolist(), numbers.tolist()))
    return compare(METRIC, [Pair(*both)])[0].verdict


if __name__ == "__main__":
    main()
