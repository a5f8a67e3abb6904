"""Sessions: launches made close in time, which share whatever drifts on a machine day by day.

    09:00 09:05 09:10          14:00 14:05     launches of either side, by the time they ended
    `---- session 1 ----'      `- session 2 -'

A session ends with a break of more than `BREAK` without a launch, or `LONGEST` after its first
launch: one that goes on for a day has the drift of that day in it. Times are instants, so neither a
time zone nor summer time makes a session; nor does a restart of the workers, since what drifts
(temperature, the host's memory, neighbours) outlives them. Where the clock was set back, launches
count at the time that it showed.

From the launches that share a session follow the noise between launches, from those that do not the
drift. Launches that a verdict rests on would count twice as noise, so only others are taken: of
other commits, or made before those that are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from ppbench.comparison.launches import (
    COLUMNS,
    MEASURED_ALIKE,
    Key,
    keys_of,
    of_keys,
    states_of,
)
from ppbench.comparison.slowdowns import recorded, slowdowns_by_run
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import UNKNOWN, Metric, Noise
from ppbench.judge.noise import Drift, drift_of, noise_of_launches
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown, is_disturbed
from ppbench.store import Condition, Store

BREAK = timedelta(hours=4)
"""The longest break between two launches of one session."""
LONGEST = timedelta(hours=12)
"""The longest time between the first launch of a session and its last."""
FEWEST_FOR_NOISE = 10
"""Launches of one commit and session that show a noise on which verdicts may rest."""


@dataclass(frozen=True)
class Session:
    """Launches of one machine that were made close in time."""

    begin: datetime  # when its first launch ended, UTC
    end: datetime
    num_launches: int

    def __str__(self) -> str:
        is_one_day = self.begin.date() == self.end.date()
        end = f"{self.end:%H:%M}" if is_one_day else f"{self.end:%Y-%m-%d %H:%M}"
        return f"{self.begin:%Y-%m-%d %H:%M} to {end} UTC"


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


def sessions_of(moments: Sequence[datetime | None]) -> list[Session]:
    """The sessions in which these launches were made, in the order of time."""
    by_session: dict[int, list[datetime]] = {}
    for number, moment in zip(number_sessions(moments), moments, strict=True):
        if moment is not None:
            by_session.setdefault(number, []).append(moment)
    return [Session(min(some), max(some), len(some)) for _, some in sorted(by_session.items())]


def drift_in(runs: pd.DataFrame, metric: Metric) -> Drift | None:
    """The drift between sessions, from launches of one case that are ok, on one machine.

    Launches of one state of the code are compared with each other; what several states say is
    pooled. None where no state was measured in two sessions.
    """
    by_state = _figures_by_state(runs, metric)
    numbers = {number for sessions in by_state for number in sessions}
    return drift_of(metric, [list(sessions.values()) for sessions in by_state], len(numbers))


def drifts_like(
    launch: pd.DataFrame, metrics: Sequence[Metric], *stores: Store
) -> dict[str, Drift]:
    """The drift of each metric between sessions, from all launches that compare with this one.

    It is the only row of `launch`. The commit may be any.
    """
    row, key = launch.iloc[0], keys_of(launch)[0]
    columns = [*COLUMNS, *METRICS]
    same = [Condition(name, "=", str(row[name])) for name in MEASURED_ALIKE[:2]]
    rows = pd.concat([store.runs(columns, same) for store in dict.fromkeys(stores)])
    alike = of_keys(rows[rows["status"] == "ok"].drop_duplicates("run_id"), key)
    found = {metric.name: drift_in(alike, metric) for metric in metrics}
    return {name: drift for name, drift in found.items() if drift is not None}


def noise_in(runs: pd.DataFrame, metric: Metric) -> Noise | None:
    """The noise between launches, from launches of one case that are ok, on one machine.

    Launches of one state of the code and one session are compared with each other; what they say
    is pooled. None where that is worth less than `FEWEST_FOR_NOISE` launches.
    """
    by_state = _figures_by_state(runs, metric)
    groups = [figures for sessions in by_state for figures in sessions.values()]
    level = noise_of_launches(metric, groups)
    if level is None or level.noise.freedom + 1 < FEWEST_FOR_NOISE:
        return None
    return level.noise


def slowdowns_and_launches(
    stores: Iterable[Store], fingerprints: Collection[str], metrics: Sequence[Metric]
) -> tuple[dict[str, Slowdown], pd.DataFrame]:
    """How much each run of these machines was slowed, and all that are ok, with their figures."""
    columns = [*COLUMNS, *(metric.name for metric in metrics)]
    by_folder = {store.folder: store for store in stores}
    tables = [recorded(store, fingerprints, columns) for store in by_folder.values()]
    runs = pd.concat([table for table in tables if len(table)] or tables[:1])
    is_ok = runs["status"] == "ok"
    return slowdowns_by_run(*tables), runs[is_ok].drop_duplicates("run_id")


def noises_of(
    keys: Iterable[Key],
    metrics: Sequence[Metric],
    launches: pd.DataFrame,
    slowdowns: Mapping[str, Slowdown],
    compared: pd.DataFrame | None = None,
) -> dict[Key, dict[str, Noise]]:
    """The noise of each of these cases, from `launches` that are not among those `compared`."""
    usable = launches[launches["case_id"].isin({key[0] for key in keys})]
    if compared is not None and len(compared):
        states, first = set(states_of(compared)), str(compared["run_id"].min())
        # Later ones of a state that is compared may be compared at the next look.
        is_compared = [
            state in states and str(run_id) >= first
            for state, run_id in zip(states_of(usable), usable["run_id"], strict=True)
        ]
        usable = usable[~np.array(is_compared, dtype=bool)]
    is_slow = [is_disturbed(slowdowns.get(str(run_id), NOT_KNOWN)) for run_id in usable["run_id"]]
    undisturbed = usable[~np.array(is_slow, dtype=bool)]
    noises: dict[Key, dict[str, Noise]] = {}
    for key in keys:
        alike, quiet = (of_keys(runs, key) for runs in (usable, undisturbed))
        by_metric = {
            metric.name: noise_in(quiet if metric.slow_sign else alike, metric)
            for metric in metrics
        }
        noises[key] = {name: noise for name, noise in by_metric.items() if noise is not None}
    return noises


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
