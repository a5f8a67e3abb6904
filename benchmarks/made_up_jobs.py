"""Jobs of many replicas made from ideal durations, with one known cause of slowness in each.

A job's spans come from a walk of its own, which knows nothing of the code that is judged by them:
it goes through the rows of one pipeline once, and each time in it is an array of steps x replicas.
The same walk over the ideal durations gives the true slowness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.collectives import CollectivePolicy, DataParallel, add_collectives
from engine.plan.lower import lower
from engine.plan.messages import Edge, counterpart, edge_of, incoming
from engine.plan.program import Program
from engine.plan.schedules.registry import build_program
from engine.plan.spans import COLUMNS
from ppbench.analysis.stragglers import Kind, Straggler

Ns = npt.NDArray[np.int64]
"""Nanoseconds of one action, steps x replicas."""
Key = tuple[int, int]
"""Rank and position in its row, collectives included."""
_JOINED = (Op.UNSHARD, Op.REDUCE_GRAD)
MS = 1_000_000


class Walk:
    """A job's steps in time; `starts` and `ends` are by rank and position in the row."""

    def __init__(self, lowered: Program, took: dict[Key, Ns]) -> None:
        self.rows, self._took, self._program = lowered.actions, took, lowered
        self.starts: dict[Key, Ns] = {}
        self.ends: dict[Key, Ns] = {}
        zero = np.zeros_like(next(iter(took.values())))
        ranks = range(lowered.world_size)
        self._free, self._lane = dict.fromkeys(ranks, zero), dict.fromkeys(ranks, zero)
        self._channel: defaultdict[Edge, Ns] = defaultdict(lambda: zero)
        self._unsharded: dict[int, Ns] = {}
        self._posted: dict[Action, Key] = {}
        self._arrived: dict[Action, Ns] = {}
        position = dict.fromkeys(ranks, 0)
        while any(position[rank] < len(self.rows[rank]) for rank in ranks):
            before = dict(position)
            for rank in ranks:
                while position[rank] < len(self.rows[rank]) and self._pass((rank, position[rank])):
                    position[rank] += 1
            assert position != before, "the program hangs"

    @cached_property
    def step_ns(self) -> npt.NDArray[np.int64]:
        """From a step's first computation, or gather that all have come to, to its last end."""
        op = {key: self.rows[key[0]][key[1]].op for key in self.ends}
        begun = [self.starts[key].min(axis=1) for key in op if op[key] in COMPUTE_OPS]
        begun += [self.starts[key].max(axis=1) for key in op if op[key] is Op.UNSHARD]
        first = np.min(begun, axis=0)
        last = np.max([end.max(axis=1) for end in self.ends.values()], axis=0)
        return np.asarray(last - first)

    def _pass(self, key: Key) -> bool:
        """Take a rank past its next action, unless that waits for what is not known yet."""
        rank, position = key
        action = self.rows[rank][position]
        if action.op in COMPUTE_OPS:
            start = np.maximum(self._free[rank], self._unsharded.get(action.stage, 0))
            if (receive := incoming(action, self._program)) is not None:
                if receive not in self._arrived:
                    return False
                start = np.maximum(start, self._arrived[receive])
            self._free[rank] = self._note(key, start, start)
        elif action.op in _JOINED:
            start = np.maximum(self._free[rank], self._lane[rank])
            ready = start.max(axis=1, keepdims=True)
            self._lane[rank] = self._note(key, start, ready)
            if action.op is Op.UNSHARD:
                self._unsharded[action.stage] = self._lane[rank]
        elif action.op is not Op.RESHARD:
            self._post(key, action)
        return True

    def _note(self, key: Key, start: Ns, ready: Ns) -> Ns:
        self.starts[key], self.ends[key] = start, ready + self._took[key]
        return self.ends[key]

    def _post(self, key: Key, action: Action) -> None:
        """Post one end of a message, which moves once the other is posted, too."""
        self.starts[key], self._posted[action] = self._free[key[0]], key
        other = counterpart(action)
        if other in self._posted:
            is_send = action.op in SEND_OPS
            send, receive = (action, other) if is_send else (other, action)
            here, there = self._posted[send], self._posted[receive]
            ready = np.maximum(self.starts[here], self.starts[there])
            end = np.maximum(ready, self._channel[edge_of(send)]) + self._took[here]
            self._channel[edge_of(send)] = self.ends[here] = self.ends[there] = end
            self._arrived[receive] = end

    def spans(self) -> pd.DataFrame:
        """The spans of all steps and replicas, steps one after another."""
        origins = np.concatenate([[0], np.cumsum(self.step_ns + MS)[:-1]])[:, None]
        num_steps, replicas = next(iter(self.starts.values())).shape
        keys = [key for key in self.ends if key in self.starts]
        starts = np.stack([self.starts[key] + origins for key in keys])
        ends = np.stack([self.ends[key] + origins for key in keys])
        actions = [self.rows[rank][position] for rank, position in keys]
        num = num_steps * replicas
        lane = {**dict.fromkeys(COMPUTE_OPS, "compute"), **dict.fromkeys(SEND_OPS, "send")}
        lane |= {**dict.fromkeys(RECV_OPS, "recv"), **dict.fromkeys(_JOINED, "collective")}
        lanes = [lane[action.op] for action in actions]
        columns = {
            "step": np.tile(np.repeat(np.arange(num_steps), replicas), len(keys)),
            "rank": np.repeat([rank for rank, _ in keys], num),
            "lane": pd.Categorical(lanes).repeat(num),
            "stage": np.repeat([action.stage for action in actions], num),
            "op": pd.Categorical([str(action.op) for action in actions]).repeat(num),
            "microbatch": np.repeat([action.microbatch for action in actions], num),
            "start_ns": starts.ravel(),
            "end_ns": ends.ravel(),
            "num_bytes": np.zeros(len(keys) * num, np.int64),
            "replica": np.tile(np.arange(replicas), num_steps * len(keys)),
        }
        return pd.DataFrame(columns)[list(COLUMNS)]


DDP = DataParallel()


@dataclass(frozen=True)
class Shape:
    """What a made-up job is before anything is slow."""

    schedule: str = "1f1b"
    ranks: int = 8
    microbatches: int = 8
    replicas: int = 64
    num_steps: int = 3
    policy: CollectivePolicy = DDP
    noise: float = 0.02  # standard deviation of a duration, relative

    @cached_property
    def lowered(self) -> Program:
        program = lower(build_program(self.schedule, self.ranks, self.microbatches))
        return add_collectives(program, self.policy)


IDEAL_NS = {Op.F: 10 * MS, Op.I: 10 * MS, Op.W: 10 * MS, Op.B: 20 * MS}
IDEAL_NS |= {Op.UNSHARD: 3 * MS, Op.REDUCE_GRAD: 5 * MS}
MESSAGE_NS = MS // 2

Factors = npt.NDArray[np.float64]
Slow = Callable[[Action, int], Factors | float]
"""The factor on a duration, of an action of a rank, for steps x replicas."""
Culprit = tuple[str, int | None, int | None]
"""The kind, the replica, and the rank, stage or link; None where it is of none or all."""


@dataclass(frozen=True)
class Job:
    """A job, who is slow in it and how slow it truly is."""

    culprit: Culprit
    walk: Walk
    slowness: float  # its steps over the same of the ideal durations
    cost: float  # the share of its steps that what was injected took, noise left in both


def named(cause: Straggler | None) -> Culprit:
    """Who an analysis says is slow, in the words of a job."""
    if cause is None:
        return "nothing", None, None
    kind = "lengths" if cause.kind is Kind.LENGTHS else str(cause.kind)
    return kind, cause.replica, cause.index


def durations(shape: Shape, rng: np.random.Generator) -> dict[Key, Factors]:
    """The durations of all actions with noise, and nothing slow."""
    size = shape.num_steps, shape.replicas
    took = {}
    for rank, row in enumerate(shape.lowered.actions):
        for position, action in enumerate(row):
            if action.op not in RECV_OPS and action.op is not Op.RESHARD:
                ideal = IDEAL_NS.get(action.op, MESSAGE_NS)
                took[rank, position] = ideal * np.maximum(0.1, rng.normal(1, shape.noise, size))
    return took


def walked(shape: Shape, took: dict[Key, Factors], slow: Slow | None = None) -> Walk:
    """The job in time, with what is slow in it."""
    rows, slowed = shape.lowered.actions, took
    if slow is not None:
        slowed = {key: ns * slow(rows[key[0]][key[1]], key[0]) for key, ns in took.items()}
    return Walk(shape.lowered, {key: ns.astype(np.int64) for key, ns in slowed.items()})


KINDS = ("worker", "stage", "replica", "link", "lengths", "nothing")


def make(shape: Shape, kind: str, rng: np.random.Generator, least_cost: float = 0.03) -> Job:
    """A job with one cause of a random place and size, raised until it costs this share of it."""
    took, ideal = durations(shape, rng), durations(replace(shape, noise=0), rng)
    best_ns = int(walked(shape, ideal).step_ns.sum())
    usual = walked(shape, took)
    if kind == "nothing":
        return Job((kind, None, None), usual, int(usual.step_ns.sum()) / best_ns, 0.0)
    place, size = (int(rng.integers(shape.replicas)), int(rng.integers(shape.ranks))), 0.0
    lengths = rng.gamma(4, size=(shape.microbatches, shape.num_steps, shape.replicas))
    lengths /= lengths.mean()  # as much work as in the ideal job
    while True:
        size += rng.uniform(0.1, 0.5)
        culprit, slow = _injected(shape, kind, place, size, lengths)
        walk = walked(shape, took, slow)
        cost = 1 - int(usual.step_ns.sum()) / int(walk.step_ns.sum())
        if cost >= least_cost:
            return Job(culprit, walk, int(walk.step_ns.sum()) / best_ns, cost)


def _injected(
    shape: Shape, kind: str, place: tuple[int, int], size: float, lengths: Factors
) -> tuple[Culprit, Slow]:
    """Who is slow, and how much longer each action takes for it."""
    replica, rank = place
    link = min(rank, shape.ranks - 2)
    alone = np.ones((shape.num_steps, shape.replicas))
    is_compute, everyone = COMPUTE_OPS.__contains__, alone + size
    alone[:, replica] += size
    slow_link = 1 + (alone - 1) * IDEAL_NS[Op.F] / MESSAGE_NS

    def slow(action: Action, of_rank: int) -> Factors | float:
        match kind:
            case "worker" if is_compute(action.op) and of_rank == rank:
                return alone
            case "stage" if is_compute(action.op) and of_rank == rank:
                return everyone
            case "replica" if is_compute(action.op):
                return alone
            case "link" if action.op in SEND_OPS and min(edge_of(action)) == link:
                return slow_link
            case "lengths" if is_compute(action.op):
                return np.asarray(1 + min(size, 1.0) * (lengths[action.microbatch] - 1))
            case _:
                return 1.0

    names: dict[str, Culprit] = {
        "worker": (kind, replica, rank),
        "stage": (kind, None, rank),
        "replica": (kind, replica, None),
        "link": (kind, replica, link),
    }
    return names.get(kind, (kind, None, None)), slow
