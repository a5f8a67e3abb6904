"""The mean costs of a run's actions and messages, from which every counterfactual is computed.

Stages have different costs only where they differ significantly. The means of equal stages differ
by chance, and the slowest of them would look like an imbalance; so the stages' means are shrunk
towards each other by the part that an analysis of variance attributes to chance (James and Stein
1961: by 1 - 1/F), and are one mean where the F test does not reject equality at 1 %.
"""

from __future__ import annotations

import itertools
import json
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from engine.plan.action import OPS, SEND_OPS, Action, Op
from engine.plan.lower import Edge, edge_of
from engine.plan.program import Program
from ppbench.analysis.metrics import compute_spans
from ppbench.statistics.significance import is_larger

SIGNIFICANCE = 0.01

StageCosts = Mapping[Op, Sequence[int | None]]
"""Nanoseconds of one microbatch by op and stage; None where the stage has no such op."""


@dataclass(frozen=True)
class Costs:
    """Mean nanoseconds of a computation by op and stage, and of a message by channel."""

    by_stage: StageCosts
    by_channel: dict[Edge, int]

    def by_kind(self, program: Program) -> array[int]:
        """Nanoseconds by op and stage of a program, of a SEND those of its message."""
        return array("q", itertools.chain(*(self._of_op(op, program.num_stages) for op in OPS)))

    def _of_op(self, op: Op, num_stages: int) -> Iterator[int]:
        if op in SEND_OPS:
            edges = (edge_of(Action(stage, op, 0)) for stage in range(num_stages))
            return (self.by_channel.get(edge, 0) for edge in edges)
        return (ns or 0 for ns in self.by_stage.get(op, (0,) * num_stages))

    def balanced(self) -> Costs:
        """The same work on equal stages."""
        equal = {op: _equal(costs) for op, costs in self.by_stage.items()}
        return Costs(equal, self.by_channel)


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
    """Each stage's time for a microbatch, forward and backward."""
    return [_of_microbatch(costs.by_stage, stage) for stage in range(len(costs.by_stage[Op.F]))]


def link_ns(costs: Costs) -> dict[int, float]:
    """Moving time of a message by link (its first stage), the mean of both directions."""
    by_link: dict[int, list[int]] = {}
    for channel, ns in sorted(costs.by_channel.items()):
        by_link.setdefault(min(channel), []).append(ns)
    return {link: statistics.mean(both) for link, both in sorted(by_link.items())}


def slow_stage(costs: Costs) -> Outlier | None:
    """The stage that is an outlier; None if no stage is, or if there are only two."""
    return _outlier(dict(enumerate(stage_ns(costs))), STAGE_OUTLIER_RATIO)


def _of_microbatch(by_stage: StageCosts, stage: int) -> float:
    """A stage's forward and backward, the latter whole or in halves as the stage has it."""
    given = {op: costs[stage] for op, costs in by_stage.items()}
    whole, halves = given.get(Op.B), [given.get(op) or 0 for op in (Op.I, Op.W)]
    return float((given[Op.F] or 0) + (sum(halves) if whole is None else whole))


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
    """Give each op of a stage the median cost of the other stages."""
    by_stage = {
        op: (*of_op[:stage], _median_of_others(of_op, stage), *of_op[stage + 1 :])
        for op, of_op in costs.by_stage.items()
    }
    return Costs(by_stage, costs.by_channel)


def _median_of_others(of_op: Sequence[int | None], stage: int) -> int | None:
    """Median cost of the other stages; the stage's own if it or all others lack the op."""
    others = [ns for other, ns in enumerate(of_op) if other != stage and ns is not None]
    return of_op[stage] if of_op[stage] is None or not others else round(statistics.median(others))


def with_link_like_others(costs: Costs, link: int) -> Costs:
    """Give both channels of a link the median time of all others."""
    others = [ns for channel, ns in costs.by_channel.items() if min(channel) != link]
    usual = round(statistics.median(others))
    return Costs(
        costs.by_stage,
        {c: usual if min(c) == link else ns for c, ns in costs.by_channel.items()},
    )


def stored_costs(run: pd.Series, edges: pd.DataFrame) -> Costs:
    """The costs that a run's idle time was attributed with, from its row and its `edges`."""
    by_stage = {Op(op): tuple(ns) for op, ns in json.loads(str(run["op_costs_ns"])).items()}
    return Costs(by_stage, _mean_by_channel(edges))


def _mean_by_channel(moved: pd.DataFrame) -> dict[Edge, int]:
    means = moved.groupby(["source", "target"], as_index=False)["moving_ns"].mean()
    rows = zip(means["source"], means["target"], means["moving_ns"], strict=True)
    return {Edge(int(source), int(target)): round(mean) for source, target, mean in rows}


def _equal(of_op: Sequence[int | None]) -> tuple[int | None, ...]:
    mean = round(statistics.mean(ns for ns in of_op if ns is not None))
    return tuple(None if ns is None else mean for ns in of_op)


def measured_costs(spans: pd.DataFrame, messages: pd.DataFrame, num_stages: int) -> Costs:
    """The mean costs of the measured steps; `messages` are those of `analysis.transfers`."""
    compute = compute_spans(spans)
    duration = compute["end_ns"] - compute["start_ns"]
    by_stage = {
        Op(str(op)): _of_stages(duration[of_op.index], of_op["stage"], num_stages)
        for op, of_op in compute.groupby("op")
    }
    return Costs(by_stage, _mean_by_channel(messages))


def _of_stages(duration: pd.Series, stage: pd.Series, num_stages: int) -> tuple[int | None, ...]:
    samples = {int(str(s)): values.to_numpy() for s, values in duration.groupby(stage)}
    means = {s: float(values.mean()) for s, values in samples.items()}
    weight = share_of_difference(samples)
    overall = float(np.mean(list(means.values())))
    shrunk = {s: round(overall + weight * (mean - overall)) for s, mean in means.items()}
    return tuple(shrunk.get(s) for s in range(num_stages))


def variation(spans: pd.DataFrame, costs: Costs) -> float:
    """Root mean square deviation of computations from their costs, relative to the costs'."""
    compute = compute_spans(spans)
    pairs = zip(compute["op"], compute["stage"], strict=True)
    expected = np.array([costs.by_stage[Op(op)][stage] or 0 for op, stage in pairs], dtype=float)
    deviation = (compute["end_ns"] - compute["start_ns"]).to_numpy() - expected
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
