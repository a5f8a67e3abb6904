"""The times of a whole job, all replicas of all steps, as one array that can be changed.

    ns[step, replica, column]     a column is an action of the lowered program, in the order of its
                                  table, then each UNSHARD and REDUCE_GRAD, by rank in its order

A message's time is at its SEND: from when both ends are ready, and the message before it is over,
to its end (see `ppbench.analysis.transfers`). A collective's is from when it has begun on all
replicas to its end, so that waiting for a slow replica is no time of the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import CODES, COMPUTE_OPS, OPS, SEND_OPS, Action, Op
from engine.plan.collectives import NoCollectives, with_collectives
from engine.plan.lower import counterpart, edge_of
from engine.plan.program import Program
from engine.plan.table import Table
from ppbench.analysis.joint_walk import JOINED, Columns, Ns

_NONE = -1
_NEVER = np.iinfo(np.int64).max


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
        if (times := _times_of(spans, program, replicas)) is not None:
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
    taken = {str(op): op for op in (*COMPUTE_OPS, *JOINED)}
    for row in first[first["op"].isin(taken)].itertuples():
        rows[row.rank].append(Action(int(row.stage), taken[row.op], int(row.microbatch)))
    seen = replace(lowered, actions=Table.of(rows))
    if seen.compute_only() != lowered.compute_only():
        return lowered.without_collectives()
    return with_collectives(lowered.without_collectives(), seen, NoCollectives())


def _times_of(spans: pd.DataFrame, lowered: Program, replicas: int) -> JobTimes | None:
    """The times, unless the collectives are others than those of the program, where it has any."""
    op, columns = _numbers_of(spans["op"]), Columns(lowered)
    steps, step = np.unique(spans["step"].to_numpy(), return_inverse=True)
    replica = spans["replica"].to_numpy() if "replica" in spans else np.zeros(len(spans), int)
    column = _columns_of(spans, op, step * replicas + replica, columns)
    shape = len(steps), replicas, len(columns.actions)
    at = np.ravel_multi_index((step, replica, np.maximum(column, 0)), shape)[column != _NONE]
    starts, ends = np.zeros((2, *shape), np.int64)
    is_known = np.zeros(shape, np.bool_)
    starts.reshape(-1)[at] = spans["start_ns"].to_numpy()[column != _NONE]
    ends.reshape(-1)[at] = spans["end_ns"].to_numpy()[column != _NONE]
    is_known.reshape(-1)[at] = True
    is_other = (op >= len(OPS)) & (column == _NONE)
    if lowered.has_collectives and is_other.any():
        return None
    if not np.all(is_known[..., columns.of_ops(JOINED)]):
        return None
    return _job(columns, starts, ends, is_known)


def _numbers_of(op: pd.Series) -> npt.NDArray[np.int64]:
    """Ops as numbers: their codes, then those of `JOINED`; nothing for any other."""
    numbers = {str(one): code for one, code in CODES.items()}
    numbers |= {str(one): len(OPS) + code for code, one in enumerate(JOINED)}
    kinds = op.astype("category")
    of_kind = np.array([numbers.get(str(kind), _NONE) for kind in kinds.cat.categories] or [_NONE])
    return of_kind[kinds.cat.codes.to_numpy()]


def _columns_of(
    spans: pd.DataFrame, op: npt.NDArray[np.int64], cell: npt.NDArray[np.int64], columns: Columns
) -> npt.NDArray[np.int64]:
    """The column of each span; several collectives of one stage and op are told by their order."""
    stage, number = spans["stage"].to_numpy(), spans["microbatch"].to_numpy(copy=True)
    joined = np.flatnonzero(op >= len(OPS))
    order = joined[np.argsort(spans["start_ns"].to_numpy()[joined], kind="stable")]
    keys = pd.DataFrame({"cell": cell[order], "op": op[order], "stage": stage[order]})
    number[order] = keys.groupby(list(keys)).cumcount()
    seen: Counter[tuple[Op, int]] = Counter()
    shape = len(OPS) + len(JOINED), columns.program.num_stages, number.max(initial=0) + 1
    index = np.full(shape, _NONE)
    for at, action in enumerate(columns.actions):
        kind, of_kind = CODES.get(action.op), action.microbatch
        if kind is None:
            kind, of_kind = len(OPS) + JOINED.index(action.op), seen[action.op, action.stage]
            seen[action.op, action.stage] += 1
        if of_kind < shape[2]:
            index[kind, action.stage, of_kind] = at
    is_of_one = (op != _NONE) & (stage >= 0) & (stage < shape[1]) & (number >= 0)
    found = np.full(len(spans), _NONE)
    found[is_of_one] = index[op[is_of_one], stage[is_of_one], number[is_of_one]]
    return found


def _job(columns: Columns, starts: Ns, ends: Ns, is_known: npt.NDArray[np.bool_]) -> JobTimes:
    is_joined, is_compute = columns.of_ops(JOINED), columns.is_compute
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
    return JobTimes(
        columns, np.maximum(ns, 0), ends[..., is_joined | is_compute].max(axis=(1, 2)) - first
    )
