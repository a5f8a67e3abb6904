"""Both sides launched until every case has its verdict, and what is said of it on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from ppbench.comparison.lines import Comparison, Stopped
from ppbench.display.changes import beyond_reach
from ppbench.display.commands import BUDGET, LAUNCHES, larger_budget
from ppbench.display.units import counted, duration
from ppbench.errors import UsageError
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.forecast import MOST_LAUNCHES as MOST_FORECAST
from ppbench.judge.forecast import launches_needed
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import LEVEL

MOST_LAUNCHES = 12
"""Launches of a side after which an open answer stays open, unless another number is asked for."""


class Budget:
    """The time that measuring may take, from now on; without seconds it is not bounded."""

    def __init__(self, seconds: float = 0.0, now: Callable[[], float] | None = None) -> None:
        self.seconds, self._now = seconds, now or time.monotonic
        self._began_s = self._now()
        self.is_spent = False
        """Whether something was not begun, as it would have ended too late."""

    @property
    def passed_s(self) -> float:
        return self._now() - self._began_s

    @property
    def left_s(self) -> float:
        return max(self.seconds - self.passed_s, 0.0)

    def allows(self, next_s: float) -> bool:
        """Whether something that takes so long would end in time."""
        self.is_spent = bool(self.seconds) and self.passed_s + next_s > self.seconds
        return not self.is_spent


def measure_until_decided(
    most_launches: int,
    bring_to: Callable[[int], float],
    compared: Callable[[Looks], Comparison],
    metrics: Collection[str],
    say: Callable[[str], None],
    budget_s: float = 0.0,
    at_once: int = 1,
) -> Comparison:
    """Launch and look until the verdicts of these metrics are decided, or no more may be made.

    With a budget no launch is begun that would end after it, but for the first three. Between two
    looks come as many launches `at_once` as are best made in one start, or as the budget allows:
    how many it allows in all follows from the time of the first three.

    `bring_to` launches both sides until each has so many launches, and returns how many rounds of
    both sides it has made; `compared` is the comparison of a look. Raises UsageError for fewer
    launches than a verdict needs.
    """
    if most_launches < FEWEST_LAUNCHES:
        raise UsageError(
            f"--max-launches {most_launches} launches; a verdict needs {FEWEST_LAUNCHES} launches "
            "of each side"
        )
    budget, round_s, num_launches, counts = Budget(budget_s), 0.0, FEWEST_LAUNCHES, list[int]()
    affordable = most_launches
    while True:
        began_s = budget.passed_s
        num_rounds = bring_to(num_launches)
        if num_rounds:  # of the last start: the first one prepares work trees besides
            round_s = (budget.passed_s - began_s) / num_rounds
        if not counts and budget_s and round_s:
            affordable = min(affordable, num_launches + math.ceil(budget.left_s / round_s))
        counts.append(num_launches)
        looks = Looks(tuple(counts), affordable)
        comparison = compared(looks)
        if len(counts) == 1 and num_rounds and num_launches < affordable:
            most = duration(round_s * (affordable - num_launches))
            say(
                f"one launch of both sides takes about {duration(round_s)}: at most {most} more "
                f"for {affordable}"
            )
        changes = [line.change for line in comparison.lines if line.metric.name in metrics]
        num_decided = sum(change.is_decided for change in changes)
        say(
            f"after {counted(num_launches, 'launch')} of each side: {num_decided} of "
            f"{counted(len(changes), 'verdict')} decided"
        )
        if num_decided == len(changes) or num_launches == most_launches:
            break
        num = min(at_once, affordable - num_launches)
        if budget_s and round_s:
            num = min(num, max(1, int(budget.left_s / round_s)))
        budget.is_spent = num == 0
        if budget.is_spent or not budget.allows(num * round_s):
            break
        num_launches += num
    opened = [change for change in changes if not change.is_decided]
    to_decide, why_not = dict[str, str](), ""
    if opened:
        known = [change for change in opened if change.has_interval]
        needed = [launches_needed(change, num_tests=len(changes)) for change in known]
        num = max([(looks.last if budget.is_spent else most_launches) + 1, *filter(None, needed)])
        if None in needed:
            why_not = beyond_reach(known, MOST_FORECAST)
        else:
            if num > most_launches:
                to_decide[LAUNCHES] = str(num)
            if budget.is_spent or 0 < budget_s < num * round_s:
                to_decide[BUDGET] = larger_budget(num, round_s, budget_s)
    stopped = Stopped(looks, not opened, budget.is_spent, to_decide, why_not)
    say(stop_text(stopped))
    return replace(comparison, stopped=stopped)


def stop_text(stopped: Stopped) -> str:
    """Why no more launches are made: `decided after 4 launches of each side, ...`."""
    looks = stopped.looks
    num = f"{counted(looks.last, 'launch')} of each side"
    level, most = (f"{share:.2%}".replace("%", " %") for share in (looks.spent(LEVEL), LEVEL))
    chance = f"{level} chance of a false claim so far, {most} at most"
    spent = f"{counted(len(looks.counts), 'look')}; {chance}"
    if stopped.is_decided:
        return f"stopped: decided after {num} ({spent})"
    why = f"--max-launches {looks.most} reached"
    if stopped.is_spent:
        why = f"--budget is spent after {num}"
    reach = f"; it is decided {stopped.why_not}" if stopped.why_not else ""
    return f"stopped: {why}, and not decided ({spent}){reach}"
