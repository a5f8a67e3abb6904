"""Both sides launched until every case has its verdict, and what is said of it on the way.

    before       which change can be found with how many launches, and how long they take
    each look    how many verdicts are decided
    at the end   why no more launches are made

The noise is that of stored launches, else that of the launches until the first look; so is the
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from ppbench.comparison.known import Known
from ppbench.comparison.lines import Comparison, Stopped
from ppbench.display.metrics import METRICS
from ppbench.display.units import counted, duration, percent
from ppbench.errors import UsageError
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Noise
from ppbench.judge.forecast import found_by
from ppbench.judge.looks import Looks
from ppbench.judge.noise import noise_of_launches
from ppbench.judge.verdicts import LEVEL, SPEED

MOST_LAUNCHES = 12
"""Launches of a side after which an open answer stays open, unless another number is asked for."""
_MOST_SHOWN = 4
"""Numbers of launches for which the change that they find is said."""

Result = TypeVar("Result")


def measure_until_decided(
    most_launches: int,
    bring_to: Callable[[int], float],
    judged: Callable[[Looks], Result],
    compared_of: Callable[[Result], Comparison],
    metrics: Collection[str],
    known: Known,
    say: Callable[[str], None],
) -> tuple[Result, Stopped]:
    """Launch and look until the verdicts of these metrics are decided, or no more may be made.

    `bring_to` launches both sides until each has so many launches, and returns how many rounds of
    both sides it has made; `judged` is the result of a look, and `compared_of` its comparison.
    Raises UsageError for fewer launches than a verdict needs.
    """
    if most_launches < FEWEST_LAUNCHES:
        raise UsageError(
            f"--max-launches {most_launches} launches; a verdict needs {FEWEST_LAUNCHES} launches "
            "of each side"
        )
    planned, began_s = tuple(range(FEWEST_LAUNCHES, most_launches + 1)), time.monotonic()
    if known.noise is None:
        say(
            "no noise of these cases is known yet: which change can be found is said after "
            f"{planned[0]} launches of each side"
        )
    else:
        reach = reach_text(known.noise, planned, known.num_cases)
        say(f"{reach} (noise of stored launches {percent(known.noise.deviation)})")
    if known.round_s is not None:
        say(_time_text(known.round_s, planned))
    for place, num_launches in enumerate(planned):
        num_rounds = bring_to(num_launches)
        looks = Looks(planned[: place + 1], most_launches)
        result = judged(looks)
        compared = compared_of(result)
        if place == 0:  # what could not be said beforehand
            sides = [
                side[SPEED].dropna().tolist()
                for pairing in compared.pairings.values()
                for side in (pairing.base, pairing.head)
            ]
            level = None if known.noise else noise_of_launches(METRICS[SPEED], sides)
            if level is not None:
                reach = reach_text(level.noise, planned, known.num_cases)
                say(f"{reach} (noise so far {percent(level.noise.deviation)})")
            if num_rounds and len(planned) > 1:
                say(_time_text((time.monotonic() - began_s) / num_rounds, planned))
        changes = [line.change for line in compared.lines if line.metric.name in metrics]
        num_decided = sum(change.is_decided for change in changes)
        say(
            f"after {counted(num_launches, 'launch')} of each side: {num_decided} of "
            f"{counted(len(changes), 'verdict')} decided"
        )
        if num_decided == len(changes):
            break
    stopped = Stopped(looks, num_decided == len(changes))
    say(stop_text(stopped))
    return result, stopped


def stop_text(stopped: Stopped) -> str:
    """Why no more launches are made: `decided after 4 launches of each side, ...`."""
    looks = stopped.looks
    num = f"{counted(looks.last, 'launch')} of each side"
    level, most = (f"{share:.2%}".replace("%", " %") for share in (looks.spent(LEVEL), LEVEL))
    spent = f"{counted(len(looks.counts), 'look')}; {level} of {most} spent on false claims"
    if stopped.is_decided:
        return f"stopped: decided after {num} ({spent})"
    return f"stopped: --max-launches {looks.most} reached, and not decided ({spent})"


def reach_text(noise: Noise, planned: Sequence[int], num_cases: int) -> str:
    """The change that is found with some numbers of launches: `a change of 1.2 % with 5, ...`."""
    found = []
    for place, num in enumerate(planned):
        level = Looks(tuple(planned[: place + 1]), planned[-1]).level(LEVEL) / num_cases
        found.append((num, found_by(noise, num, level)))
    step = max(1, -(-(len(found) - 1) // (_MOST_SHOWN - 1)))
    shown = [*found[:-1:step], found[-1]]
    parts = [f"{percent(change)} with {num}" for num, change in shown]
    return f"launches of each side find, in 80 % of comparisons, a change of {', '.join(parts)}"


def _time_text(round_s: float, planned: Sequence[int]) -> str:
    least, most = (duration(round_s * num) for num in (planned[0], planned[-1]))
    return (
        f"one launch of both sides takes about {duration(round_s)}: {least} until the first "
        f"look, at most {most} for {planned[-1]}"
    )
