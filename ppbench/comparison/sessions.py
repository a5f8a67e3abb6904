"""Sessions: launches made close in time, which share whatever drifts on a machine day by day.

    09:00 09:05 09:10          14:00 14:05     launches of either side, by the time they ended
    `---- session 1 ----'      `- session 2 -'

A session ends with a break of more than `BREAK` without a launch, or `LONGEST` after its first
launch: one that goes on for a day has the drift of that day in it. Times are instants, so neither a
time zone nor summer time makes a session; nor does a restart of the workers, since what drifts
(temperature, the host's memory, neighbours) outlives them. Where the clock was set back, launches
count at the time that it showed.

From the launches that share a session follow the noise between launches, from those that do not the
drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pandas as pd

from ppbench.comparison.launches import states_of
from ppbench.judge.evidence import UNKNOWN, Metric, Noise
from ppbench.judge.noise import drift_of, noise_of_launches

BREAK = timedelta(hours=4)
"""The longest break between two launches of one session."""
LONGEST = timedelta(hours=12)
"""The longest time between the first launch of a session and its last."""
FEWEST_FOR_NOISE = 10
"""Launches of one commit and session that show a noise on which verdicts may rest."""


def number_sessions(moments: Sequence[datetime | None]) -> list[int]:
    """The number of each moment's session, from 0 in the order of time; the order given is free."""
    known = sorted({moment for moment in moments if moment is not None})
    numbers: dict[datetime | None, int] = {None: UNKNOWN}
    number, first, last = -1, None, None
    for moment in known:
        is_new = first is None or last is None or moment - last > BREAK or moment - first > LONGEST
        if is_new:
            number, first = number + 1, moment
        numbers[moment], last = number, moment
    return [numbers[moment] for moment in moments]


def moments_of(runs: pd.DataFrame) -> list[datetime | None]:
    """When each run ended, UTC; None where that is not known."""
    made = pd.to_datetime(runs["created_at"], utc=True, format="ISO8601", errors="coerce")
    return [None if pd.isna(moment) else moment.to_pydatetime().astimezone(UTC) for moment in made]


def drift_in(runs: pd.DataFrame, metric: Metric) -> Noise | None:
    """The drift between sessions, from launches of one case that are ok, on one machine.

    Launches of one state of the code are compared with each other; what several states say is
    pooled. None where no state was measured in two sessions.
    """
    by_state = _figures_by_state(runs, metric)
    numbers = {number for sessions in by_state for number in sessions}
    return drift_of(metric, [list(sessions.values()) for sessions in by_state], len(numbers))


def noise_in(runs: pd.DataFrame, metric: Metric) -> Noise | None:
    """The noise between launches, from launches of one case that are ok, on one machine.

    Launches of one state of the code and one session are compared with each other; what they say
    is pooled. None where that is worth less than `FEWEST_FOR_NOISE` launches.
    """
    if len(runs) < FEWEST_FOR_NOISE:
        return None
    by_state = _figures_by_state(runs, metric)
    groups = [figures for sessions in by_state for figures in sessions.values()]
    level = noise_of_launches(metric, groups)
    if level is None or level.noise.freedom + 1 < FEWEST_FOR_NOISE:
        return None
    return level.noise


def _figures_by_state(runs: pd.DataFrame, metric: Metric) -> list[dict[int, list[float]]]:
    """The figures of each state of the code, by session; those of unknown times are left out."""
    usable = runs[runs[metric.name].notna()]
    if not metric.in_points:
        usable = usable[usable[metric.name] > 0]
    by_state: dict[object, dict[int, list[float]]] = {}
    for number, state, figure in zip(
        number_sessions(moments_of(usable)), states_of(usable), usable[metric.name], strict=True
    ):
        if number != UNKNOWN:
            by_state.setdefault(state, {}).setdefault(number, []).append(float(figure))
    return list(by_state.values())
