"""Which case has the highest throughput, and how sure that is: the one judgement behind a report.

Every text of a page derives from it, so that they cannot contradict each other.

Cases are compared that do the same work on as many ranks, and so differ only in what their user may
choose: schedule, runtime, microbatches, partition, ... Where no two such cases exist, the number of
ranks counts as a choice too. Emulated cases compute nothing, so beside measured ones they are
judged on their own. Left out are oversubscribed cases beside others, and always cases with a NaN or
infinite loss or gradient.

A lead has the grade that its launches give it (`ppbench.statistics.ranking`), at most:

    not decided  if half of the launches of the best case or its rival carry a caution that forbids
                 a verdict; if fewer than 3 carry one of scatter; if the machines differ
    leaning      if a caution that forbids a verdict is on any other launch that is compared
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ppbench.cautions import Caution
from ppbench.config.case import EMULATED
from ppbench.display.cases import (
    INTERVAL,
    Axes,
    by_case,
    cautions_of,
    ok_runs,
    settings_text,
    work_axes,
)
from ppbench.display.units import is_missing
from ppbench.statistics.ranking import (
    Grade,
    Launches,
    Lead,
    launches_needed,
    lead,
    weakest,
)
from ppbench.judge.differences import FEWEST_LAUNCHES

FORBIDDING = (
    Caution.oversubscribed.name,
    Caution.time_sliced.name,
    Caution.throttled.name,
    Caution.busy_machine.name,
    Caution.unsettled_steps.name,
    Caution.behind_plan.name,
)
"""Cautions that shift a throughput: no number of launches makes up for them."""
SCATTER = (Caution.noisy_steps.name, Caution.few_steps.name, Caution.no_warmup.name)
"""Cautions that make a launch unreliable; several launches show by how much."""
_STEP = ["num_microbatches", "train_microbatch_size"]
_MACHINE_AXES = ("device", "launch_threads_per_rank")  # which change the fingerprint of a run


@dataclass(frozen=True)
class Judgement:
    """Comparable cases, and how sure it is that the best of them is faster than the others."""

    where: str  # what all have in common: `2 ranks, 128 tokens`; empty if nothing else varies
    axes: tuple[str, ...]  # in which they differ
    cases: pd.DataFrame  # rows of `by_case`, the highest throughput first
    grade: Grade
    leads: tuple[Lead, ...]  # of the best over each other case
    rival_place: int = 1  # among the cases
    pivot: int = 1  # place of the case that is told from the best with the least certainty
    cautions: tuple[str, ...] = ()  # that lowered the grade
    has_several_machines: bool = False
    needed: int | None = None  # launches of each that would tell the best from the pivot
    num_left_out: int = 0  # oversubscribed cases

    @property
    def best(self) -> pd.Series:
        return self.cases.iloc[0]

    @property
    def rival(self) -> pd.Series | None:
        """The next case that takes a step over as many microbatches, or else just the next."""
        return self.cases.iloc[self.rival_place] if self.leads else None

    @property
    def lead(self) -> Lead | None:
        """The lead over the rival."""
        return self.leads[self.rival_place - 1] if self.leads else None

    @property
    def ratio(self) -> float:
        """The lead over the rival, of geometric means over launches; 1 without a rival."""
        return self.lead.ratio if self.lead else 1.0

    @property
    def are_equal(self) -> bool:
        """Whether the best case and its rival are equally fast, as far as that matters."""
        return self.grade is Grade.decided and self.lead is not None and self.lead.is_equal

    @property
    def doubtful(self) -> pd.Series | None:
        """The case that is told from the best with less certainty than the rival, if any is."""
        return None if self.pivot == self.rival_place else self.cases.iloc[self.pivot]

    @property
    def fewest_launches(self) -> int:
        """The fewest launches of the best case and of the one that is hardest to tell from it."""
        return int(self.cases["num_launches"].iloc[[0, self.pivot]].min())

    def name(self, case: pd.Series) -> str:
        """Name a case by the settings in which these cases differ."""
        return settings_text(case, self.axes) or str(case["text"])

    @cached_property
    def case_ids(self) -> list[str]:
        return [str(case_id) for case_id in self.cases["case_id"]]


@dataclass(frozen=True)
class Judged:
    """The judgements of a report, the most worthwhile first, and what none of them counts."""

    judgements: tuple[Judgement, ...]
    not_finite: pd.DataFrame  # rows of `by_case`
    num_emulated: int  # judged on their own beside measured cases
    cases: pd.DataFrame  # all that were judged, without emulated ones beside measured ones
    evidence: Evidence
    axes: tuple[str, ...]
    of_runs: pd.DataFrame  # `by_case` of all runs that are ok

    @property
    def first(self) -> Judgement | None:
        return self.judgements[0] if self.judgements else None


@dataclass(frozen=True)
class Evidence:
    """What is known of each case beside its medians, by case id."""

    launches: Mapping[str, Launches]
    cautions: Mapping[str, tuple[tuple[str, ...], ...]]  # of each launch
    machines: Mapping[str, frozenset[str]]

    def verdict(self, case_id: str, rival_id: str) -> str:
        """Return `faster`, `slower` or `equal` where that is decided, else an empty text."""
        names = {n for own in (case_id, rival_id) for launch in self.cautions[own] for n in launch}
        if names.intersection(FORBIDDING):
            return ""
        sides = self.launches[case_id], self.launches[rival_id]
        ahead = lead(*sides)
        if ahead.is_equal:
            return "equal"
        if ahead.grade is Grade.decided:
            return "faster"
        return "slower" if lead(*reversed(sides)).grade is Grade.decided else ""

    def disturbing(self, case: pd.Series, kinds: Sequence[str], least: float = 0) -> list[str]:
        """Return the cautions of these kinds that more than a share of the launches carry."""
        launches = self.cautions[str(case["case_id"])]
        carried = [sum(name in own for own in launches) / len(launches) for name in kinds]
        return [
            name for name, share in zip(kinds, carried, strict=True) if share >= least and share > 0
        ]


def judge(runs: pd.DataFrame, axes: Axes) -> Judged:
    """Judge every group of comparable cases among `runs` (rows of `store.runs()`).

    `axes` are the settings that vary.
    """
    of_runs = by_case(runs, axes)
    cases = of_runs[of_runs["tokens_per_s"] > 0]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    is_emulated = cases["device"] == EMULATED
    num_emulated = int(is_emulated.sum()) if not is_emulated.all() else 0
    evidence = _evidence_of(ok_runs(runs))
    kinds = [cases[~is_emulated], cases[is_emulated]]
    groups = [
        _judgement(group, ["device", *key] if num_emulated else key, axes, evidence)
        for kind in kinds
        for key, group in _groups(kind, axes)
    ]
    ordered = tuple(sorted(groups, key=_worth, reverse=True))
    compared = kinds[0] if num_emulated else cases
    return Judged(ordered, broken, num_emulated, compared, evidence, tuple(axes), of_runs)


def alike(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that were not oversubscribed, or all if every one was."""
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def _groups(cases: pd.DataFrame, axes: Axes) -> list[tuple[list[str], pd.DataFrame]]:
    """Group cases that do the same work on as many ranks and replicas.

    These are free if that leaves no pair.
    """
    work = [axis for axis in work_axes(axes) if axis != "device"]
    sizes = [axis for axis in ("world_size", "replicas") if axis in axes]
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
    cases: pd.DataFrame, key: Sequence[str], axes: Axes, evidence: Evidence
) -> Judgement:
    compared = alike(cases).sort_values(
        ["tokens_per_s", "peak_memory_bytes"], ascending=[False, True], kind="stable"
    )
    rows = [case for _, case in compared.iterrows()]
    launches = [evidence.launches[str(row["case_id"])] for row in rows]
    leads = tuple(lead(launches[0], others) for others in launches[1:])
    # The best other case that takes the same step, or else the next case.
    same = (n for n, row in enumerate(rows[1:], 1) if (row[_STEP] == rows[0][_STEP]).all())
    rival = next(same, min(1, len(rows) - 1))
    # The best leads this case with the least certainty; it may be as fast as another.
    grades = [Grade.decided if own.is_equal else own.grade for own in leads]
    doubtful = [n for n, grade in enumerate(grades, 1) if grade is weakest(grades)]
    pivot = rival if rival in doubtful or not doubtful else doubtful[0]
    pair = [rows[place] for place in dict.fromkeys((0, rival))]
    others = [row for place, row in enumerate(rows) if place not in (0, rival)]
    fewest = min(int(row["num_launches"]) for row in pair)
    carried = {n for launches in evidence.cautions.values() for own in launches for n in own}
    unknown = sorted(carried - set(Caution.__members__))  # a newer version of ppbench knows them
    kinds = (*FORBIDDING, *(SCATTER if fewest < FEWEST_LAUNCHES else ()), *unknown)
    most = Grade.undecided
    cautions = _names(evidence.disturbing(row, kinds, 0.5) for row in pair)
    if not cautions:
        single = _names(evidence.disturbing(row, FORBIDDING) for row in pair)
        other = _names(evidence.disturbing(row, FORBIDDING, 0.5) for row in others)
        cautions = _names([single, other])
        most = Grade.leaning if cautions else Grade.decided
    machines = frozenset().union(*(evidence.machines[str(row["case_id"])] for row in rows))
    is_spread = len(machines) > 1 and not set(axes).intersection(_MACHINE_AXES)
    limits = [most, Grade.undecided if is_spread else Grade.decided]
    return Judgement(
        where=settings_text(rows[0], [axis for axis in axes if axis in key]),
        axes=tuple(a for a in axes if a not in key and len(compared[a].astype(str).unique()) > 1),
        cases=compared,
        grade=weakest([*grades, *limits]),
        leads=leads,
        rival_place=rival,
        pivot=pivot,
        cautions=cautions,
        has_several_machines=is_spread,
        needed=launches_needed(launches[0], launches[pivot]) if leads else None,
        num_left_out=len(cases) - len(compared),
    )


def _names(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _evidence_of(runs: pd.DataFrame) -> Evidence:
    runs = runs.reindex(columns=[*dict.fromkeys([*runs.columns, *INTERVAL, "fingerprint"])])
    launches: dict[str, Launches] = {}
    cautions: dict[str, tuple[tuple[str, ...], ...]] = {}
    machines: dict[str, frozenset[str]] = {}
    needed = ["case_id", "tokens_per_s", *INTERVAL, "cautions", "fingerprint"]
    by_case_id: dict[str, list[dict[Hashable, Any]]] = {}
    for row in runs[needed].to_dict("records"):
        by_case_id.setdefault(str(row["case_id"]), []).append(row)
    for case_id, rows in by_case_id.items():
        speeds = np.array([row["tokens_per_s"] for row in rows], dtype=float).tolist()
        low, high = (np.array([row[name] for row in rows], dtype=float) for name in INTERVAL)
        positive = tuple(speed for speed in speeds if speed > 0)
        launches[case_id] = Launches(positive, float(low.min()), float(high.max()))
        cautions[case_id] = tuple(tuple(cautions_of(row)) for row in rows)
        known = (row["fingerprint"] for row in rows)
        machines[case_id] = frozenset(str(one) for one in known if not is_missing(one))
    return Evidence(launches, cautions, machines)


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
