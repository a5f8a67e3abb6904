"""The evidence of pairs of cases, the same for a report, a comparison, the gate and a plan.

    runs of a case: an arm          stores: Background (slowdowns, noise, drift, starts)
    arms, pairs  --evidence_of-->  an Evidence of each pair  --judge-->  a Change of each

All pairs of a family are judged together, so that a pair has one verdict wherever it is shown. A
family is a group of cases that do the same work (`comparison.groups`), the values of a row where an
axis changes the work, or the cases of two commits. Cases of a group share their noise as well.

Launches that a verdict rests on would count twice as noise, so only others are taken: of other
states of the code, or made before those that are judged.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import combinations
from typing import TypeVar

import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.launches import COLUMNS, CONTROLS, Key, key_text, keys_of, states_of
from ppbench.comparison.rounds import by_start, shared, starts_in
from ppbench.comparison.sessions import drift_in, moments_of, noise_in, number_sessions
from ppbench.config.kinds import seconds_of
from ppbench.display.cases import cautions_of, ok_runs
from ppbench.display.metrics import METRICS
from ppbench.display.units import is_missing
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import RESOLUTION, Evidence, Launches, Metric, Noise
from ppbench.judge.lead import with_shared_noise
from ppbench.judge.looks import LATER_SHARE, ONE_LOOK, Looks
from ppbench.judge.slowdowns import (
    NOT_KNOWN,
    UNKNOWN,
    Control,
    Slowdown,
    is_disturbed,
    slowdowns,
)
from ppbench.judge.verdicts import SPEED
from ppbench.store import Store

FORBIDDING_IN_TURNS = (
    Caution.oversubscribed.name,
    Caution.time_sliced.name,
    Caution.behind_plan.name,
)
"""Cautions that shift a throughput also where cases took turns."""
FORBIDDING = (
    *FORBIDDING_IN_TURNS,
    Caution.throttled.name,
    Caution.busy_machine.name,
    Caution.unsettled_steps.name,
)
"""Cautions that shift a throughput: no number of launches makes up for them."""
SPEEDS = (SPEED, "step_ns")
"""The metrics that starts of processes decide something for, and that cautions forbid."""
MOST_LAUNCHES = 20
"""Launches after which an open question stays open: starts of processes differ by too much."""
_MACHINE_AXES = ("device", "launch_threads_per_rank")  # which change the fingerprint of a run
_COLUMNS = (*COLUMNS, *CONTROLS, "process_start", "rounds", "measure_resolution", *METRICS)

Arm = TypeVar("Arm", bound=Hashable)


def with_columns(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows with every column that evidence is made of, null where it was not there."""
    return runs.reindex(columns=list(dict.fromkeys([*runs.columns, *_COLUMNS])))


def slowdowns_by_run(runs: pd.DataFrame) -> dict[str, Slowdown]:
    """The slowdown of each of these rows of `runs`, by its id; NaN where it is unknown.

    What is usual is found among those that are ok. Runs without a reference have what their
    counters say, if they have these.
    """
    if runs.empty:
        return {}
    runs = runs[runs["status"] == "ok"].drop_duplicates("run_id").sort_values("run_id")
    controls = []
    for row in runs.to_dict("records"):
        work, *numbers = (row.get(name) for name in CONTROLS)
        known = {
            name: UNKNOWN if is_missing(value) or value is pd.NA else float(str(value))
            for name, value in zip(CONTROLS[1:], numbers, strict=True)
        }
        machine = (key_text(row.get("fingerprint")), key_text(work))
        controls.append(Control(machine, key_text(row.get("case_id")), **known))
    by_place = slowdowns(controls)
    return dict(zip(map(str, runs["run_id"]), by_place, strict=True))


def in_order(runs: pd.DataFrame, by_run: Mapping[str, Slowdown]) -> tuple[float, ...] | None:
    """How much beyond what is usual these runs were slowed; None where all are unknown."""
    found = tuple(by_run.get(str(run_id), NOT_KNOWN).beyond_usual for run_id in runs["run_id"])
    return None if all(map(math.isnan, found)) else found


class Background:
    """Holds what stores tell of launches on the machines of those that are judged."""

    def __init__(self, judged: pd.DataFrame, stores: Iterable[Store] = ()) -> None:
        """Read the stores; `judged` are rows of `runs` that are ok, and count as stored too."""
        by_folder = {store.folder: store for store in stores}
        tables = [store.runs(_COLUMNS) for store in by_folder.values()]
        known = {run_id for table in tables for run_id in table["run_id"]}
        own = judged[~judged["run_id"].isin(known)].reindex(columns=list(_COLUMNS))
        tables = [table for table in (*tables, own) if len(table)] or [own]
        rows = ok_runs(pd.concat(tables).drop_duplicates("run_id").sort_values("run_id"))
        rows = rows[
            rows["fingerprint"].isin(set(judged["fingerprint"].dropna()))
            | rows["run_id"].isin(set(judged["run_id"]))
        ].reset_index(drop=True)
        self.slowdowns = slowdowns_by_run(rows)
        of_judged = rows[rows["run_id"].isin(judged["run_id"])]
        states, first = set(states_of(of_judged)), str(judged["run_id"].min())
        ids = list(map(str, rows["run_id"]))
        # Later ones of a state that is judged may be judged at the next look.
        is_judged = [
            state in states and one >= first
            for state, one in zip(states_of(rows), ids, strict=True)
        ]
        is_slow = [is_disturbed(self.slowdowns.get(one, NOT_KNOWN)) for one in ids]
        rows = rows.assign(is_judged=pd.Series(is_judged, rows.index, dtype=bool))
        rows = rows.assign(is_slow=pd.Series(is_slow, rows.index, dtype=bool))
        self._others = rows[~rows["process_start"].isin(of_judged["process_start"])]
        self._rows = dict(tuple(rows.groupby(pd.Series(keys_of(rows), rows.index, dtype=object))))
        self._none = rows.iloc[:0]
        self.noise = cache(self._noise)
        self.drift = cache(self._drift)

    @cached_property
    def starts(self) -> Noise | None:
        """The noise of the difference of two arms, between starts of their processes."""
        return starts_in(self._others)

    def _drift(self, key: Key, metric: Metric) -> Noise | None:
        """The drift between sessions, from all launches with this key, at any commit."""
        return drift_in(self._rows.get(key, self._none), metric)

    def _noise(self, key: Key, metric: Metric) -> Noise | None:
        """The noise between launches with this key, from those that are not judged."""
        runs = self._rows.get(key, self._none)
        left_out = runs["is_judged"] | (runs["is_slow"] & bool(metric.slow_sign))
        return noise_in(runs[~left_out], metric)

    def larger_drift(self, keys: Iterable[Key], metric: Metric) -> Noise | None:
        """The largest drift that is known of these cases."""
        drifts = (self.drift(key, metric) for key in keys)
        known = [drift for drift in drifts if drift is not None]
        return max(known, key=lambda drift: drift.deviation, default=None)

    def larger_noise(self, keys: Iterable[Key], metric: Metric) -> Noise | None:
        """The largest noise of these cases; None unless that of each is known."""
        noises = [self.noise(key, metric) for key in keys]
        known = [noise for noise in noises if noise is not None]
        if len(known) < len(noises):
            return None
        return max(known, key=lambda noise: noise.deviation, default=None)


def evidence_of(
    metric: Metric,
    arms: Mapping[Arm, pd.DataFrame],
    pairs: Sequence[tuple[Arm, Arm]],
    background: Background,
    *,
    shares_noise: bool,
) -> dict[tuple[Arm, Arm], Evidence]:
    """Collect what is known of pairs of arms, head and base, which are rows of `runs` that are ok.

    With `shares_noise` they do the same work, so that a pair whose noise is not known has that of
    the others.
    """
    facts = {arm: _Facts(metric, arms[arm], background) for arm in {a for p in pairs for a in p}}
    found = {}
    for pair in pairs:
        head, base = (facts[arm] for arm in pair)
        numbers = number_sessions([*base.moments, *head.moments])
        num_base = len(base.moments)
        paired = shared(base.rounds, head.rounds)
        kinds = FORBIDDING_IN_TURNS if paired else FORBIDDING
        carried = [name for own in (head, base) for name in own.forbidding if name in kinds]
        evidence = Evidence(
            base.launches(numbers[:num_base]),
            head.launches(numbers[num_base:]),
            paired=paired,
            noise=background.larger_noise((base.key, head.key), metric),
            starts=background.starts if metric.name in SPEEDS else None,
            resolution=max(base.resolution, head.resolution),
            cautions=tuple(dict.fromkeys(carried)),
        )
        if evidence.sessions_apart:  # the same whichever of the two is the base
            drift = background.larger_drift((base.key, head.key), metric)
            evidence = replace(evidence, drift=drift)
        found[pair] = evidence
    return with_shared_noise(metric, found) if shares_noise else found


class _Facts:
    """Holds what an arm brings into each of its pairs."""

    def __init__(self, metric: Metric, runs: pd.DataFrame, background: Background) -> None:
        known = with_figure(runs, metric)
        self.key = keys_of(runs.iloc[:1])[0]
        self.figures = tuple(map(float, known[metric.name]))
        self.slowdowns = in_order(known, background.slowdowns)
        self.moments = moments_of(known)
        self.rounds = by_start(runs, metric.name)
        self.forbidding = carried_by(runs, FORBIDDING) if metric.name in SPEEDS else ()
        self.resolution = resolution_of(runs)

    def launches(self, sessions: Sequence[int]) -> Launches:
        """Its launches, with the numbers of their sessions."""
        return Launches(self.figures, self.slowdowns, tuple(sessions))


def with_figure(runs: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """The launches that can be compared by a metric: they have it and, of a ratio, above 0."""
    figures = runs[metric.name]
    return runs[figures.notna() if metric.in_points else figures > 0]


def carried_by(runs: pd.DataFrame, kinds: Sequence[str]) -> tuple[str, ...]:
    """The cautions of these kinds that at least half of the launches carry."""
    launches = [cautions_of(row) for row in runs[["cautions"]].to_dict("records")]
    nums = {name: sum(name in own for own in launches) for name in kinds}
    return tuple(name for name, num in nums.items() if num and 2 * num >= len(launches))


def resolution_of(runs: pd.DataFrame) -> float:
    """Within how much the cases of these runs are the same: the largest that was asked for."""
    asked = runs["measure_resolution"].dropna()
    return float(max(asked)) if len(asked) else RESOLUTION


def comparable_pairs(arms: Mapping[Arm, pd.DataFrame]) -> list[tuple[Arm, Arm]]:
    """The pairs of arms of different cases that ran on one machine, each in one order.

    Another device or another number of threads is another machine, and an arm all the same.
    """
    facts = {}
    for arm, runs in arms.items():
        machines = {str(one) for one in runs["fingerprint"] if not is_missing(one)}
        case = runs.iloc[0]
        facts[arm] = machines, [case[name] for name in _MACHINE_AXES], case["case_id"]
    return [
        (arm, rival)
        for arm, rival in combinations(arms, 2)
        if facts[arm][2] != facts[rival][2]
        and (len(facts[arm][0] | facts[rival][0]) <= 1 or facts[arm][1] != facts[rival][1])
    ]


def looks_of(runs: pd.DataFrame) -> Looks:
    """The looks that were taken at runs of a sweep with a budget: after each launch from the third.

    How many launches its budget allows follows from the time of the first three alone.
    """
    good, budget_s = ok_runs(runs), budget_seconds(runs)
    num = 0 if good.empty else int(good.groupby("case_id").size().max())
    if not budget_s or num < FEWEST_LAUNCHES:
        return ONE_LOOK
    launch_s = launch_seconds(runs)
    later_s = max(launch_s, launch_s / 2 + LATER_SHARE * budget_s)  # about half is measuring
    more = (budget_s - FEWEST_LAUNCHES * launch_s) / later_s if launch_s > 0 else 0
    most = max(num, min(MOST_LAUNCHES, FEWEST_LAUNCHES + max(1, int(more))))
    return Looks(tuple(range(FEWEST_LAUNCHES, num + 1)), most)


def budget_seconds(runs: pd.DataFrame) -> float:
    """Return the budget that the last of these runs had; 0 for none."""
    budgets = runs.get("measure_budget", pd.Series(dtype=object)).dropna()
    return seconds_of(str(budgets.iloc[-1])) if len(budgets) else 0.0


def launch_seconds(runs: pd.DataFrame) -> float:
    """The time of a launch of all cases, from the first three; 0 where it is not known."""
    good = ok_runs(runs)
    ends = pd.to_datetime(good["created_at"], utc=True, format="ISO8601")
    ends = ends.groupby(good["launch"]).max().sort_index().iloc[:FEWEST_LAUNCHES]
    between_s = ends.diff().dt.total_seconds().dropna()
    return float(between_s.min()) if len(between_s) else 0.0
