"""Which case has the highest throughput, and how sure that is: the one judgement behind a report.

Every text of a page derives from it, so that they cannot contradict each other.

Cases are compared that do the same work on as many ranks, and so differ only in what their user may
choose: schedule, runtime, microbatches, partition, ... Where no two such cases exist, or a plan was
asked for several, the number of ranks counts as a choice too. Emulated cases compute nothing, so
beside measured ones they are judged on their own. Left out are oversubscribed cases beside others,
and always cases with a NaN or infinite loss or gradient.

Which case to take, and what is known of the others, is what `ppbench.judge.lead` says of all pairs.
Of cases that are the same as the fastest, the one that needs least memory is taken. The answer
stays open if half of the launches of that case or a rival carry a caution that forbids a verdict,
if fewer than 3 carry one of scatter, or if the machines differ. What is known of a pair, and the
cases that are judged together, are those of `ppbench compare` too (`ppbench.comparison.evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.evidence import (
    FORBIDDING,
    Background,
    carried_by,
    comparable_pairs,
    evidence_of,
    looks_of,
    with_columns,
)
from ppbench.comparison.groups import alike, groups_of
from ppbench.config.case import EMULATED
from ppbench.display.cases import Axes, by_case, ok_runs, settings_text
from ppbench.display.metrics import METRICS
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Evidence
from ppbench.judge.forecast import launches_needed
from ppbench.judge.lead import Lead, lead_of
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED, Change, Verdict, judge_means
from ppbench.judge.verdicts import judge as judge_pairs
from ppbench.store import Store

SCATTER = (Caution.noisy_steps.name, Caution.few_steps.name, Caution.no_warmup.name)
"""Cautions that make a launch unreliable; several launches show by how much."""
_SIZE = ["world_size", "replicas"]
_STEP = ["num_microbatches", "train_microbatch_size"]
COMPARED_AXES = ("schedule", "runtime")
LEAST_SAVED = 0.05
"""Share of the memory for which a case is taken in place of one that is as fast."""
ROUNDED = 0.005
"""Share of the memory that two cases may differ by and count as needing as much."""


@dataclass(frozen=True)
class Judgement:
    """Comparable cases, which of them to take, and how sure that is."""

    where: str  # what all have in common: `2 ranks, 128 tokens`; empty if nothing else varies
    axes: tuple[str, ...]  # in which they differ
    cases: pd.DataFrame  # rows of `by_case`, the one to take first, then as the lead has them
    lead: Lead | None  # None for a single case
    arms: tuple[int, ...]  # of the lead, by place among the cases
    evidences: Mapping[tuple[str, str], Evidence]  # of each pair, in one order of case ids
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

    def saving(self) -> Saving | None:
        """Which of the value to take and the next one needs less memory, if all settings agree."""
        return saving_in_all(self.peaks[0], self.peaks[1])


class Saving(NamedTuple):
    """The share of memory that one of two cases saves over the other, setting by setting."""

    is_first: bool  # of the two: it is the one that saves
    least: float
    most: float

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2


def saving_in_all(first: pd.Series, other: pd.Series) -> Saving | None:
    """Return what one of two saves that needs clearly less memory in a setting, and in none more.

    None where neither does; settings whose peaks are not known say nothing.
    """
    for is_first, ratio in ((True, first / other), (False, other / first)):
        shares = 1 - ratio.dropna()
        if len(shares) and shares.max() >= LEAST_SAVED and shares.min() > -ROUNDED:
            return Saving(is_first, max(0.0, float(shares.min())), float(shares.max()))
    return None


def by_choice(found: Lead, peaks: pd.DataFrame) -> tuple[int, ...]:
    """The arms, the one to take first: of those as fast, the one that needs clearly less memory.

    `peaks` is the peak memory by setting (rows) and arm.
    """
    taken = found.first
    for arm in found.equals if found.is_decided else ():
        saving = saving_in_all(peaks[arm], peaks[taken])
        if found.can_take(arm) and saving is not None and saving.is_first:
            taken = arm
    return taken, *(arm for arm in found.arms if arm != taken)


@dataclass(frozen=True)
class Judged:
    """The judgements of a report, the most worthwhile first, and what none of them counts."""

    judgements: tuple[Judgement, ...]
    not_finite: pd.DataFrame  # rows of `by_case`
    num_emulated: int  # judged on their own beside measured cases
    cases: pd.DataFrame  # all that were judged, without emulated ones beside measured ones
    axes: tuple[str, ...]
    of_runs: pd.DataFrame  # `by_case` of all runs that are ok
    looks: Looks

    @property
    def first(self) -> Judgement | None:
        return self.judgements[0] if self.judgements else None

    def verdict(self, head: str, base: str) -> Verdict:
        """The verdict of a case against another, by their ids; open if they were not compared."""
        for judgement in self.judgements:
            if {head, base} <= set(judgement.case_ids):
                change = judgement.change(*map(judgement.case_ids.index, (head, base)))
                return Verdict.open if change is None else change.verdict
        return Verdict.open

    def evidence(self, head: str, base: str) -> Evidence | None:
        """Return what is known of two cases, by their ids; None if they were not compared."""
        for judgement in self.judgements:
            if evidence := judgement.evidences.get((head, base)):
                return evidence
            if evidence := judgement.evidences.get((base, head)):
                return evidence.reversed()
        return None


def judge(
    runs: pd.DataFrame,
    axes: Axes,
    stores: Iterable[Store] = (),
    *,
    are_ranks_free: bool = False,
) -> Judged:
    """Judge every group of comparable cases among `runs` (rows of `store.runs()`).

    `axes` are the settings that vary; `stores` tell of other launches on the same machines.
    With `are_ranks_free` the number of ranks is a choice like any other.
    """
    good, of_runs = with_columns(ok_runs(runs)), by_case(runs, axes)
    cases = of_runs[of_runs["tokens_per_s"] > 0]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    is_emulated = cases["device"] == EMULATED
    num_emulated = int(is_emulated.sum()) if not is_emulated.all() else 0
    arms = {str(case_id): own for case_id, own in good.groupby("case_id", sort=False)}
    background, looks = Background(good, stores), looks_of(runs)
    groups = [
        _judgement(group, key, axes, arms, background, looks)
        for key, group in groups_of(of_runs, axes, are_ranks_free=are_ranks_free)
    ]
    ordered = tuple(sorted(groups, key=_worth, reverse=True))
    compared = cases[~is_emulated] if num_emulated else cases
    return Judged(ordered, broken, num_emulated, compared, tuple(axes), of_runs, looks)


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
    pairs = list(combinations(range(len(values)), 2))
    ids = [[str(one) for one in own["case_id"]] for own in settings]
    families = []
    for arm, rival in pairs:
        evidences = [judged.evidence(own[arm], own[rival]) for own in ids]
        families.append([each for each in evidences if each is not None and not each.cautions])
        if len(families[-1]) < len(ids):
            return None
    changes = judge_means(METRICS[SPEED], families, judged.looks)
    found = lead_of(METRICS[SPEED], dict(zip(pairs, changes, strict=True)), len(values))
    peaks = pd.DataFrame([own["peak_memory_bytes"].astype(float).tolist() for own in settings])
    arms = by_choice(found, peaks)
    against = [
        settings_text(own.iloc[arms[0]], key)
        for own, names in zip(settings, ids, strict=True)
        if any(judged.verdict(names[arms[0]], names[arm]) is Verdict.slower for arm in arms[1:])
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


def _judgement(
    cases: pd.DataFrame,
    key: Sequence[str],
    axes: Axes,
    runs: Mapping[str, pd.DataFrame],
    background: Background,
    looks: Looks,
) -> Judgement:
    """Judge a group of cases; `runs` are those of each case by its id."""
    compared = alike(cases).sort_values(
        ["tokens_per_s", "peak_memory_bytes"], ascending=[False, True], kind="stable"
    )
    ids = [str(case_id) for case_id in compared["case_id"]]
    found, arms, speed = None, tuple(range(len(ids))), METRICS[SPEED]
    own = {case_id: runs[case_id] for case_id in ids}
    # Pairs on as many ranks are judged together, be ranks a choice beside them or not.
    sizes = {case_id: own[case_id].iloc[0][_SIZE].tolist() for case_id in ids}
    families: dict[str, list[tuple[str, str]]] = {}
    for head, base in comparable_pairs(own):
        size = str(sizes[head]) if sizes[head] == sizes[base] else ""
        families.setdefault(size, []).append((head, base))
    evidences: dict[tuple[str, str], Evidence] = {}
    changes: dict[tuple[int, int], Change] = {}
    for family in families.values():
        known = evidence_of(speed, own, family, background, shares_noise=True)
        evidences |= known
        judged = judge_pairs(speed, [*known.values()], looks)
        for (head, base), change in zip(known, judged, strict=True):
            changes[ids.index(head), ids.index(base)] = change
    if len(ids) > 1:
        found = lead_of(speed, changes, len(ids))
        peaks = compared["peak_memory_bytes"].astype(float)
        arms = by_choice(found, pd.DataFrame([peaks.tolist()]))
    compared = compared.iloc[list(arms)]
    rows = [case for _, case in compared.iterrows()]
    # The best other case that takes the same step, or else the next case.
    same = (n for n, row in enumerate(rows[1:], 1) if (row[_STEP] == rows[0][_STEP]).all())
    rival = next(same, min(1, len(rows) - 1))
    first, other = (str(rows[place]["case_id"]) for place in (0, rival))
    of_first = {pair: evidence for pair, evidence in evidences.items() if first in pair}
    cautions = [name for evidence in of_first.values() for name in evidence.cautions]
    if len(ids) == 1:
        cautions += carried_by(own[first], FORBIDDING)
    fewest = min(len(own[first]), len(own[other]))
    has_turns = any(each.paired for pair, each in of_first.items() if other in pair)
    if fewest < FEWEST_LAUNCHES and not has_turns:
        cautions += [name for one in (first, other) for name in carried_by(own[one], SCATTER)]
    judgement = Judgement(
        where=settings_text(rows[0], [axis for axis in axes if axis in key]),
        axes=tuple(a for a in axes if a not in key and len(compared[a].astype(str).unique()) > 1),
        cases=compared,
        lead=found,
        arms=arms,
        evidences=evidences,
        rival_place=rival,
        cautions=tuple(dict.fromkeys(cautions)),
        has_several_machines=len(evidences) < len(ids) * (len(ids) - 1) // 2,
        num_left_out=len(cases) - len(compared),
    )
    if found is None:
        return judgement
    doubtful = [judgement.change(0, place) for place in judgement.places(Verdict.open)]
    num = len(found.changes) // 2
    needed = [launches_needed(change, num_tests=num) for change in doubtful if change]
    most = None if None in needed else max(filter(None, needed), default=None)
    return replace(judgement, needed=most)


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
