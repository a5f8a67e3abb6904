"""Which case has the highest throughput, and how sure that is: the one judgement behind a report.

Every text of a page derives from it, so that they cannot contradict each other.

Cases are compared that do the same work on as many ranks, and so differ only in what their user may
choose: schedule, runtime, microbatches, partition, ... Where no two such cases exist, or a plan was
asked for several, the number of ranks counts as a choice too. Emulated cases compute nothing, so
beside measured ones they are judged on their own. Left out are oversubscribed cases beside others,
and always cases with a NaN or infinite loss or gradient.

Which case to take, and what is known of the others, is what `ppbench.judge.lead` says of all pairs.
Of cases that are the same as the fastest, the one that needs least memory is taken. The answer
stays open if half of the launches of that case or its rival carry a caution that forbids a verdict,
if fewer than 3 carry one of scatter, or if the machines differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.rounds import shared_rounds
from ppbench.comparison.sessions import moments_of, number_sessions
from ppbench.comparison.slowdowns import in_order, slowdowns_by_run
from ppbench.config.case import EMULATED
from ppbench.config.kinds import seconds_of
from ppbench.display.cases import (
    Axes,
    by_case,
    cautions_of,
    ok_runs,
    settings_text,
    work_axes,
)
from ppbench.display.metrics import METRICS
from ppbench.display.units import is_missing
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import RESOLUTION, Evidence, Launches, Noise, Rounds
from ppbench.judge.forecast import launches_needed
from ppbench.judge.lead import Lead, lead, lead_of
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.verdicts import SPEED, Change, Verdict, judge_means
from ppbench.judge.verdicts import judge as judge_pairs

FORBIDDING = (
    Caution.oversubscribed.name,
    Caution.time_sliced.name,
    Caution.throttled.name,
    Caution.busy_machine.name,
    Caution.unsettled_steps.name,
    Caution.behind_plan.name,
)
"""Cautions that shift a throughput: no number of launches makes up for them."""
FORBIDDING_IN_TURNS = (
    Caution.oversubscribed.name,
    Caution.time_sliced.name,
    Caution.behind_plan.name,
)
"""Those that shift a throughput also where cases took turns."""
SCATTER = (Caution.noisy_steps.name, Caution.few_steps.name, Caution.no_warmup.name)
"""Cautions that make a launch unreliable; several launches show by how much."""
_STEP = ["num_microbatches", "train_microbatch_size"]
_MACHINE_AXES = ("device", "launch_threads_per_rank")  # which change the fingerprint of a run


MOST_LAUNCHES = 16
"""Launches after which an open question stays open: starts of processes differ by too much."""
COMPARED_AXES = ("schedule", "runtime")
LEAST_SAVED = 0.05
"""Share of the memory for which a case is taken in place of one that is as fast."""


@dataclass(frozen=True)
class Judgement:
    """Comparable cases, which of them to take, and how sure that is."""

    where: str  # what all have in common: `2 ranks, 128 tokens`; empty if nothing else varies
    axes: tuple[str, ...]  # in which they differ
    cases: pd.DataFrame  # rows of `by_case`, the one to take first, then as the lead has them
    lead: Lead | None  # None for a single case
    arms: tuple[int, ...]  # of the lead, by place among the cases
    rival_place: int = 1  # among the cases
    cautions: tuple[str, ...] = ()  # that leave it open
    has_several_machines: bool = False
    needed: int | None = None  # launches of each that would decide it
    num_left_out: int = 0  # oversubscribed cases

    @property
    def is_decided(self) -> bool:
        """Whether it is known which case to take."""
        if self.lead is None or self.cautions or self.has_several_machines:
            return False
        return self.lead.can_take(self.arms[0])

    @property
    def best(self) -> pd.Series:
        return self.cases.iloc[0]

    @property
    def rival(self) -> pd.Series | None:
        """The next case that takes a step over as many microbatches, or else just the next."""
        return None if self.lead is None else self.cases.iloc[self.rival_place]

    def change(self, place: int, other: int) -> Change | None:
        """How the case at one place compares with that at another."""
        if self.lead is None:
            return None
        return self.lead.changes.get((self.arms[place], self.arms[other]))

    @property
    def to_rival(self) -> Change | None:
        """How the best case compares with its rival."""
        return self.change(0, self.rival_place)

    def places(self, verdict: Verdict) -> list[int]:
        """The places of the cases against which the best one has this verdict."""
        changes = ((place, self.change(0, place)) for place in range(1, len(self.cases)))
        return [place for place, change in changes if change and change.verdict is verdict]

    @property
    def fewest_launches(self) -> int:
        """The fewest launches of the best case and of those that may be better."""
        places = [0, *(self.places(Verdict.open) or [self.rival_place])]
        return int(self.cases["num_launches"].iloc[places].min())

    def name(self, case: pd.Series) -> str:
        """Name a case by the settings in which these cases differ."""
        return settings_text(case, self.axes) or str(case["text"])

    @cached_property
    def case_ids(self) -> list[str]:
        return [str(case_id) for case_id in self.cases["case_id"]]


@dataclass(frozen=True)
class AxisAnswer:
    """Which value of an axis to take, over all cases that differ in nothing else.

    Places are those of the names, the one to take first, then as the lead has them.
    """

    axis: str
    names: tuple[str, ...]
    lead: Lead
    arms: tuple[int, ...]  # of the lead, by place
    num_settings: int  # in which all values were measured
    peaks: pd.DataFrame  # peak memory by setting (rows) and place
    against: tuple[str, ...]  # settings in which another value is faster

    @property
    def change(self) -> Change:
        """How the value to take compares with the next one."""
        return self.lead.changes[self.arms[0], self.arms[1]]

    @property
    def is_decided(self) -> bool:
        """Whether no other value is faster by more than the resolution, on average."""
        return self.lead.can_take(self.arms[0])

    def saving(self) -> float | None:
        """The median share of its memory that the value to take saves over the next one.

        It is negative where that one saves. It is None unless all settings agree.
        """
        return saved_in_all(self.peaks[0], self.peaks[1])


def saved_in_all(taken: pd.Series, other: pd.Series) -> float | None:
    """The median share of memory saved, negative if the other saves; None where peaks overlap."""
    ratio = taken / other
    if (ratio < 1 - LEAST_SAVED).all():
        return float(1 - ratio.median())
    if (1 / ratio < 1 - LEAST_SAVED).all():
        return float(1 / ratio.median() - 1)
    return None


def by_choice(found: Lead, peaks: pd.DataFrame) -> tuple[int, ...]:
    """The arms, the one to take first: of those as fast, the one that needs clearly less memory.

    `peaks` is the peak memory by setting (rows) and arm.
    """
    taken = found.first
    for arm in found.equals if found.is_decided else ():
        if found.can_take(arm) and (saved_in_all(peaks[arm], peaks[taken]) or 0) > 0:
            taken = arm
    return taken, *(arm for arm in found.arms if arm != taken)


@dataclass(frozen=True)
class Judged:
    """The judgements of a report, the most worthwhile first, and what none of them counts."""

    judgements: tuple[Judgement, ...]
    not_finite: pd.DataFrame  # rows of `by_case`
    num_emulated: int  # judged on their own beside measured cases
    cases: pd.DataFrame  # all that were judged, without emulated ones beside measured ones
    known: Known
    axes: tuple[str, ...]
    of_runs: pd.DataFrame  # `by_case` of all runs that are ok
    looks: Looks

    @property
    def first(self) -> Judgement | None:
        return self.judgements[0] if self.judgements else None


@dataclass(frozen=True)
class Known:
    """What is known of each case beside its medians, by case id."""

    launches: Mapping[str, Launches]
    runs: Mapping[str, pd.DataFrame]
    cautions: Mapping[str, tuple[tuple[str, ...], ...]]  # of each launch
    machines: Mapping[str, frozenset[str]]
    resolution: float = RESOLUTION  # within which cases are the same
    starts: Noise | None = None  # of the difference of two cases, between starts of processes

    def evidence(self, case_id: str, rival_id: str) -> Evidence:
        """The launches of a rival, as the base, and of a case, with the rounds that they share."""
        base, head = self.launches[rival_id], self.launches[case_id]
        rounds = self.rounds(case_id, rival_id)
        return Evidence(base, head, paired=rounds, starts=self.starts, resolution=self.resolution)

    def rounds(self, case_id: str, rival_id: str) -> tuple[Rounds, ...]:
        """The rounds in which both had turns, for each start of their processes."""
        return shared_rounds(self.runs[rival_id], self.runs[case_id], SPEED)

    def forbidding(self, case_id: str, rival_id: str) -> tuple[str, ...]:
        """The cautions that forbid a verdict: what slows the machine slows both in their turns."""
        return FORBIDDING_IN_TURNS if self.rounds(case_id, rival_id) else FORBIDDING

    def verdict(self, case_id: str, rival_id: str) -> Verdict:
        """The verdict of a case against its rival; open where a caution forbids one."""
        names = {n for own in (case_id, rival_id) for launch in self.cautions[own] for n in launch}
        if names.intersection(self.forbidding(case_id, rival_id)):
            return Verdict.open
        (change,) = judge_pairs(METRICS[SPEED], [self.evidence(case_id, rival_id)])
        return change.verdict

    def disturbing(self, case_id: str, kinds: Sequence[str], least: float = 0) -> list[str]:
        """Return the cautions of these kinds that more than a share of the launches carry."""
        launches = self.cautions[case_id]
        carried = [sum(name in own for own in launches) / len(launches) for name in kinds]
        return [
            name for name, share in zip(kinds, carried, strict=True) if share >= least and share > 0
        ]


def looks_of(runs: pd.DataFrame) -> Looks:
    """The looks that were taken at runs of a sweep with a budget: after each launch from the third.

    How many launches its budget allows follows from the time of the first three alone.
    """
    budgets = runs.get("measure_budget", pd.Series(dtype=object)).dropna()
    budget_s = seconds_of(str(budgets.iloc[-1])) if len(budgets) else None
    good = ok_runs(runs)
    num = 0 if good.empty else int(good.groupby("case_id").size().max())
    if not budget_s or num < FEWEST_LAUNCHES:
        return ONE_LOOK
    launch_s = launch_seconds(runs)
    more = (budget_s - FEWEST_LAUNCHES * launch_s) / launch_s if launch_s > 0 else 0
    most = max(num, min(MOST_LAUNCHES, FEWEST_LAUNCHES + max(1, int(more))))
    return Looks(tuple(range(FEWEST_LAUNCHES, num + 1)), most)


def launch_seconds(runs: pd.DataFrame) -> float:
    """The time of a launch of all cases, from the first three; 0 where it is not known."""
    good = ok_runs(runs)
    ends = pd.to_datetime(good["created_at"], utc=True, format="ISO8601")
    ends = ends.groupby(good["launch"]).max().sort_index().iloc[:FEWEST_LAUNCHES]
    between_s = ends.diff().dt.total_seconds().dropna()
    return float(between_s.min()) if len(between_s) else 0.0


def judge(
    runs: pd.DataFrame, axes: Axes, starts: Noise | None = None, *, are_ranks_free: bool = False
) -> Judged:
    """Judge every group of comparable cases among `runs` (rows of `store.runs()`).

    `axes` are the settings that vary; `starts` is what other launches tell of starts.
    With `are_ranks_free` the number of ranks is a choice like any other.
    """
    looks = looks_of(runs)
    of_runs = by_case(runs, axes)
    cases = of_runs[of_runs["tokens_per_s"] > 0]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    is_emulated = cases["device"] == EMULATED
    num_emulated = int(is_emulated.sum()) if not is_emulated.all() else 0
    known = replace(_known_of(ok_runs(runs)), starts=starts)
    kinds = [cases[~is_emulated], cases[is_emulated]]
    groups = [
        _judgement(group, ["device", *key] if num_emulated else key, axes, known, looks)
        for kind in kinds
        for key, group in _groups(kind, axes, are_ranks_free=are_ranks_free)
    ]
    ordered = tuple(sorted(groups, key=_worth, reverse=True))
    compared = kinds[0] if num_emulated else cases
    return Judged(ordered, broken, num_emulated, compared, known, tuple(axes), of_runs, looks)


def axis_answer(judged: Judged) -> AxisAnswer | None:
    """Answer the question of a whole sweep, if several groups ask for a schedule or runtime.

    It is the mean change over the settings in which every value was measured; each counts alike.
    None if there are fewer than two of them, or a caution forbids a verdict in any.
    """
    axis = next((axis for axis in COMPARED_AXES if axis in judged.axes), None)
    groups = [each for each in judged.judgements if axis in each.axes]
    if axis is None or len(groups) < 2 or any(each.has_several_machines for each in groups):
        return None
    pool = alike(judged.cases)
    pipelined = pool[pool["world_size"] > 1]
    pool = pool if pipelined.empty else pipelined
    values = list(dict.fromkeys(pool[axis]))
    key = [other for other in judged.axes if other != axis] or ["device"]
    settings = [
        own.drop_duplicates(axis).set_index(axis).loc[values]
        for _, own in pool.groupby(pool[key].astype(str).agg("\n".join, axis=1), sort=False)
        if set(own[axis]) == set(values)
    ]
    if len(values) < 2 or len(settings) < 2:
        return None
    known, pairs = judged.known, list(combinations(range(len(values)), 2))
    ids = [[str(one) for one in own["case_id"]] for own in settings]
    for own in ids:
        for arm, rival in pairs:
            kinds = known.forbidding(own[arm], own[rival])
            if any(known.disturbing(own[at], kinds, 0.5) for at in (arm, rival)):
                return None
    changes = judge_means(
        METRICS[SPEED],
        [[known.evidence(own[arm], own[rival]) for own in ids] for arm, rival in pairs],
        judged.looks,
    )
    found = lead_of(METRICS[SPEED], dict(zip(pairs, changes, strict=True)), len(values))
    peaks = pd.DataFrame([own["peak_memory_bytes"].astype(float).tolist() for own in settings])
    arms = by_choice(found, peaks)
    against = [
        settings_text(own.iloc[arms[0]], key)
        for own, names in zip(settings, ids, strict=True)
        if any(known.verdict(names[arms[0]], names[arm]) is Verdict.slower for arm in arms[1:])
    ]
    return AxisAnswer(
        axis,
        tuple(str(values[arm]) for arm in arms),
        found,
        arms,
        len(settings),
        peaks[list(arms)].set_axis(range(len(arms)), axis=1),
        tuple(against),
    )


def alike(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that were not oversubscribed, or all if every one was."""
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def _groups(
    cases: pd.DataFrame, axes: Axes, *, are_ranks_free: bool
) -> list[tuple[list[str], pd.DataFrame]]:
    """Group cases that do the same work on as many ranks and replicas.

    These are free if that leaves no pair, and ranks if they are a choice.
    """
    work = [axis for axis in work_axes(axes) if axis != "device"]
    fixed = ("replicas",) if are_ranks_free else ("world_size", "replicas")
    sizes = [axis for axis in fixed if axis in axes]
    keys = [[*work, *sizes]]
    if sizes and not (cases["device"] == EMULATED).all():
        keys.append(work)
    groups: list[tuple[list[str], pd.DataFrame]] = []
    for key in keys:
        if key and len(cases):
            texts = cases[key].astype(str).agg("\n".join, axis=1)
            groups = [(key, group) for _, group in cases.groupby(texts, sort=False)]
        else:
            groups = [(key, cases)] if len(cases) else []
        if any(len(alike(group)) > 1 for _, group in groups):
            break
    return groups


def _judgement(
    cases: pd.DataFrame, key: Sequence[str], axes: Axes, known: Known, looks: Looks
) -> Judgement:
    compared = alike(cases).sort_values(
        ["tokens_per_s", "peak_memory_bytes"], ascending=[False, True], kind="stable"
    )
    ids = [str(case_id) for case_id in compared["case_id"]]
    found, arms = None, tuple(range(len(ids)))
    if len(ids) > 1:
        pairs = {
            (arm, rival): known.evidence(ids[arm], ids[rival])
            for arm in range(len(ids))
            for rival in range(arm + 1, len(ids))
        }
        found = lead(METRICS[SPEED], pairs, len(ids), looks)
        peaks = compared["peak_memory_bytes"].astype(float)
        arms = by_choice(found, pd.DataFrame([peaks.tolist()]))
    compared = compared.iloc[list(arms)]
    rows = [case for _, case in compared.iterrows()]
    # The best other case that takes the same step, or else the next case.
    same = (n for n, row in enumerate(rows[1:], 1) if (row[_STEP] == rows[0][_STEP]).all())
    rival = next(same, min(1, len(rows) - 1))
    pair = [rows[place] for place in dict.fromkeys((0, rival))]
    fewest = min(int(row["num_launches"]) for row in pair)
    carried = {n for launches in known.cautions.values() for own in launches for n in own}
    unknown = sorted(carried - set(Caution.__members__))  # a newer version of ppbench knows them
    ends = [str(row["case_id"]) for row in (rows[0], rows[rival])]
    has_turns = len(rows) > 1 and bool(known.rounds(*ends))
    scatter = () if has_turns or fewest >= FEWEST_LAUNCHES else SCATTER
    kinds = (*(known.forbidding(*ends) if len(rows) > 1 else FORBIDDING), *scatter, *unknown)
    machines = frozenset().union(*(known.machines[str(row["case_id"])] for row in rows))
    judgement = Judgement(
        where=settings_text(rows[0], [axis for axis in axes if axis in key]),
        axes=tuple(a for a in axes if a not in key and len(compared[a].astype(str).unique()) > 1),
        cases=compared,
        lead=found,
        arms=arms,
        rival_place=rival,
        cautions=_names(known.disturbing(str(row["case_id"]), kinds, 0.5) for row in pair),
        has_several_machines=len(machines) > 1 and not set(axes).intersection(_MACHINE_AXES),
        num_left_out=len(cases) - len(compared),
    )
    if found is None:
        return judgement
    doubtful = [judgement.change(0, place) for place in judgement.places(Verdict.open)]
    num = len(found.changes) // 2
    needed = [launches_needed(change, num_tests=num) for change in doubtful if change]
    most = None if None in needed else max(filter(None, needed), default=None)
    return replace(judgement, needed=most)


def _names(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _known_of(runs: pd.DataFrame) -> Known:
    """The launches of each case as they are compared: positive, with slowdowns and sessions."""
    needed = ["run_id", "status", "case_id", "fingerprint", "cautions", "created_at", SPEED]
    runs = runs.reindex(columns=list(dict.fromkeys([*runs.columns, *needed])))
    runs = runs.reset_index(drop=True)
    usable = runs[runs[SPEED] > 0]
    slowdowns = slowdowns_by_run(usable) if len(usable) else {}
    numbers = pd.Series(number_sessions(moments_of(usable)), usable.index, dtype=int)
    launches, cautions, machines, by_id = {}, {}, {}, {}
    for case_id, own in runs.groupby("case_id", sort=False):
        by_id[str(case_id)] = own
        fast = own[own[SPEED] > 0]
        launches[str(case_id)] = Launches(
            tuple(map(float, fast[SPEED])),
            in_order(fast, slowdowns) if len(fast) else None,
            tuple(numbers[fast.index].tolist()),
        )
        cautions[str(case_id)] = tuple(tuple(cautions_of(row)) for _, row in own.iterrows())
        known = (one for one in own["fingerprint"] if not is_missing(one))
        machines[str(case_id)] = frozenset(map(str, known))
    asked = runs.get("measure_resolution", pd.Series(dtype=float)).dropna()
    resolution = RESOLUTION if asked.empty else float(asked.max())
    return Known(launches, by_id, cautions, machines, resolution)


def _worth(judgement: Judgement) -> tuple[bool, bool, bool, int, int, int]:
    """Rank a judgement: sound, measured cases to compare; more schedules, ranks and cases."""
    cases = judgement.cases
    return (
        len(cases) > 1,
        not cases["is_oversubscribed"].any(),
        not (cases["device"] == EMULATED).all(),
        int(cases["schedule"].nunique()),
        int((cases["world_size"] * cases["replicas"]).max()),
        len(cases),
    )
