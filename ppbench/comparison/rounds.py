"""Rounds that two sides share, from the rows of their runs, and what starts of processes decide.

Runs of one start of processes, or of sets of processes that were conducted together, have the same
`process_start`. In a round that both have, each had a turn within moments of the other.

A start decides something for each arm (where its memory lies, on which core it runs), and so for
the difference of two arms, whichever they are. So every start in which some arms took turns tells
of it, as long as the machine is the same. Each arm has a part in one difference of a launch, so
that differences are independent.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping

import pandas as pd

from ppbench.comparison.launches import Key, states_of
from ppbench.comparison.sessions import moments_of, number_sessions
from ppbench.display.metrics import METRICS
from ppbench.display.units import is_missing
from ppbench.judge.evidence import Noise, Rounds
from ppbench.judge.noise import noise_of_rounds
from ppbench.judge.verdicts import SPEED

MOST_STARTS = 200
"""Starts that are looked at, the newest ones."""
FEWEST_STARTS = 4
"""Further starts of the same two arms, over all pairs, that tell what starts decide."""

Starts = Mapping[str, Mapping[int, float]]
"""A figure by process start and round."""


def shared_rounds(base: pd.DataFrame, head: pd.DataFrame, metric: str) -> tuple[Rounds, ...]:
    """Return the rounds of each start in which both sides had turns, in the order of time.

    The sides are rows of `runs`. There are none for a metric that rounds do not have.
    """
    return shared(by_start(base, metric), by_start(head, metric))


def rounds_beside(base: pd.DataFrame, others: pd.DataFrame, metric: str) -> dict[Hashable, Rounds]:
    """Return the rounds of each launch that took turns with one of `base`, by its row.

    A metric that rounds do not have counts as one round.
    """
    found: dict[Hashable, Rounds] = {}
    for index, start in others["process_start"].dropna().items():
        own, beside = others.loc[[index]], base[base["process_start"] == start]
        if len(beside):
            figures = ((float(one[metric].iloc[-1]),) for one in (beside, own))
            found[index] = next(iter(shared_rounds(beside, own, metric)), Rounds(*figures))
    return found


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


def starts_in(runs: pd.DataFrame) -> Noise | None:
    """The noise of starts, from rows of `runs` that are ok and were made on alike machines.

    None where too few starts of the same arms and session are known.
    """
    others = runs[runs["rounds"].notna() & runs["process_start"].notna()].copy()
    newest = sorted(set(others["process_start"]))[-MOST_STARTS:]
    others = others[others["process_start"].isin(newest)]
    if others.empty:
        return None
    others["session"] = number_sessions(moments_of(others))
    others["state"] = states_of(others)
    twice = others.groupby(["process_start", "state"]).cumcount()  # `noise` has two arms of a state
    others["arm"] = [(*state, str(at)) for state, at in zip(others["state"], twice, strict=True)]
    groups: dict[tuple[Key, Key, int], list[Rounds]] = {}
    for _, own in others.sort_values(["process_start", "arm"]).groupby("process_start"):
        arms = list(own.drop_duplicates("arm")["arm"])
        for base, head in zip(arms[::2], arms[1::2], strict=False):
            of_base, of_head = (own[[arm == one for one in own["arm"]]] for arm in (base, head))
            for rounds in shared_rounds(of_base, of_head, SPEED):
                key = (base, head, int(own["session"].iloc[0]))
                groups.setdefault(key, []).append(rounds)
    if sum(len(group) - 1 for group in groups.values()) < FEWEST_STARTS:
        return None
    return noise_of_rounds(METRICS[SPEED], list(groups.values())).starts
