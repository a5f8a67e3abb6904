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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from ppbench.cautions import Caution
from ppbench.comparison.contrasts import compare_along
from ppbench.comparison.evidence import (
    FORBIDDING,
    Background,
    carried_by,
    comparable_pairs,
    looks_of,
    with_columns,
)
from ppbench.comparison.groups import alike, groups_of
from ppbench.comparison.lines import Comparison, Family, Pair, judged_pairs
from ppbench.config.case import EMULATED
from ppbench.display.cases import Axes, by_case, ok_runs, settings_text
from ppbench.display.metrics import METRICS
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Evidence
from ppbench.judge.forecast import launches_needed
from ppbench.judge.lead import Lead, lead_of
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED, Change, Verdict, judge_means
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


class Saving(NamedTuple):
    """The share of memory that one of two saves over the other, setting by setting."""

    is_first: bool  # of the two: it is the one that saves
    least: float
    most: float

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2


class Peaks(NamedTuple):
    """The lowest and the highest peak memory over launches, by setting (rows) and arm."""

    lows: pd.DataFrame
    highs: pd.DataFrame

    def saving(self, first: Hashable, other: Hashable) -> Saving | None:
        """Return which of two arms needs clearly less memory in a setting, and in none more.

        Every launch has to show it. None where neither does; settings whose peaks are not known say
        nothing.
        """
        for is_first, small, large in ((True, first, other), (False, other, first)):
            shares = 1 - (self.highs[small] / self.lows[large]).dropna()
            if len(shares) and shares.max() >= LEAST_SAVED and shares.min() > -ROUNDED:
                return Saving(is_first, max(0.0, float(shares.min())), float(shares.max()))
        return None


@dataclass(frozen=True)
class Judgement:
    """Which of several arms to take, and how sure that is.

    The arms are comparable cases or, `over` several settings, the values of an axis: then a change
    is the mean over the settings in which all values were measured, each of which counts alike.
    They are in the order of places: the one to take first, then as the lead has them.
    """

    where: str  # what all have in common: `2 ranks, 128 tokens`; empty if nothing else varies
    axes: tuple[str, ...]  # in which they differ
    arms: tuple[str, ...]  # ids of cases, or values
    names: tuple[str, ...]
    cases: pd.DataFrame  # rows of `by_case`; over several settings, those of the first
    lead: Lead | None  # None for a single case
    peaks: Peaks
    rival_place: int = 1
    cautions: tuple[str, ...] = ()  # that leave it open
    has_several_machines: bool = False
    num_left_out: int = 0  # oversubscribed cases
    over: str = ""  # ` over 3 settings`
    unless: str = ""  # ` In SETTINGS, another is faster.`

    @property
    def is_decided(self) -> bool:
        """Whether it is known which one to take."""
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
        """How the arm at one place compares with that at another."""
        if self.lead is None:
            return None
        return self.lead.changes.get((self.arms[place], self.arms[other]))

    @property
    def to_rival(self) -> Change | None:
        """How the best one compares with its rival."""
        return self.change(0, self.rival_place)

    def places(self, verdict: Verdict) -> list[int]:
        """The places of those against which the best one has this verdict."""
        changes = ((place, self.change(0, place)) for place in range(1, len(self.names)))
        return [place for place, change in changes if change and change.verdict is verdict]

    @property
    def fewest_launches(self) -> int:
        """The fewest launches of the best one and of those that may be better."""
        places = [0, *(self.places(Verdict.open) or [self.rival_place])]
        return int(self.cases["num_launches"].iloc[places].min())

    @property
    def needed(self) -> int | None:
        """The launches of each that would decide it; None if no sensible number would."""
        if self.lead is None:
            return None
        num = len(self.lead.changes) // 2
        doubtful = [self.change(0, place) for place in self.places(Verdict.open)]
        needed = [launches_needed(change, num_tests=num) for change in doubtful if change]
        return None if None in needed else max(filter(None, needed), default=None)

    @property
    def saving(self) -> Saving | None:
        """Which of the best one and its rival needs clearly less memory."""
        return self.peaks.saving(self.arms[0], self.arms[self.rival_place])


def by_choice(found: Lead, peaks: Peaks) -> tuple[Hashable, ...]:
    """The arms, the one to take first: of those as fast, the one that needs clearly less memory."""
    taken = found.first
    for arm in found.equals if found.is_decided else ():
        saving = peaks.saving(arm, taken)
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
    pairs: Mapping[Pair, tuple[Evidence, Change]]  # of ids of cases, head and base, in both orders
    looks: Looks
    along: tuple[Comparison, ...] = ()
    """They tell what each axis changes, where no two cases do the same work."""

    @property
    def first(self) -> Judgement | None:
        return self.judgements[0] if self.judgements else None

    @cached_property
    def whole(self) -> Judgement | None:
        """The answer over several settings, if that is what the sweep asks for."""
        return _over_settings(self)

    def verdict(self, head: str, base: str) -> Verdict:
        """The verdict of a case against another, by their ids; open if they were not compared."""
        known = self.pairs.get((head, base))
        return known[1].verdict if known else Verdict.open


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
    good, of_runs, stores = with_columns(ok_runs(runs)), by_case(runs, axes), list(stores)
    peaks = good.groupby("case_id")["peak_memory_bytes"]
    of_runs = of_runs.assign(
        lowest_peak=of_runs["case_id"].map(peaks.min()).astype(float),
        highest_peak=of_runs["case_id"].map(peaks.max()).astype(float),
    )
    cases = of_runs[of_runs["tokens_per_s"] > 0]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    is_emulated = cases["device"] == EMULATED
    num_emulated = int(is_emulated.sum()) if not is_emulated.all() else 0
    of_case = {str(case_id): own for case_id, own in good.groupby("case_id", sort=False)}
    groups, families = [], []
    for key, group in groups_of(of_runs, axes, are_ranks_free=are_ranks_free):
        order = ["tokens_per_s", "peak_memory_bytes"]
        compared = alike(group).sort_values(order, ascending=[False, True], kind="stable")
        groups.append((key, compared, len(group) - len(compared)))
        arms: dict[Hashable, pd.DataFrame] = {one: of_case[one] for one in compared["case_id"]}
        # Pairs on as many ranks are judged together, be ranks a choice beside them or not.
        sizes = {case_id: own.iloc[0][_SIZE].tolist() for case_id, own in arms.items()}
        by_size: dict[str, list[Pair]] = {}
        for head, base in comparable_pairs(arms):
            size = str(sizes[head]) if sizes[head] == sizes[base] else ""
            by_size.setdefault(size, []).append((head, base))
        families += [Family(arms, pairs, does_same_work=True) for pairs in by_size.values()]
    looks = looks_of(runs)
    pairs = judged_pairs(METRICS[SPEED], families, Background(good, stores), looks)
    judged = [_judgement(*group, axes, of_case, pairs) for group in groups]
    ordered = tuple(sorted(judged, key=_worth, reverse=True))
    compared = cases[~is_emulated] if num_emulated else cases
    along: list[Comparison] = []
    if stores and all(one.lead is None for one in ordered):
        along = compare_along(axes, good, stores[0])
    found = ordered, broken, num_emulated, compared, tuple(axes), of_runs, pairs, looks
    return Judged(*found, tuple(along))


def _over_settings(judged: Judged) -> Judgement | None:
    """Answer the question of a whole sweep, if several groups ask for a schedule or runtime.

    None if there are fewer than two settings with every value, or a caution forbids a verdict in
    any.
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
        own.drop_duplicates(axis).set_index(axis, drop=False).loc[values]
        for _, own in pool.groupby(pool[key].astype(str).agg("\n".join, axis=1), sort=False)
        if set(own[axis]) == set(values)
    ]
    if len(values) < 2 or len(settings) < 2:
        return None
    families = {}
    for arm, rival in combinations(values, 2):
        ids = [(str(own["case_id"][arm]), str(own["case_id"][rival])) for own in settings]
        known = [judged.pairs[pair][0] for pair in ids if pair in judged.pairs]
        families[arm, rival] = [evidence for evidence in known if not evidence.cautions]
        if len(families[arm, rival]) < len(settings):
            return None
    changes = judge_means(METRICS[SPEED], [*families.values()], judged.looks)
    found = lead_of(METRICS[SPEED], dict(zip(families, changes, strict=True)), values)
    peaks = _peaks(settings, values)
    arms = [str(arm) for arm in by_choice(found, peaks)]
    against = []
    for own in settings:
        best, *rivals = (str(own["case_id"][arm]) for arm in arms)
        if any(judged.verdict(best, rival) is Verdict.slower for rival in rivals):
            against.append(settings_text(own.iloc[values.index(arms[0])], key))
    fewest = pd.concat(settings).groupby(level=0)["num_launches"].min()
    return Judgement(
        where="",
        axes=(axis,),
        arms=tuple(arms),
        names=tuple(map(str, arms)),
        cases=settings[0].assign(num_launches=fewest).loc[arms],
        lead=found,
        peaks=peaks,
        over=f" over {len(settings)} settings",
        unless=f" In {'; '.join(against)}, another is faster." if against else "",
    )


def _peaks(settings: Sequence[pd.DataFrame], arms: Sequence[str]) -> Peaks:
    """Return the peaks of the cases of each setting, which are in the order of the arms."""
    ends = ("lowest_peak", "highest_peak")
    lows, highs = ([own[end].tolist() for own in settings] for end in ends)
    return Peaks(*(pd.DataFrame(own, columns=[*arms]) for own in (lows, highs)))


def _judgement(
    key: Sequence[str],
    compared: pd.DataFrame,
    num_left_out: int,
    axes: Axes,
    runs: Mapping[str, pd.DataFrame],
    pairs: Mapping[Pair, tuple[Evidence, Change]],
) -> Judgement:
    """Judge a group of cases; `runs` are those of each case by its id."""
    arms = [str(case_id) for case_id in compared["case_id"]]
    peaks, found = _peaks([compared], arms), None
    changes = {pair: change for pair, (_, change) in pairs.items() if {*pair} <= {*arms}}
    if len(arms) > 1:
        found = lead_of(METRICS[SPEED], changes, arms)
        places = [arms.index(str(arm)) for arm in by_choice(found, peaks)]
        arms, compared = [arms[place] for place in places], compared.iloc[places]
    rows = [case for _, case in compared.iterrows()]
    # The best other case that takes the same step, or else the next case.
    same = (n for n, row in enumerate(rows[1:], 1) if (row[_STEP] == rows[0][_STEP]).all())
    rival = next(same, min(1, len(rows) - 1))
    first, other = arms[0], arms[rival]
    known = [pairs[pair][0] for pair in changes if pair[0] == first]
    cautions = [name for evidence in known for name in evidence.cautions]
    if len(arms) == 1:
        cautions += carried_by(runs[first], FORBIDDING)
    has_turns = (first, other) in changes and bool(pairs[first, other][0].paired)
    if min(len(runs[first]), len(runs[other])) < FEWEST_LAUNCHES and not has_turns:
        cautions += [name for one in (first, other) for name in carried_by(runs[one], SCATTER)]
    own_axes = [a for a in axes if a not in key and len(compared[a].astype(str).unique()) > 1]
    return Judgement(
        where=settings_text(rows[0], [axis for axis in axes if axis in key]),
        axes=tuple(own_axes),
        arms=tuple(arms),
        names=tuple(settings_text(case, own_axes) or str(case["text"]) for case in rows),
        cases=compared,
        lead=found,
        peaks=peaks,
        rival_place=rival,
        cautions=tuple(dict.fromkeys(cautions)),
        has_several_machines=len(changes) < len(arms) * (len(arms) - 1),
        num_left_out=num_left_out,
    )


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
