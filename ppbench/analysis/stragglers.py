"""Who slows a job of many replicas down, and what that costs: what-if analysis of stragglers.

The method and the figures are those of Lin et al., "Understanding Stragglers in Large Model
Training Using What-if Analysis" (OSDI 2025, arXiv 2505.05713). The job's steps are replayed with
its own times, and again with some of them ideal:

    T             steps replayed with all their own times
    T_ideal       with ideal times only
    S = T / T_ideal                                     slowness; 1 - 1/S of the job is wasted
    S_x = T(only x has its own times) / T_ideal         of an op type, stage, replica or worker x
    M_x = (T - T(x like the others)) / (T - T_ideal)    the share of the slowness that x explains

A worker is one rank of one replica. Three things differ from the paper. The ideal time of a
computation is no mean over all workers, which a slow stage would raise, but the median over stages
of the mean over replicas, outliers left out, of a worker's mean. S of a worker is computed, not
bounded by those of its stage and replica: replicas that are ideal are alike, so that two are enough
to replay. And what is "like the others" keeps its jitter: its times are multiplied by the ideal
over its own mean (of transfers and collectives, which have long tails, the median), so chance names
nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COMPUTE_OPS, SEND_OPS, Op
from engine.plan.replay import JOINING_OPS
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
    return _Analysis(times).result()


class _Analysis:
    """The replays of one job."""

    def __init__(self, times: JobTimes) -> None:
        self._times, self._columns, self._ns = times, times.columns, times.ns
        self._own, self._ideal = _own_and_ideal(times)
        self._num_ranks = self._columns.program.world_size
        self._replicas = self._ns.shape[1]
        self._step_ns = self._mean(self._ns)
        self._ideal_ns = self._mean(self._ideal[None, None])

    def _mean(self, ns: Ns) -> float:
        return float(self._columns.steps_ns(ns).mean())

    def result(self) -> Stragglers:
        by_op, by_stage = pd.DataFrame(self._by_op()), pd.DataFrame(self._by_stage())
        by_replica, by_worker = self._by_replica_and_worker()
        worst = by_worker.nlargest(max(1, round(WORST_WORKERS * len(by_worker))), "slowness")
        last = by_worker[by_worker["rank"] == self._num_ranks - 1]
        correlation = self._correlation()
        tried = sorted(self._tried(by_worker, by_replica, correlation), key=lambda one: -one.share)
        return Stragglers(
            float(self._times.measured_ns.mean()),
            self._step_ns,
            self._ideal_ns,
            _with_shares(by_op),
            _with_shares(by_stage),
            _with_shares(by_replica),
            _with_shares(by_worker),
            self._explained(self._step_without(self._of_workers(worst))),
            self._explained(self._step_without(self._of_workers(last))),
            correlation,
            tried,
            self._cause(tried),
        )

    # S: only some have their own times

    def _by_op(self) -> Iterator[dict[str, object]]:
        for op in dict.fromkeys(op for op, *_ in self._columns.kinds):
            chosen = self._columns.of_ops([op])
            yield {
                "op": str(op),
                "slowness": self._slowness(np.where(chosen, self._ns, self._ideal)),
            }

    def _by_stage(self) -> Iterator[dict[str, object]]:
        for rank in range(self._num_ranks):
            own = np.where(self._columns.rank == rank, self._ns, self._ideal)
            yield {"rank": rank, "slowness": self._slowness(own)}

    def _by_replica_and_worker(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        ranks = np.arange(self._num_ranks)
        every = np.ones((1, len(self._columns.actions)), np.bool_)
        chosen = np.concatenate([every, ranks[:, None] == self._columns.rank])
        slowness = np.array([self._alone(replica, chosen) for replica in range(self._replicas)])
        replicas, of_workers = np.arange(self._replicas), slowness[:, 1:].ravel()
        workers = {
            "replica": np.repeat(replicas, self._num_ranks),
            "rank": np.tile(ranks, self._replicas),
            "slowness": of_workers,
        }
        by_replica = pd.DataFrame({"replica": replicas, "slowness": slowness[:, 0]})
        return by_replica, pd.DataFrame(workers)

    def _alone(self, replica: int, chosen: Chosen) -> Factors:
        """S with some columns of one replica, several times; the others are ideal, and so alike.

        Therefore one of them stands for all.
        """
        own = np.where(chosen[:, None], self._ns[:, replica], self._ideal).reshape(
            -1, 1, chosen.shape[1]
        )
        if self._replicas > 1:
            own = np.concatenate([own, np.broadcast_to(self._ideal, own.shape)], axis=1)
        steps_ns = self._columns.steps_ns(own).reshape(len(chosen), -1)
        return np.asarray(steps_ns.mean(axis=1) / self._ideal_ns)

    def _slowness(self, ns: Ns) -> float:
        return self._mean(ns) / self._ideal_ns

    # M: all have their own times, but for some that are like the others

    def _tried(
        self, by_worker: pd.DataFrame, by_replica: pd.DataFrame, correlation: float
    ) -> Iterator[Straggler]:
        compute, columns = self._columns.is_compute, self._columns
        if self._replicas > 1:
            slowest = by_worker.nlargest(_TRIED, "slowness")[["replica", "rank"]]
            for replica, rank in slowest.to_numpy().tolist():
                chosen = self._chosen(compute & (columns.rank == rank), replica)
                yield self._straggler(Kind.WORKER, chosen, replica, rank)
            for replica in by_replica.nlargest(_TRIED, "slowness")["replica"].tolist():
                yield self._straggler(Kind.REPLICA, self._chosen(compute, replica), replica)
            for replica, link in self._slow_links():
                chosen = self._chosen(columns.link == link, replica)
                yield self._straggler(Kind.LINK, chosen, replica, link)
        for rank in range(self._num_ranks):
            chosen = self._chosen(compute & (columns.rank == rank))
            yield self._straggler(Kind.STAGE, chosen, None, rank)
        for link in np.unique(columns.link[columns.link >= 0]).tolist():
            yield self._straggler(Kind.LINKS, self._chosen(columns.link == link), None, link)
        if correlation >= CORRELATED:
            yield self._made(Kind.LENGTHS, self._ns / self._length_factors())
        for op in dict.fromkeys(op for op, *_ in columns.kinds if op in (*SEND_OPS, *JOINING_OPS)):
            ideal = np.where(columns.of_ops([op]), self._ideal, self._ns)
            yield self._made(Kind.OP, ideal, op=op)

    def _slow_links(self) -> list[tuple[int, int]]:
        """The links of single replicas whose messages take longest beyond their ideal time."""
        beyond = (self._own - self._ideal).clip(min=0)
        links = np.unique(self._columns.link[self._columns.link >= 0])
        excess = {
            (replica, int(link)): float(beyond[replica, self._columns.link == link].sum())
            for link in links
            for replica in range(self._replicas)
        }
        return sorted(excess, key=lambda one: -excess[one])[:_TRIED]

    def _straggler(
        self, kind: Kind, chosen: Chosen, replica: int | None = None, index: int | None = None
    ) -> Straggler:
        return self._made(kind, self._like_others(chosen), replica, index)

    def _made(
        self,
        kind: Kind,
        ns: Factors | Ns,
        replica: int | None = None,
        index: int | None = None,
        op: Op | None = None,
    ) -> Straggler:
        step_ns = self._mean(ns.astype(np.int64))
        cost_ns, explained = self._step_ns - step_ns, self._explained(step_ns)
        share = cost_ns / self._step_ns
        return Straggler(kind, replica, index, op, cost_ns, share, explained)

    def _chosen(self, columns: Chosen, replica: int | None = None) -> Chosen:
        """By replica and column: those columns of one replica, or of all."""
        is_of = np.full(self._replicas, replica is None)
        if replica is not None:
            is_of[replica] = True
        return is_of[:, None] & columns

    def _of_workers(self, workers: pd.DataFrame) -> Chosen:
        """All that some workers do."""
        is_slow = np.zeros((self._replicas, self._num_ranks), np.bool_)
        is_slow[workers["replica"], workers["rank"]] = True
        return is_slow[:, self._columns.rank]

    def _like_others(self, chosen: Chosen) -> Factors:
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.nan_to_num(self._ideal / self._own, nan=1.0, posinf=1.0)
        return np.asarray(self._ns * np.where(chosen, factor, 1.0))

    def _step_without(self, chosen: Chosen) -> float:
        return self._mean(self._like_others(chosen).astype(np.int64))

    def _explained(self, step_ns: float) -> float:
        beyond_ns = self._step_ns - self._ideal_ns
        return (self._step_ns - step_ns) / beyond_ns if beyond_ns > 0 else 0.0

    # sequence lengths

    def _length_factors(self) -> Factors:
        """How much longer than usual each microbatch of a replica takes: the median of stages."""
        usual = np.maximum(np.median(self._own, axis=0), 1)
        factors = np.ones(self._ns.shape)
        for microbatch in range(self._columns.program.num_microbatches):
            of_one = self._columns.is_compute & (self._columns.microbatch == microbatch)
            relative = self._ns[..., of_one] / usual[of_one]
            factors[..., of_one] = np.median(relative, axis=2, keepdims=True)
        return np.maximum(factors, 1e-3)

    def _correlation(self) -> float:
        columns, relative = self._columns, self._ns / np.maximum(self._own, 1)
        order = np.lexsort((columns.microbatch, columns.stage))
        forward = order[columns.of_ops([Op.F])[order]]
        backward = order[columns.of_ops([Op.B, Op.I])[order]]
        both = relative[..., forward].ravel(), relative[..., backward].ravel()
        if len(both[0]) < 2 or min(one.std() for one in both) == 0:
            return 0.0
        return float(np.corrcoef(*both)[0, 1])

    def _cause(self, tried: Sequence[Straggler]) -> Straggler | None:
        """The smallest that costs nearly as much as the costliest; see `Kind`."""
        straggles = self._step_ns / self._ideal_ns >= LEAST_SLOWNESS
        able = [
            one
            for one in tried
            if one.share >= LEAST_COST
            and (one.kind is not Kind.OP or (straggles and one.explained >= LEAST_EXPLAINED))
        ]
        most = max((one.share for one in able), default=0.0)
        causes = [one for one in able if one.share >= NEARLY_ALL * most]
        return min(causes, key=lambda one: list(Kind).index(one.kind), default=None)


def _own_and_ideal(times: JobTimes) -> tuple[Factors, Ns]:
    """What each column takes in each replica, and what it would ideally take."""
    own = np.ones(times.ns.shape[1:])
    of_stages: dict[Op, list[float]] = {}
    for op, _, at in times.columns.kinds:
        center = np.mean if op in COMPUTE_OPS else np.median
        own[:, at] = center(times.ns[..., at], axis=(0, 2))[:, None]
        of_stages.setdefault(op, []).append(_usual(own[:, at[0]]))
    ideal = np.zeros(len(times.columns.actions), np.int64)
    for op, stages in of_stages.items():
        ideal[times.columns.of_ops([op])] = round(float(np.median(stages)))
    return own, ideal


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
