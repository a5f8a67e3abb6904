"""The times of a whole job, all replicas of all steps, as one array that can be changed.

    ns[step, replica, column]     a column is an action of the lowered program, in the order of its
                                  table

A message's time is at its SEND: from when both ends are ready, and the message before it is over,
to its end (see `ppbench.analysis.transfers`). A collective's is from when it has begun on all
replicas to its end, so that waiting for a slow replica is no time of the others.

`engine.plan.replay` replays one step of some replicas. An analysis asks for tens of thousands, all
of one program; and since its rows fix what waits for what, `Columns.steps_ns` goes through all in
one order, one action after another, each time being an array over steps and replicas. That is
quicker than compiled loops over single steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import CODES, COMPUTE_OPS, JOINING_OPS, OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.collectives import NoCollectives, with_collectives
from engine.plan.messages import Edge, counterpart, edge_of, incoming
from engine.plan.program import Program
from engine.plan.table import Table

Ns = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]
"""By column, whether it is meant."""
_NONE = -1
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns hold actions, in this order; a message belongs to the rank that sends it."""

    program: Program

    @cached_property
    def actions(self) -> list[Action]:
        return [action for row in self.program.actions for action in row]

    @cached_property
    def rank(self) -> npt.NDArray[np.int64]:
        return np.repeat(range(self.program.world_size), list(map(len, self.program.actions)))

    @cached_property
    def stage(self) -> npt.NDArray[np.int64]:
        return np.array([action.stage for action in self.actions])

    @cached_property
    def microbatch(self) -> npt.NDArray[np.int64]:
        return np.array([action.microbatch for action in self.actions])

    @cached_property
    def link(self) -> npt.NDArray[np.int64]:
        """The first stage of a SEND's link; nothing takes the place of other columns."""
        ends = (min(edge_of(a)) if a.op in SEND_OPS else _NONE for a in self.actions)
        return np.fromiter(ends, np.int64)

    @cached_property
    def is_compute(self) -> Chosen:
        return self.of_ops(COMPUTE_OPS)

    def of_ops(self, ops: Iterable[Op]) -> Chosen:
        wanted = frozenset(ops)
        return np.array([action.op in wanted for action in self.actions])

    @cached_property
    def kinds(self) -> list[tuple[Op, int, npt.NDArray[np.int64]]]:
        """Each op and stage that takes time, with its columns."""
        of_kind: dict[tuple[Op, int], list[int]] = {}
        for at, action in enumerate(self.actions):
            if action.op not in RECV_OPS | {Op.RESHARD}:
                of_kind.setdefault((action.op, action.stage), []).append(at)
        return [(op, stage, np.array(at)) for (op, stage), at in of_kind.items()]

    @cached_property
    def _waits(self) -> dict[int, list[int]]:
        """By column, the columns at whose ends it can begin: all that is before it anywhere."""
        places = {action: at for at, action in enumerate(self.actions)}
        waits: dict[int, list[int]] = {}
        posted: dict[Action, list[int]] = {}
        numbers = iter(range(len(self.actions)))
        for row in self.program.actions:
            computed: list[int] = []  # the computation before
            lane: list[int] = []  # the collective before
            unsharded: dict[int, list[int]] = {}
            for action in row:
                at = next(numbers)
                if action.op in JOINING_OPS:
                    waits[at] = computed + lane
                    lane = [at]
                    if action.op is Op.UNSHARD:
                        unsharded[action.stage] = lane
                elif action.op in COMPUTE_OPS:
                    receive = incoming(action, self.program)
                    sent = [] if receive is None else [places[counterpart(receive)]]
                    waits[places[action]] = computed + unsharded.get(action.stage, []) + sent
                    computed = [places[action]]
                elif action.op is not Op.RESHARD:
                    posted[action] = computed
        channels: dict[Edge, list[int]] = {}  # the message before
        for action, before in posted.items():
            if action.op in SEND_OPS:
                ends, edge = before + posted[counterpart(action)], edge_of(action)
                waits[places[action]] = ends + channels.get(edge, [])
                channels[edge] = [places[action]]
        return waits

    @cached_property
    def _order(self) -> list[int]:
        return list(TopologicalSorter(self._waits).static_order())

    def steps_ns(self, ns: Ns) -> Ns:
        """From each step's first computation or gather to its end; `ns[step, replica, column]`."""
        took = np.ascontiguousarray(np.moveaxis(ns, 2, 0))
        ends, is_joined = np.zeros_like(took), self.of_ops(JOINING_OPS).tolist()
        for column in self._order:
            end = ends[column]
            for before in self._waits[column]:
                np.maximum(end, ends[before], out=end)
            if is_joined[column]:
                end[:] = end.max(axis=1, keepdims=True)  # ready on all replicas
            end += took[column]
        computed = np.flatnonzero(self.is_compute)
        _, first = np.unique(self.rank[computed], return_index=True)
        beginning = np.concatenate([computed[first], np.flatnonzero(self.of_ops([Op.UNSHARD]))])
        begun = (ends - took)[beginning].min(axis=(0, 2))
        return np.asarray(ends.max(axis=(0, 2)) - begun)


@dataclass(frozen=True, eq=False)
class JobTimes:
    """Nanoseconds of everything in some steps of a job."""

    columns: Columns
    ns: Ns  # steps x replicas x columns
    measured_ns: Ns  # by step, from its first computation or gather to its last end


def times_of(spans: pd.DataFrame, lowered: Program, replicas: int = 1) -> JobTimes:
    """The times of all steps that spans hold; `lowered` has its transfers and collectives.

    `spans` has the columns of `engine.plan.spans.Span`. Where their collectives are others than the
    program's, since a library places them its own way, those of the first step are taken; where
    steps or replicas differ in them, none. Raises KeyError with a computation of the program that
    some replica lacks in some step.
    """
    for program in (lowered, _as_seen(spans, lowered), lowered.without_collectives()):
        times, is_whole = times_in(spans, program, replicas)
        if is_whole:
            return times
    raise AssertionError("without collectives, none can be missing")


def _as_seen(spans: pd.DataFrame, lowered: Program) -> Program:
    """The program with the collectives of the first step of replica 0.

    Each stands before the first computation that starts after it.
    """
    replica = spans["replica"] if "replica" in spans else 0 * spans["step"]
    first = spans[(spans["step"] == spans["step"].min()) & (replica == 0)].sort_values(
        "start_ns", kind="stable"
    )
    rows: list[list[Action]] = [[] for _ in range(lowered.world_size)]
    taken = {str(op): op for op in (*COMPUTE_OPS, *JOINING_OPS)}
    for row in first[first["op"].isin(taken)].itertuples():
        rows[row.rank].append(Action(int(row.stage), taken[row.op], int(row.microbatch)))
    seen = replace(lowered, actions=Table.of(rows))
    if seen.compute_only() != lowered.compute_only():
        return lowered.without_collectives()
    return with_collectives(lowered.without_collectives(), seen, NoCollectives())


def times_in(spans: pd.DataFrame, lowered: Program, replicas: int) -> tuple[JobTimes, bool]:
    """The times of a program's columns, and whether all its collectives are in the spans, alone.

    A collective or message without spans takes no time. Raises what `times_of` raises.
    """
    columns = Columns(lowered)
    numbers = {str(op): code for op, code in CODES.items() if op is not Op.RESHARD}
    names = spans["op"].astype("category")
    of_names = np.array([numbers.get(str(op), _NONE) for op in names.cat.categories] or [_NONE])
    op = of_names[names.cat.codes.to_numpy()]
    steps, step = np.unique(spans["step"].to_numpy(), return_inverse=True)
    replica = spans["replica"].to_numpy() if "replica" in spans else np.zeros(len(spans), int)
    # The column of each span; collectives of one stage and op are taken in their order.
    stage, number = spans["stage"].to_numpy(), spans["microbatch"].to_numpy(copy=True)
    is_collective = np.isin(op, [CODES[op] for op in JOINING_OPS])
    joined = np.flatnonzero(is_collective)
    order = joined[np.argsort(spans["start_ns"].to_numpy()[joined], kind="stable")]
    cell = step * replicas + replica
    keys = pd.DataFrame({"cell": cell[order], "op": op[order], "stage": stage[order]})
    number[order] = keys.groupby(list(keys)).cumcount()
    seen: Counter[tuple[Op, int]] = Counter()
    num_each = number.max(initial=0) + 1
    index = np.full((len(OPS), lowered.num_stages, num_each), _NONE)
    for place, action in enumerate(columns.actions):
        kind, of_kind = CODES[action.op], action.microbatch
        if action.op in JOINING_OPS:
            of_kind = seen[action.op, action.stage]
            seen[action.op, action.stage] += 1
        if of_kind < num_each:
            index[kind, action.stage, of_kind] = place
    is_of_one = (op != _NONE) & (stage >= 0) & (stage < lowered.num_stages) & (number >= 0)
    column = np.full(len(spans), _NONE)
    column[is_of_one] = index[op[is_of_one], stage[is_of_one], number[is_of_one]]
    shape = len(steps), replicas, len(columns.actions)
    at = np.ravel_multi_index((step, replica, np.maximum(column, 0)), shape)[column != _NONE]
    starts, ends = np.zeros((2, *shape), np.int64)
    is_known = np.zeros(shape, np.bool_)
    starts.reshape(-1)[at] = spans["start_ns"].to_numpy()[column != _NONE]
    ends.reshape(-1)[at] = spans["end_ns"].to_numpy()[column != _NONE]
    is_known.reshape(-1)[at] = True
    has_others = bool((is_collective & (column == _NONE)).any())
    is_joined, is_compute = columns.of_ops(JOINING_OPS), columns.is_compute
    is_whole = np.all(is_known[..., is_joined]) and not (lowered.has_collectives and has_others)
    is_missing = is_compute & ~np.all(is_known, axis=(0, 1))
    if is_missing.any():
        raise KeyError(columns.actions[int(is_missing.argmax())])
    ns = np.zeros_like(starts)
    ns[..., is_compute] = (ends - starts)[..., is_compute]
    ready = starts[..., is_joined].max(axis=1, keepdims=True)
    ns[..., is_joined] = ends[..., is_joined] - ready
    over: dict[tuple[int, int], Ns] = {}  # when each channel is free
    places = {action: at for at, action in enumerate(columns.actions)}
    for send in np.flatnonzero(columns.of_ops(SEND_OPS)):
        receive = places[counterpart(columns.actions[send])]
        channel = edge_of(columns.actions[send])
        both = starts[..., send], starts[..., receive], ends[..., send], ends[..., receive]
        is_early = np.maximum(both[2], both[3]) <= both[1]  # over before the receive began
        over_ns = np.where(is_early, both[2], both[3])
        began = np.maximum(np.maximum(both[0], both[1]), over.get(channel, both[0]))
        took = over_ns - np.where(is_early, both[0], began)
        ns[..., send] = np.where(is_known[..., send] & is_known[..., receive], took, 0)
        over[channel] = over_ns
    gathered = starts[..., columns.of_ops([Op.UNSHARD])].max(axis=1)  # ready on all replicas
    first = np.minimum(
        starts[..., is_compute].min(axis=(1, 2)), gathered.min(axis=1, initial=_NEVER)
    )
    measured_ns = ends[..., is_joined | is_compute].max(axis=(1, 2)) - first
    return JobTimes(columns, np.maximum(ns, 0), measured_ns), bool(is_whole)
