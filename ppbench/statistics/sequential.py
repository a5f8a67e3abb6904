"""Verdicts that hold although one looks after every few launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ppbench.statistics.noise import detectable_change
from ppbench.statistics.verdicts import Change, Metric, Noise, Pair, Verdict, compare

_DECIDED = {Verdict.faster, Verdict.slower, Verdict.same}


def looks(most_launches: int, fewest: int = 3) -> tuple[int, ...]:
    """The numbers of launches a side after which one looks."""
    return tuple(range(fewest, most_launches + 1))


def judge(metric: Metric, pairs: Sequence[Pair], look: int, looks: Sequence[int]) -> list[Change]:
    """The verdicts at a look (its index); their error rates hold over all looks together."""
    changes = compare(metric, pairs)
    return [_after_many_looks(change, len(looks)) for change in changes]


def _after_many_looks(change: Change, num_looks: int) -> Change:
    p = None if change.p is None else min(1.0, change.p * num_looks)
    is_lost = p is not None and p > 0.01 and change.verdict in {Verdict.faster, Verdict.slower}
    return replace(change, p=p, verdict=Verdict.unclear if is_lost else change.verdict)


def is_decided(changes: Sequence[Change]) -> bool:
    """Whether no further launch can be expected to change a verdict."""
    return all(change.verdict in _DECIDED for change in changes)


def forecast(
    noise: Noise, looks: Sequence[int], floor: float, num_cases: int
) -> list[tuple[int, float]]:
    """For each look, the launches a side and the change that 80 % of comparisons find by then."""
    return [(num, detectable_change(noise, num, floor, num_cases)) for num in looks]
