"""The mean costs of a run's actions and messages, from which every counterfactual is computed.

Stages have different costs only where they differ significantly. The means of equal stages differ
by chance, and the slowest of them would look like an imbalance; so the stages' means are shrunk
towards each other by the part that an analysis of variance attributes to chance (James and Stein
1961: by 1 - 1/F), and are one mean where the F test does not reject equality at 1 %.

A pair, a forward and a backward that are one action, has a cost of its own: its halves tell nothing
of what they take alone.
"""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pandas as pd

from engine.arrays import Ints
from engine.plan.action import CODES, OPS, SEND_OPS, Action, Op
from engine.plan.messages import Edge, edge_of
from engine.plan.predict import with_pair_times
from engine.plan.program import Program
from engine.plan.walk import of_kinds
from ppbench.analysis.collectives import Moving
from ppbench.analysis.metrics import compute_spans
from ppbench.analysis.pairs import stages_of_pairs
from ppbench.judge.differences import is_larger

SIGNIFICANCE = 0.01
PAIR = "FB"
"""Where the costs of pairs are stored, beside those of ops."""

StageCosts = Mapping[Op, Sequence[int | None]]
"""Nanoseconds of one microbatch by op and stage; None where the stage has no such op."""


@dataclass(frozen=True)
class Costs:
    """Mean nanoseconds of a computation by op and stage, and of a message by channel.

    `of_pairs` has those of a pair by the stage of its forward, where the run had pairs.
    """

    by_stage: StageCosts
    by_channel: dict[Edge, int]
    of_pairs: Sequence[int | None] = ()

    def by_kind(self, program: Program) -> array[int]:
        """Nanoseconds by op and stage of a program, of a SEND those of its message."""
        by_kind, stages = array("q"), range(program.num_stages)
        for op in OPS:
            if op in SEND_OPS:
                edges = (edge_of(Action(stage, op, 0)) for stage in stages)
                by_kind.extend(self.by_channel.get(edge, 0) for edge in edges)
            else:
                by_kind.extend(ns or 0 for ns in self.by_stage.get(op, (0,) * len(stages)))
        return by_kind

    def times(self, program: Program, moving: Moving = MappingProxyType({})) -> Ints:
        """The time of each action of a program; `moving` has those of collectives."""
        by_kind = self.by_kind(program)
        for (op, stage), ns in moving.items():
            by_kind[CODES[op] * program.num_stages + stage] = ns
        took = of_kinds(program, by_kind)
        pair_ns = [ns or 0 for ns in self.of_pairs]
        return with_pair_times(program, took, pair_ns) if pair_ns else took

    def balanced(self) -> Costs:
        """The same work on equal stages."""

        def equal(costs: Sequence[int | None]) -> tuple[int | None, ...]:
            mean = round(statistics.mean(ns for ns in costs if ns is not None))
            return tuple(None if ns is None else mean for ns in costs)

        by_stage = {op: equal(costs) for op, costs in self.by_stage.items()}
        of_pairs = equal(self.of_pairs) if any(self.of_pairs) else self.of_pairs
        return Costs(by_stage, self.by_channel, of_pairs)


STAGE_OUTLIER_RATIO, LINK_OUTLIER_RATIO = 1.05, 1.5
"""Ratio to all others beyond which a stage or link is an outlier; messages vary more."""


@dataclass(frozen=True)
class Outlier:
    """The single stage or link that takes longer than all others."""

    index: int
    ns: float
    others_ns: float  # the median of the others

    @property
    def ratio(self) -> float:
        return self.ns / self.others_ns if self.others_ns else float("inf")


def stage_ns(costs: Costs) -> list[float]:
    """Each stage's time for a microbatch, forward and backward, whole or in halves as it has it."""
    times = []
    for stage in range(len(costs.by_stage[Op.F])):
        given = {op: of_op[stage] for op, of_op in costs.by_stage.items()}
        whole, halves = given.get(Op.B), [given.get(op) or 0 for op in (Op.I, Op.W)]
        times.append(float((given[Op.F] or 0) + (sum(halves) if whole is None else whole)))
    return times


def link_ns(costs: Costs) -> dict[int, float]:
    """Moving time of a message by link (its first stage), the mean of both directions."""
    by_link: dict[int, list[int]] = {}
    for channel, ns in sorted(costs.by_channel.items()):
        by_link.setdefault(min(channel), []).append(ns)
    return {link: statistics.mean(both) for link, both in sorted(by_link.items())}


def slow_stage(costs: Costs) -> Outlier | None:
    """The stage that is an outlier; None if no stage is, or if there are only two."""
    return _outlier(dict(enumerate(stage_ns(costs))), STAGE_OUTLIER_RATIO)


def slow_link(costs: Costs) -> Outlier | None:
    """The link that is an outlier; None if no link is, or if there are only two."""
    return _outlier(link_ns(costs), LINK_OUTLIER_RATIO)


def _outlier(ns_of: Mapping[int, float], least: float) -> Outlier | None:
    """The largest of at least three, if it exceeds all others by the ratio `least`."""
    if len(ns_of) < 3:
        return None
    index = max(ns_of, key=ns_of.__getitem__)
    others = [ns for other, ns in ns_of.items() if other != index]
    if ns_of[index] <= least * max(others):
        return None
    return Outlier(index, ns_of[index], statistics.median(others))


def with_stage_like_others(costs: Costs, stage: int) -> Costs:
    """Give each op of a stage the median cost of the other stages that have it, if it has it."""
    by_stage = {}
    for op, of_op in costs.by_stage.items():
        changed = list(of_op)
        others = [ns for other, ns in enumerate(of_op) if other != stage and ns is not None]
        if of_op[stage] is not None and others:
            changed[stage] = round(statistics.median(others))
        by_stage[op] = tuple(changed)
    return replace(costs, by_stage=by_stage)


def with_link_like_others(costs: Costs, link: int) -> Costs:
    """Give both channels of a link the median time of all others."""
    others = [ns for channel, ns in costs.by_channel.items() if min(channel) != link]
    usual = round(statistics.median(others))
    by_channel = {c: usual if min(c) == link else ns for c, ns in costs.by_channel.items()}
    return replace(costs, by_channel=by_channel)


def stored_costs(run: pd.Series, edges: pd.DataFrame) -> Costs:
    """The costs that a run's idle time was attributed with, from its row and its `edges`."""
    known = {name: tuple(ns) for name, ns in json.loads(str(run["op_costs_ns"])).items()}
    of_pairs = known.pop(PAIR, ())
    return Costs({Op(op): ns for op, ns in known.items()}, _mean_by_channel(edges), of_pairs)


def costs_as_json(costs: Costs) -> str:
    """The costs of computations by op, as `runs` stores them; those of pairs under `PAIR`."""
    of_pairs = {PAIR: costs.of_pairs} if costs.of_pairs else {}
    return json.dumps({**{str(op): ns for op, ns in costs.by_stage.items()}, **of_pairs})


def _mean_by_channel(moved: pd.DataFrame) -> dict[Edge, int]:
    means = moved.groupby(["source", "target"], as_index=False)["moving_ns"].mean()
    rows = zip(means["source"], means["target"], means["moving_ns"], strict=True)
    return {Edge(int(source), int(target)): round(mean) for source, target, mean in rows}


def measured_slices(spans: pd.DataFrame, slices: Sequence[float]) -> tuple[float, ...]:
    """The share of each slice in the time of its microbatch, as measured.

    `slices` are the shares as planned: measured ones are shrunk towards them as stages' means are
    towards each other.
    """
    if not slices:
        return ()
    compute = compute_spans(spans)
    duration = _durations(compute, slices)
    relative = duration / duration.groupby([compute["op"], compute["stage"]]).transform("mean")
    groups = relative.dropna().groupby(compute["microbatch"] % len(slices))
    samples = {int(str(part)): values.to_numpy() for part, values in groups}
    weight = share_of_difference(samples)
    measured = [
        share * (1 + weight * (float(samples[part].mean()) - 1))
        for part, share in enumerate(slices)
    ]
    return tuple(share / sum(measured) for share in measured)


def _durations(compute: pd.DataFrame, slices: Sequence[float]) -> pd.Series:
    """The time of each computation; that of a slice as if all of its microbatch took as long."""
    duration: pd.Series = compute["end_ns"] - compute["start_ns"]
    if slices:
        duration = duration / (np.array(slices) * len(slices))[compute["microbatch"] % len(slices)]
    return duration


def measured_costs(
    spans: pd.DataFrame, messages: pd.DataFrame, num_stages: int, program: Program | None = None
) -> Costs:
    """The mean costs of the measured steps; `messages` are those of `analysis.transfers`.

    With the `program`, those of its pairs are apart, and each slice counts by its share. A backward
    that is in pairs alone is as long as its two halves elsewhere; of what is in pairs alone
    besides, the halves of pairs count.
    """
    compute, of_pairs, split = compute_spans(spans), tuple[int | None, ...](), set[int]()
    if program is not None and program.paired:
        stage_of = stages_of_pairs(compute, program)
        took = (compute["end_ns"] - compute["start_ns"]).groupby(stage_of).sum()
        num = (stage_of.notna() & (compute["op"] == Op.F.value)).groupby(stage_of).sum()
        means = (took / num).to_dict()
        of_pairs = tuple(
            round(means[stage]) if stage in means else None for stage in range(num_stages)
        )
        lone = compute[stage_of.isna()]
        alone = set(zip(lone["op"], lone["stage"], strict=True))
        split = {s for op, s in alone if op == Op.I.value and (Op.W.value, s) in alone}
        alone |= {(Op.B.value, stage) for stage in split}
        kinds = zip(compute["op"], compute["stage"], strict=True)
        compute = compute[stage_of.isna() | np.array([kind not in alone for kind in kinds])]
    duration = _durations(compute, () if program is None else program.slices)
    by_stage = {}
    for op, of_op in compute.groupby("op"):
        groups = duration[of_op.index].groupby(of_op["stage"])
        samples = {int(str(stage)): values.to_numpy() for stage, values in groups}
        means = {stage: float(values.mean()) for stage, values in samples.items()}
        weight, overall = share_of_difference(samples), float(np.mean(list(means.values())))
        shrunk = {s: round(overall + weight * (mean - overall)) for s, mean in means.items()}
        by_stage[Op(str(op))] = tuple(shrunk.get(stage) for stage in range(num_stages))
    if of_pairs and split:
        halves = zip(by_stage[Op.I], by_stage[Op.W], strict=True)
        whole = by_stage.get(Op.B, (None,) * num_stages)
        by_stage[Op.B] = tuple(
            own if own is not None or first is None or second is None else first + second
            for own, (first, second) in zip(whole, halves, strict=True)
        )
    return Costs(by_stage, _mean_by_channel(messages), of_pairs)


def variation(spans: pd.DataFrame, costs: Costs, program: Program | None = None) -> float:
    """Root mean square deviation of computations from their costs, relative to the costs'.

    Of a `program` with pairs, the halves of these are left out, if there is more. A slice that
    takes more than another does not deviate by that.
    """
    compute = compute_spans(spans)
    if program is not None and program.paired:
        lone = compute[stages_of_pairs(compute, program).isna()]
        compute = lone if len(lone) else compute
    pairs = zip(compute["op"], compute["stage"], strict=True)
    expected = np.array([costs.by_stage[Op(op)][stage] or 0 for op, stage in pairs], dtype=float)
    duration = _durations(compute, () if program is None else program.slices)
    deviation = duration.to_numpy() - expected
    return float(np.sqrt((deviation**2).sum() / max(1.0, (expected**2).sum())))


def share_of_difference(samples: Mapping[int, np.ndarray]) -> float:
    """The share of the difference between group means that is not due to chance, 0 to 1."""
    groups = list(samples.values())
    if len(groups) < 2 or min(map(len, groups)) < 2:
        return 1.0
    nums, means = np.array([len(group) for group in groups]), np.array([g.mean() for g in groups])
    freedom, freedom_within = len(groups) - 1, int(nums.sum()) - len(groups)
    between = float(nums @ np.square(means - nums @ means / nums.sum())) / freedom
    squares = sum(np.square(group - group.mean()).sum() for group in groups)
    within = float(squares) / freedom_within
    if not is_larger(between, freedom, within, freedom_within, SIGNIFICANCE):
        return 0.0
    return 1 - within / between
