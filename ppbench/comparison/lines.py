"""Two sides of many cases, figure by figure: changes with verdicts, and the spans that moved.

    Contrast ---> Line, Line, ...     a verdict per figure, with Holm's correction over a Family
        `-------> Breakdown           the classes of spans that changed

The sides differ along one axis, the commit or a setting; `comparison.contrasts` finds the pairs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pandas as pd

from ppbench.analysis.breakdown import (
    Moved,
    breakdown,
    launch_figures,
    of_whole_pipeline,
    with_whole_backwards,
)
from ppbench.comparison.axes import key_of
from ppbench.comparison.evidence import SPEEDS, Background, evidence_of, with_figure
from ppbench.comparison.launches import Key
from ppbench.comparison.sides import Side
from ppbench.display.cases import axis_text
from ppbench.display.metrics import METRICS
from ppbench.errors import UsageError, nearest
from ppbench.judge.differences import Ratio
from ppbench.judge.evidence import Evidence, Metric
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown
from ppbench.judge.verdicts import LEVEL, Change, Verdict, judge

SHOWN = ("tokens_per_s", "bubble_fraction", "peak_memory_bytes")
"""The metrics that are compared by default."""
Pair = tuple[Hashable, Hashable]
COMMIT = "commit"
"""The axis of two commits, whose cases are the same."""


@dataclass(frozen=True)
class Contrast:
    """The launches of two cases that differ along one axis alone, on machines of their own.

    `base` and `head` are rows of `runs` that are ok.
    """

    axis: str  # a setting, or COMMIT
    base_key: Key  # of its launches
    head_key: Key  # of a commit the same
    common: tuple[str, ...]  # the case beside other contrasts, in words, setting by setting
    base_value: Hashable = None  # of the setting
    head_value: Hashable = None
    has_other_pairs: bool = False  # whether some contrast is of other values
    base: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False, repr=False)
    head: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False, repr=False)

    @property
    def case_id(self) -> str:
        return self.base_key[0]

    @property
    def arms(self) -> Pair:
        """Head and base, as a `Family` knows them."""
        return (self.head_value, self.head_key), (self.base_value, self.base_key)

    @property
    def fingerprint(self) -> str:
        """The machine, or both."""
        return " / ".join(dict.fromkeys((self.base_key[1], self.head_key[1])))

    @property
    def pair(self) -> str:
        """`afab -> 1f1b`."""
        values = (self.base_value, self.head_value)
        return " -> ".join(axis_text(self.axis, value) for value in values)

    @property
    def parts(self) -> tuple[str, ...]:
        """Its name beside the others, setting by setting."""
        has_pair = self.has_other_pairs or not self.common
        return (self.pair, *self.common) if has_pair else self.common

    @property
    def text(self) -> str:
        return ", ".join(self.parts)

    def values(self) -> dict[str, object]:
        """Its columns in `Comparison.frame`."""
        case = {"case": ", ".join(self.common), "fingerprint": self.fingerprint}
        if self.axis == COMMIT:
            return {"case_id": self.case_id, **case}
        return {
            "axis": self.axis,
            "base_value": self.base_value,
            "head_value": self.head_value,
            "case": case["case"],
            "base_case_id": self.base_key[0],
            "head_case_id": self.head_key[0],
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Family:
    """Arms of which these pairs are judged together, be they shown or not."""

    arms: Mapping[Hashable, pd.DataFrame]
    pairs: Sequence[Pair]  # head and base
    resolutions: Mapping[Pair, float] = field(default_factory=dict)  # where one is asked for
    does_same_work: bool = False  # so that its arms share their noise


@dataclass(frozen=True)
class DiscountedLaunch:
    """A launch that does not count in a verdict."""

    side: str  # `base` or `head`
    run_id: str
    launch: int
    reason: str  # of `judge.evidence.DiscountReason`
    slowdown: Slowdown  # of its machine

    def values(self) -> dict[str, object]:
        """It as JSON has it."""
        is_known = not math.isnan(self.slowdown.fraction)
        return {
            "side": self.side,
            "run_id": self.run_id,
            "launch": self.launch,
            "reason": self.reason,
            "slowdown": self.slowdown.fraction if is_known else None,
            "cause": str(self.slowdown.cause) if is_known else None,
        }


@dataclass(frozen=True)
class Line:
    """The change of one metric of one series."""

    series: Contrast
    metric: Metric
    change: Change
    evidence: Evidence
    discounted: tuple[DiscountedLaunch, ...] = ()

    def values(self) -> dict[str, object]:
        """The row of this line in `Comparison.frame`."""
        change = self.change
        return {
            **self.series.values(),
            "metric": self.metric.name,
            "base": change.base,
            "head": change.head,
            **ends("ratio", change.ratio),
            **ends("difference", change.difference),
            "p": change.p if change.has_interval else None,
            "verdict": str(change.verdict),
            "num_base": change.num_base,
            "num_head": change.num_head,
            "resolution": change.resolution,
            "within": change.within if change.has_interval else None,
            "noise": None if (noise := self.evidence.noise) is None else noise.deviation,
            "discounts": json.dumps([launch.values() for launch in self.discounted]),
        }


def ends(name: str, ratio: Ratio | None) -> dict[str, object]:
    """An estimate and the ends of its interval, as columns; null where it was not made."""
    values = (None,) * 3 if ratio is None else (ratio.estimate, ratio.low, ratio.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


@dataclass(frozen=True)
class Breakdown:
    """The changes of the spans of one series."""

    series: Contrast
    moved: tuple[Moved, ...]


@dataclass(frozen=True)
class Stopped:
    """The looks that were taken until launching was stopped, and whether all was decided then."""

    looks: Looks
    is_decided: bool
    is_spent: bool = False  # the time for launches, where it was bounded
    to_decide: Mapping[str, str] = field(default_factory=dict)  # settings that probably would
    why_not: str = ""  # no sensible number of launches would

    def as_dict(self) -> dict[str, object]:
        """The looks, as JSON has them."""
        return {
            "num_looks": len(self.looks.counts),
            "launches": list(self.looks.counts),
            "max_launches": self.looks.most,
            "level_spent": self.looks.spent(LEVEL),
            "is_decided": self.is_decided,
            "stop": "decided"
            if self.is_decided
            else "budget spent"
            if self.is_spent
            else "most launches reached",
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class Comparison:
    """Two sides along one axis: all lines, by contrast and then metric, with notes on them."""

    axis: str  # a setting, or COMMIT
    base: Side
    head: Side  # along a setting the same: its runs have all values
    contrasts: tuple[Contrast, ...]  # those that no launch has a metric of have no line
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    sweep_file: str | None  # that was named, or from which all runs come
    axes: tuple[str, ...] = ()  # settings in which the cases of two commits differ
    texts: Mapping[str, str] = field(default_factory=dict)  # of their cases, by id
    base_value: Hashable | None = None  # that others are compared with; None: all with all
    axis_values: tuple[Hashable, ...] = ()  # in order
    shared: str = ""  # the usual settings that all pairs have alike, in words
    stopped: Stopped | None = None  # if launches were made until the answer was clear
    # Told in words and as data, and found once.
    _broken_down: dict[Contrast, Breakdown | None] = field(
        default_factory=dict, init=False, compare=False
    )

    def __repr__(self) -> str:
        if self.axis == COMMIT:
            names = f"of {self.base.name} with {self.head.name}"
            return f"<Comparison {names}: {self.counts() or 'no case in common'}>"
        values = ", ".join(map(str, self.axis_values))
        return f"<Comparison across {key_of(self.axis)} ({values}): {self.counts() or 'no pair'}>"

    @property
    def frame(self) -> pd.DataFrame:
        """One row of raw figures per series and metric."""
        return pd.DataFrame([self.values_of(line) for line in self.lines])

    def values_of(self, line: Line) -> dict[str, object]:
        """The row of a line in `frame`."""
        values = line.values()
        if self.stopped is not None:
            looks = self.stopped.looks
            values |= {"num_looks": len(looks.counts), "level_spent": looks.spent(LEVEL)}
            values["is_decided"] = line.change.is_decided
        return values

    @property
    def is_open(self) -> bool:
        """Whether as many launches were made as were allowed, and the answer is not clear."""
        return self.stopped is not None and not self.stopped.is_decided

    @property
    def has_verdict(self) -> bool:
        """Whether the change of any figure is decided."""
        return any(line.change.is_decided for line in self.lines)

    @property
    def run_ids(self) -> list[str]:
        """The runs that were compared, each once."""
        sides = (side for contrast in self.contrasts for side in (contrast.base, contrast.head))
        return sorted({str(run_id) for side in sides for run_id in side["run_id"]})

    def series(self) -> list[Contrast]:
        return list(dict.fromkeys(line.series for line in self.lines))

    def changed(self) -> list[Contrast]:
        """Return the series whose throughput or step has changed, or may have.

        Open ones are included: a stage that moved shows in its spans even where the step, which
        has the noise of all ranks, does not.
        """
        changed = []
        for line in self.lines:
            change = line.change
            may_have = change.verdict.is_claim
            if change.verdict is Verdict.open and change.ratio is not None:
                may_have = abs(math.log(change.ratio.estimate)) > math.log1p(change.resolution)
            if may_have and line.metric.name in SPEEDS:
                changed.append(line.series)
        return list(dict.fromkeys(changed))

    def break_down(self, wanted: Iterable[Contrast]) -> list[Breakdown]:
        """Find the spans that changed in these series, as far as both sides have stored theirs.

        Where the sides have other stages, spans are summed over the whole pipeline.
        """
        breakdowns = []
        for contrast in wanted:
            if contrast not in self._broken_down:
                self._broken_down[contrast] = self._break_down(contrast)
            if (found := self._broken_down[contrast]) is not None:
                breakdowns.append(found)
        return breakdowns

    def _break_down(self, contrast: Contrast) -> Breakdown | None:
        runs_of_sides, sides = (contrast.base, contrast.head), []
        for runs, store in zip(runs_of_sides, (self.base.store, self.head.store), strict=True):
            spans = store.table("spans", runs["run_id"]).groupby("run_id", sort=False)
            sides.append([launch_figures(of_run) for _, of_run in spans])
        if not all(sides):
            return None
        base, head = with_whole_backwards(*sides)
        first, last = (runs.iloc[0] for runs in runs_of_sides)
        if any(first[name] != last[name] for name in ("world_size", "stages_per_rank")):
            base, head = ([of_whole_pipeline(own) for own in side] for side in (base, head))
        step_ns = float(contrast.base["step_ns"].median())
        return Breakdown(contrast, tuple(breakdown(base, head, step_ns)))

    def counts(self) -> str:
        """`2 faster, 1 same`; empty without lines."""
        counted = Counter(str(line.change.verdict) for line in self.lines)
        return ", ".join(f"{num} {verdict}" for verdict, num in counted.items())


def read_metrics(
    names: Sequence[str], default: Sequence[str] = SHOWN, option: str = "--metric"
) -> list[Metric]:
    """Return the metrics with these names. Raises UsageError for an unknown one."""
    for name in names:
        if name not in METRICS:
            raise UsageError(f'{option}: unknown metric "{name}"{nearest(name, METRICS)}')
    return [METRICS[name] for name in dict.fromkeys(names or default)]


def lines_of(
    metrics: Sequence[Metric],
    contrasts: Sequence[Contrast],
    families: Sequence[Family],
    background: Background,
    looks: Looks = ONE_LOOK,
) -> list[Line]:
    """Compare every metric of every contrast, with Holm's correction for each metric in a family.

    A metric that no launch of a contrast has makes no line: emulated ranks have no peak memory.
    """
    lines = []
    judged = {one.name: judged_pairs(one, families, background, looks) for one in metrics}
    for contrast, metric in product(contrasts, metrics):
        evidence, change = judged[metric.name][contrast.arms]
        if not evidence.base.figures and not evidence.head.figures:
            continue
        discounted = []
        for discount in change.discounts:
            runs = contrast.head if discount.side == "head" else contrast.base
            run = with_figure(runs, metric).iloc[discount.index]
            run_id, reason = str(run["run_id"]), str(discount.reason)
            slowdown = background.slowdowns.get(run_id, NOT_KNOWN)
            discounted.append(
                DiscountedLaunch(discount.side, run_id, int(run["launch"]), reason, slowdown)
            )
        lines.append(Line(contrast, metric, change, evidence, tuple(discounted)))
    return lines


def judged_pairs(
    metric: Metric, families: Iterable[Family], background: Background, looks: Looks
) -> dict[Pair, tuple[Evidence, Change]]:
    """Judge the pairs of each family together; each is there in both orders."""
    judged: dict[Pair, tuple[Evidence, Change]] = {}
    for family in families:
        evidences = evidence_of(
            metric, family.arms, family.pairs, background, shares_noise=family.does_same_work
        )
        for pair, resolution in family.resolutions.items():
            evidences[pair] = replace(evidences[pair], resolution=resolution)
        changes = judge(metric, list(evidences.values()), looks)
        for (pair, evidence), change in zip(evidences.items(), changes, strict=True):
            judged[pair] = evidence, change
            judged[pair[::-1]] = evidence.reversed(), change.reversed()
    return judged


def listed(words: Sequence[str], most: int = 4) -> str:
    """`a; b; and 3 more`."""
    shown = "; ".join(words[:most])
    return shown if len(words) <= most else f"{shown}; and {len(words) - most} more"
