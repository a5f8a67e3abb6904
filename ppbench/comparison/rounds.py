"""Rounds that two sides share, from the rows of their runs.

Runs of one start of processes, or of sets of processes that were conducted together, have the same
`process_start`. In a round that both have, each had a turn within moments of the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pandas as pd

from ppbench.display.units import is_missing
from ppbench.judge.evidence import Rounds

Starts = Mapping[str, Mapping[int, float]]
"""A figure by process start and round."""


def shared_rounds(base: pd.DataFrame, head: pd.DataFrame, metric: str) -> tuple[Rounds, ...]:
    """Return the rounds of each start in which both sides had turns, in the order of time.

    The sides are rows of `runs`. There are none for a metric that rounds do not have.
    """
    return shared(by_start(base, metric), by_start(head, metric))


def shared(base: Starts, head: Starts) -> tuple[Rounds, ...]:
    """Return the rounds of each start that both have."""
    found = []
    for start, of_base in base.items():
        of_head = head.get(start, {})
        common = [number for number in of_base if number in of_head]
        if common:
            values = (tuple(own[number] for number in common) for own in (of_base, of_head))
            found.append(Rounds(*values))
    return tuple(found)


def by_start(runs: pd.DataFrame, metric: str) -> Starts:
    """Return a metric by process start and round, of runs in the order of time."""
    starts: dict[str, dict[int, float]] = {}
    if "rounds" not in runs or "process_start" not in runs:
        return starts
    columns = (runs[name] for name in ("run_id", "process_start", "rounds"))
    known = [row for row in zip(*columns, strict=True) if not any(map(is_missing, row))]
    for _, start, text in sorted(known):
        rounds = json.loads(text)
        own = starts.setdefault(str(start), {})
        own |= {
            number: float(value)
            for number, value in zip(rounds["round"], rounds.get(metric, []), strict=False)
            if value is not None
        }
    return starts
