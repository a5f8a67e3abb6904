"""Rounds that two sides share, from the rows of their runs.

Runs of one start of processes, or of sets of processes that were conducted together, have the same
`process_start`. In a round that both have, each had a turn within moments of the other.
"""

from __future__ import annotations

import json

import pandas as pd

from ppbench.judge.evidence import Rounds


def shared_rounds(base: pd.DataFrame, head: pd.DataFrame, metric: str) -> tuple[Rounds, ...]:
    """Return the rounds of each start in which both sides had turns, in the order of time.

    The sides are rows of `runs`. There are none for a metric that rounds do not have.
    """
    sides = [_by_start(runs, metric) for runs in (base, head)]
    found = []
    for start, of_base in sides[0].items():
        of_head = sides[1].get(start, {})
        common = [number for number in of_base if number in of_head]
        if common:
            values = (tuple(own[number] for number in common) for own in (of_base, of_head))
            found.append(Rounds(*values))
    return tuple(found)


def _by_start(runs: pd.DataFrame, metric: str) -> dict[str, dict[int, float]]:
    """Return a metric by process start and round, of runs in the order of time."""
    starts: dict[str, dict[int, float]] = {}
    if "rounds" not in runs or "process_start" not in runs:
        return starts
    known = runs.dropna(subset=["rounds", "process_start"]).sort_values("run_id")
    for start, text in zip(known["process_start"], known["rounds"], strict=True):
        rounds = json.loads(text)
        values = rounds.get(metric, [])
        own = starts.setdefault(str(start), {})
        own |= {
            number: float(value)
            for number, value in zip(rounds["round"], values, strict=False)
            if value is not None
        }
    return starts
