"""Who slows a job of many replicas down, and what that costs: what-if analysis of stragglers.

The method and the figures are those of Lin et al., "Understanding Stragglers in Large Model
Training Using What-if Analysis" (OSDI 2025, arXiv 2505.05713). The job's steps are replayed with
its own times, and again with some of them ideal; in a row where they follow each other:

    T             a step with all its own times: from the first start to the last end, over steps
    T_ideal       with ideal times only
    S = T / T_ideal                                     slowness; 1 - 1/S of the job is wasted
    S_x = T(only x has its own times) / T_ideal         of an op type, stage, replica or worker x
    M_x = (T - T(x like the others)) / (T - T_ideal)    the share of the slowness that x explains

A worker is one rank of one replica; its optimizer counts as its computations do where steps follow
each other. Three things differ from the paper. The ideal time of a
computation is no mean over all workers, which a slow stage would raise, but the median over stages
of the mean over replicas, outliers left out, of a worker's mean. S of a worker is computed, not
bounded by those of its stage and replica: replicas that are ideal are alike, so that two are enough
to replay. And what is "like the others" keeps its jitter: its times are multiplied by the ideal
over its own mean (of transfers and collectives, which have long tails, the median), so chance names
nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COMPUTE_OPS, JOINING_OPS, SEND_OPS, Op
from ppbench.analysis.job_times import Chosen, JobTimes, Ns

LEAST_COST = 0.01
"""Smallest share of the step that being slow must cost to be reported."""
NEARLY_ALL = 0.8
"""The first of `Kind` that costs this share of what the costliest does is the cause."""
CORRELATED = 0.3
"""Correlation of forward and backward from which sequence lengths are asked what they cost.

There, where nobody asks, 0.9 alone makes them the cause (section 5.3).
"""
LEAST_SLOWNESS, LEAST_EXPLAINED = 1.1, 0.5
"""S from which a job straggles there, and M from which an op type alone is the cause of it."""
WORST_WORKERS = 0.03
"""The share of workers that `worst_workers` is of, as in equation 5 there."""
_TRIED = 3
"""How many of the slowest of each kind are replayed like the others."""

Factors = npt.NDArray[np.float64]
Change = Callable[[], Factors | Ns]
"""Makes changed times of the job, when they are asked for."""


class Kind(StrEnum):
    """What can be slow, the smallest first: a slow worker makes its stage and replica slow, too."""

    WORKER = "worker"
    LINK = "link"  # of one replica
    REPLICA = "replica"
    STAGE = "stage"  # a rank of every replica
    LINKS = "link of every replica"
    LENGTHS = "sequence lengths"
    OP = "op type"  # transfers or collectives


@dataclass(frozen=True)
class Straggler:
    """Someone who is slow, and what it costs: the step's mean less that with it like the others."""

    kind: Kind
    replica: int | None
    index: int | None  # of a rank, or a link's first stage
    op: Op | None
    cost_ns: float
    share: float  # of the step
    explained: float  # M


@dataclass(frozen=True, eq=False)
class Stragglers:
    """The slowness of a job, by op type, stage, replica and worker."""

    measured_ns: float
    """Mean step as measured, host time between actions included."""
    step_ns: float
    """Mean step as replayed, T over steps."""
    ideal_ns: float
    by_op: pd.DataFrame
    """`op`, `slowness`, `wasted`, `share` of all that is beyond 1."""
    by_stage: pd.DataFrame
    """The same by `rank` of the pipeline, over all replicas."""
    by_replica: pd.DataFrame
    by_worker: pd.DataFrame
    """By `replica` and `rank`: the heat map."""
    worst_workers: float
    """M of the slowest `WORST_WORKERS` of workers."""
    last_stage: float
    """M of the last rank: the share of slowness that a head on it explains."""
    correlation: float
    """Pearson's r of forward and backward times of a microbatch on a worker, each over its mean."""
    tried: list[Straggler]
    """All that were replayed like the others, the costliest first."""
    cause: Straggler | None
    """Nothing where nobody is slow."""

    @property
    def slowness(self) -> float:
        return self.step_ns / self.ideal_ns

    @property
    def wasted(self) -> float:
        return 1 - 1 / self.slowness


def stragglers_of(times: JobTimes) -> Stragglers:
    """Analyse the steps of a job; raises what `times_of` raises for those that are incomplete."""
    columns, ns = times.columns, times.ns
    replicas, ranks = range(ns.shape[1]), range(columns.program.world_size)
    own_work = frozenset({*COMPUTE_OPS, Op.OPT})
    compute = columns.of_ops(own_work)
    # What each column takes in each replica, and what it would ideally take.
    own_ns = np.ones(ns.shape[1:])
    of_stages: dict[tuple[Op, int], list[float]] = {}  # by op and slice
    for op, at in columns.kinds:
        center = np.mean if op in own_work else np.median
        own_ns[:, at] = center(ns[..., at], axis=(0, 2))[:, None]
        of_stages.setdefault((op, columns.part[at[0]]), []).append(_usual(own_ns[:, at[0]]))
    ideal = np.zeros(len(columns.actions), np.int64)
    for (op, part), stages in of_stages.items():
        ideal[columns.of_ops([op]) & (columns.part == part)] = round(float(np.median(stages)))

    def means(many: Iterable[Factors | Ns]) -> Iterator[float]:
        """The mean step with each of some times."""
        whole = (changed.astype(np.int64, copy=False) for changed in many)
        return (float(steps_ns.mean()) for steps_ns in times.steps_ns(whole))

    # T, T_ideal, and S where only some columns have their own times. Of S of one replica, and of
    # each of its ranks, the others are ideal, and so alike: one of them stands for all.
    ideally = np.broadcast_to(ideal, (len(ns), 1, len(ideal)))
    ops = list(dict.fromkeys(op for op, _ in of_stages))
    of_ranks = [columns.rank == rank for rank in ranks]
    of_some = [*(columns.of_ops([op]) for op in ops), *of_ranks]
    every = np.ones(len(ideal), np.bool_)
    of_one = (
        np.where(chosen, ns[:, replica], ideal)[:, None]
        for replica in replicas
        for chosen in (every, *of_ranks)
    )
    asked = itertools.chain(
        [ns, ideally],
        (np.where(chosen, ns, ideal) for chosen in of_some),
        (np.concatenate([own, ideally][: len(replicas)], axis=1) for own in of_one),
    )
    step_ns, ideal_ns, *some = means(asked)
    slowness = np.array(some) / ideal_ns
    of_ops, by_rank, alone = np.split(slowness, [len(ops), len(of_some)])
    alone = alone.reshape(len(replicas), -1)
    by_op = pd.DataFrame({"op": list(map(str, ops)), "slowness": of_ops})
    by_stage = pd.DataFrame({"rank": ranks, "slowness": by_rank})
    by_replica = pd.DataFrame({"replica": replicas, "slowness": alone[:, 0]})
    by_worker = pd.DataFrame(
        {
            "replica": np.repeat(replicas, len(ranks)),
            "rank": np.tile(ranks, len(replicas)),
            "slowness": alone[:, 1:].ravel(),
        }
    )

    # Forward and backward times of each microbatch on a worker, over their means.
    relative = ns / np.maximum(own_ns, 1)
    order = np.lexsort((columns.microbatch, columns.stage))
    forward = order[columns.of_ops([Op.F])[order]]
    backward = order[columns.of_ops([Op.B, Op.I])[order]]
    both = relative[..., forward].ravel(), relative[..., backward].ravel()
    correlation = 0.0
    if min(map(len, both)) > 1 and min(one.std() for one in both) > 0:
        correlation = float(np.corrcoef(*both)[0, 1])

    # All have their own times, but for some that are like the others: M.
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.nan_to_num(ideal / own_ns, nan=1.0, posinf=1.0)
    changes: list[tuple[Change, tuple[Kind, int | None, int | None, Op | None]]] = []

    def alike(
        chosen: Chosen, kind: Kind, replica: int | None = None, index: int | None = None
    ) -> None:
        """Ask with some columns of one replica, or of all, like the others."""
        is_of = np.array([replica in (None, each) for each in replicas])
        factors = np.where(is_of[:, None] & chosen, factor, 1.0)
        changes.append((lambda: ns * factors, (kind, replica, index, None)))

    def ideally_where(chosen: Chosen) -> Ns:
        return np.where(chosen, ideal, ns)

    for workers in (
        by_worker.nlargest(max(1, round(WORST_WORKERS * len(by_worker))), "slowness"),
        by_worker[by_worker["rank"] == ranks[-1]],
    ):
        is_slow = np.zeros((len(replicas), len(ranks)), np.bool_)
        is_slow[workers["replica"], workers["rank"]] = True
        alike(is_slow[:, columns.rank], Kind.WORKER)
    links = np.unique(columns.link[columns.link >= 0]).tolist()
    if len(replicas) > 1:
        slowest = by_worker.nlargest(_TRIED, "slowness")[["replica", "rank"]]
        for replica, rank in slowest.to_numpy().tolist():
            alike(compute & of_ranks[rank], Kind.WORKER, replica, rank)
        for replica in by_replica.nlargest(_TRIED, "slowness")["replica"].tolist():
            alike(compute, Kind.REPLICA, replica)
        # The links of single replicas whose messages take longest beyond their ideal time.
        beyond = (own_ns - ideal).clip(min=0)
        excess = {
            (replica, link): float(beyond[replica, columns.link == link].sum())
            for link in links
            for replica in replicas
        }
        for replica, link in sorted(excess, key=lambda one: -excess[one])[:_TRIED]:
            alike(columns.link == link, Kind.LINK, replica, link)
    for rank in ranks:
        alike(compute & of_ranks[rank], Kind.STAGE, index=rank)
    for link in links:
        alike(columns.link == link, Kind.LINKS, index=link)
    if correlation >= CORRELATED:
        # How much longer than usual each microbatch of a replica takes: the median of stages.
        usual = np.maximum(np.median(own_ns, axis=0), 1)
        factors = np.ones(ns.shape)
        for microbatch in range(columns.program.num_microbatches):
            of_one = compute & (columns.microbatch == microbatch)
            factors[..., of_one] = np.median(ns[..., of_one] / usual[of_one], axis=2, keepdims=True)
        of_usual = np.maximum(factors, 1e-3)
        changes.append((lambda: ns / of_usual, (Kind.LENGTHS, None, None, None)))
    for op in ops:
        if op in (*SEND_OPS, *JOINING_OPS):
            change = partial(ideally_where, columns.of_ops([op]))
            changes.append((change, (Kind.OP, None, None, op)))
    costs = (step_ns - changed_ns for changed_ns in means(change() for change, _ in changes))
    beyond_ns = step_ns - ideal_ns
    tried = [
        Straggler(*who, cost, cost / step_ns, cost / beyond_ns if beyond_ns > 0 else 0.0)
        for (_, who), cost in zip(changes, costs, strict=True)
    ]
    worst_workers, last_stage = tried.pop(0).explained, tried.pop(0).explained
    tried.sort(key=lambda one: -one.share)

    # The cause is the smallest that costs nearly as much as the costliest; see `Kind`.
    straggles = step_ns / ideal_ns >= LEAST_SLOWNESS
    able = [
        one
        for one in tried
        if one.share >= LEAST_COST
        and (one.kind is not Kind.OP or (straggles and one.explained >= LEAST_EXPLAINED))
    ]
    most = max((one.share for one in able), default=0.0)
    causes = [one for one in able if one.share >= NEARLY_ALL * most]
    return Stragglers(
        float(times.measured_ns.sum()) / len(ns),
        step_ns,
        ideal_ns,
        _with_shares(by_op),
        _with_shares(by_stage),
        _with_shares(by_replica),
        _with_shares(by_worker),
        worst_workers,
        last_stage,
        correlation,
        tried,
        min(causes, key=lambda one: list(Kind).index(one.kind), default=None),
    )


def _usual(values: Factors) -> float:
    """The mean of those that are no outliers: within three deviations, by the median absolute one.

    So neither a slow replica moves it, nor sequences that happen to be unequal between replicas.
    """
    median = np.median(values)
    away = np.abs(values - median)
    return float(values[away <= 3 * 1.4826 * np.median(away)].mean())


def _with_shares(frame: pd.DataFrame) -> pd.DataFrame:
    beyond = (frame["slowness"] - 1).clip(lower=0)
    total = beyond.sum()
    return frame.assign(
        wasted=1 - 1 / frame["slowness"], share=beyond / total if total else 0.0 * beyond
    )
