"""Launches of several choices in rounds, until it is known how far the first is from the best.

    three rounds of all --who is beaten is set aside--> a round of the rest --...--> decided

The first choice is as good as the best if no other can be better by more than the resolution; it is
beaten if another is faster. Every round is a look at the same launches (`ppbench.judge.lead`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ppbench.judge.differences import FEWEST_LAUNCHES, Difference, Ratio, group
from ppbench.judge.evidence import Evidence, Launches, Metric
from ppbench.judge.lead import Lead, Regret, lead
from ppbench.judge.looks import Looks
from ppbench.judge.noise import noise_of_launches

STEP = Metric("step_ns", higher_is_better=False, in_points=False)
"""The measured figure: a predicted step has its optimizer too."""
Steps = Sequence[Sequence[float]]
"""The steps of each arm's launches, the first choice's first; none of an arm that failed."""


class Stop(StrEnum):
    """Why no more launches are made."""

    decided = "decided"
    most = "most launches reached"
    failed = "launches failed"


class Finding(StrEnum):
    """What launches say about the first choice."""

    best = "best"
    within = "within 2 %"
    slower = "slower"
    open = "open"


class SetAside(NamedTuple):
    """An arm that is not measured further, after how many launches of each, and why."""

    arm: int
    num_launches: int
    best: int  # the arm that is quicker
    longer: Ratio | None  # the arm's step over that of the quicker one; None where its runs failed


@dataclass(frozen=True)
class Outcome:
    """The launches of all arms, and what they say; no regret where the first choice failed."""

    steps: Steps
    finding: Finding = Finding.open
    regret: Regret | None = None

    def stop(self, most: int) -> Stop:
        """Why no more launches are made, where each arm may have this many."""
        if self.regret is None:
            return Stop.failed
        if self.finding is not Finding.open:
            return Stop.decided
        return Stop.most if max(map(len, self.steps)) >= most else Stop.failed


def race(
    measured: Callable[[Sequence[int], int], Steps],
    num_arms: int,
    most: int,
    on_set_aside: Callable[[SetAside], None] = lambda _: None,
    on_first_rounds: Callable[[Steps], None] = lambda _: None,
) -> Outcome:
    """Measure arms in rounds until it is decided how far the first one is from the best.

    `measured` is given arms and a number of launches, brings each of these arms to so many, and
    returns the steps of all arms. No arm has more than `most` launches. `on_first_rounds` is given
    the launches before any arm is set aside.
    """
    going = list(range(num_arms))
    outcome = Outcome([()] * num_arms)
    first = min(FEWEST_LAUNCHES, most)
    for count in range(first, most + 1):
        known = sum(map(len, outcome.steps))
        steps = measured(going, count)
        if known == 0:
            on_first_rounds(steps)
        if not steps[0] or sum(map(len, steps)) == known:
            return Outcome(steps, outcome.finding, outcome.regret if steps[0] else None)
        found = lead_of(steps, Looks(tuple(range(first, count + 1)), most))
        quickest = next((arm for arm in found.arms if steps[arm]), 0)
        for arm in [arm for arm in going if arm not in (0, quickest)]:
            change = found.changes.get((arm, quickest))
            if not steps[arm]:
                going.remove(arm)
                on_set_aside(SetAside(arm, count, quickest, None))
            elif change is not None and arm in found.beaten_by(quickest):
                going.remove(arm)
                on_set_aside(SetAside(arm, count, quickest, change.ratio))
        outcome = Outcome(steps, *_finding(found, steps))
        if outcome.finding is not Finding.open:
            break
    return outcome


def lead_of(steps: Steps, looks: Looks) -> Lead:
    """What the launches say of all pairs of arms that have any."""
    pairs = {
        (arm, rival): Evidence(Launches(tuple(steps[rival])), Launches(tuple(steps[arm])))
        for arm in range(len(steps))
        for rival in range(arm + 1, len(steps))
        if steps[arm] and steps[rival]
    }
    return lead(STEP, pairs, len(steps), looks)


def _finding(found: Lead, steps: Steps) -> tuple[Finding, Regret]:
    """What is known of the first arm, against those whose runs did not fail."""
    rivals = [arm for arm in range(1, len(steps)) if steps[arm]]
    regret = found.regret(0, rivals)
    if all(arm in found.beaten_by(0) for arm in rivals):
        return Finding.best, Regret(0.0, 0.0, 0.0, None)
    if regret.high <= found.resolution * (1 + 1e-9):
        return Finding.within, regret
    return (Finding.open if 0 in found.best else Finding.slower), regret


def interval_of(steps: Steps, arm: int) -> Ratio:
    """The geometric mean of an arm's launches with its 95 % interval, by the spread of all."""
    own, level = group(np.log(steps[arm])), noise_of_launches(STEP, steps)
    freedom = 0.0 if level is None else level.noise.freedom
    error = 0.0 if level is None else level.noise.deviation / math.sqrt(own.num)
    mean = Difference(own.mean, error, freedom)
    return Ratio(*np.exp([mean.estimate, *mean.ends()]).tolist())
