"""The time of the fixed reference beside a run's steps, from its repetitions on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceTimes:
    """The reference of one rank."""

    name: str  # equal where times compare on one machine
    times_ns: tuple[tuple[int, ...], ...]  # of the repetitions before the steps, and after them
    share: float  # all that it cost, over the time of the measured steps
    sleeps: bool = False  # an emulated rank's: it does not compute


def reference_figures(ranks: Sequence[ReferenceTimes | None]) -> dict[str, object]:
    """Return the columns of `runs` about the reference; all null where a rank has none.

    A pipeline is as slow as its slowest rank, and so is its reference. A disturbance may begin or
    end during the steps, so that the times before and after them count alike. Of each place, the
    median repetition counts, or the fastest one of a rank that sleeps: a single sleep may end late
    by chance on any machine, which the median step of an emulated run does not show.
    """
    known = [rank for rank in ranks if rank is not None and all(rank.times_ns)]
    if not known or len(known) < len(ranks):
        return dict.fromkeys(("reference", "reference_ns", "reference_spread", "reference_share"))
    places = list(zip(*(rank.times_ns for rank in known), strict=True))
    typical: Callable[[Sequence[int]], float] = min if known[0].sleeps else statistics.median
    slowest_ns = [max(map(typical, place)) for place in places]

    def deviation(times_ns: Sequence[int]) -> float:
        """The relative median absolute deviation of a rank's repetitions."""
        middle = statistics.median(times_ns)
        return statistics.median(abs(time_ns - middle) for time_ns in times_ns) / middle

    return {
        "reference": known[0].name,
        "reference_ns": statistics.fmean(slowest_ns),
        "reference_spread": statistics.fmean(max(map(deviation, place)) for place in places),
        "reference_share": max(rank.share for rank in known),
    }
