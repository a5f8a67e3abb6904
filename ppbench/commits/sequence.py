"""Two commits launched in turns until the verdicts are reached."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ppbench.commits.bench import Rounds
from ppbench.comparison.known import known_of
from ppbench.comparison.lines import Compared
from ppbench.comparison.measurement import looks_of, measure_until_decided
from ppbench.statistics.until_decided import Look, Looks

Result = TypeVar("Result")


def judge_until_decided(
    rounds: Rounds,
    most_launches: int,
    judged: Callable[[Look], Result],
    compared_of: Callable[[Result], Compared[Any]],
    metrics: Collection[str],
) -> tuple[Result, Looks]:
    """Launch two commits until the verdicts of these metrics are decided. Raises UsageError."""
    bench = rounds.bench
    return measure_until_decided(
        looks_of(most_launches),
        rounds.bring_to,
        judged,
        compared_of,
        metrics,
        known_of(bench.sweep, bench.results, num_sides=2),
        bench.progress.say,
    )
