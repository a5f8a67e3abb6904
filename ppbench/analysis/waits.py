"""What each computation of a step waited for, and the cause of each idle gap, from spans alone.

A computation needs its rank to be free, and the output of the neighbouring stage:

    rank 0   |------ 0F1 ------|
    message                    |~~~~|
    rank 1   | 1F0 |.................  |-- 1F1 --|
                   ^ stage      ^ transfer
                                    ^ host

so the gap before it is divided at two moments: when that output was made, and when its message
arrived. Where its stage's parameters are gathered first (UNSHARD), their arrival is a third. A
pair needs the inputs of both its halves: its forward has waited for the later one. The
parts of `ppbench.analysis.attribution` differ: they show what the whole step would gain without a
cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COMPUTE_OPS, NO_INDEX, RECV_OPS, Op

Ints = npt.NDArray[np.int64]
NONE = -1
_CODES = {op: code for code, op in enumerate(Op)}
"""Those of `engine.plan.action`, and after them those of collectives."""


@dataclass(frozen=True)
class Spans:
    """Spans of one step as arrays of one length; `op` has the codes of this module."""

    op: Ints
    rank: Ints
    stage: Ints
    microbatch: Ints
    start_ns: Ints
    end_ns: Ints
    num_bytes: Ints

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Spans:
        """The rows of a frame with the columns of `engine.plan.spans.Span`."""
        codes = {op.value: code for op, code in _CODES.items()}
        op = np.array([codes[name] for name in frame["op"].tolist()], np.int64)
        return cls(op, *(frame[each.name].to_numpy(np.int64) for each in fields(cls)[1:]))

    def __len__(self) -> int:
        return len(self.op)

    def at(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Spans:
        """Some of the spans, by their places or by a mask."""
        return Spans(*(getattr(self, each.name)[rows] for each in fields(self)))

    def are(self, ops: Iterable[Op]) -> npt.NDArray[np.bool_]:
        """A mask of the spans of these ops."""
        return np.isin(self.op, [_CODES[op] for op in ops])


class Cause(IntEnum):
    """The cause of an idle gap."""

    STAGE = 0  # another stage has not made the input yet
    TRANSFER = 1  # the input is made, and its message is on its way
    GATHER = 2  # the parameters of its stage are being gathered from all replicas
    HOST = 3  # the input is there; the rank has not begun
    REDUCE = 4  # the rank has computed all, and its last collective is not over
    NO_WORK = 5  # the rank has no action left in this step


@dataclass(frozen=True)
class Waits:
    """The computations of one step, by rank and start, and what each of them waited for.

    Arrays of one length; times in nanoseconds. `before` and `maker` are positions in these arrays:
    the rank's previous computation, and the computation on another stage that made the input (NONE
    where there is none). `made_ns` and `arrived_ns` are the start where no input is needed, and
    `gathered_ns` and `joined_ns` are NO_INDEX where there is no such collective.
    """

    spans: Spans
    before: Ints
    free_ns: Ints  # when the rank had finished all before; else when the step began on it
    maker: Ints
    made_ns: Ints
    arrived_ns: Ints
    gathered_ns: Ints
    joined_ns: Ints  # when the last collective of its rank was over


def waits(
    spans: Spans,
    begin_ns: int | Ints | None = None,
    is_paired: npt.NDArray[np.bool_] | None = None,
) -> Waits:
    """Find what each computation waited for, from the spans of one step with at least one F.

    `begin_ns`: when the step began, if other replicas tell, or on each rank, if that went on from
    the step before; else with its first computation. `is_paired`: by span, whether it is a forward
    that is one with the computation behind it.
    """
    of_computations = np.flatnonzero(spans.are(COMPUTE_OPS))
    compute = spans.at(of_computations)
    order = np.lexsort((compute.end_ns, compute.start_ns, compute.rank))
    compute = compute.at(order)
    num_stages, num_microbatches = int(spans.stage.max()) + 1, int(spans.microbatch.max()) + 1
    num_places = 2 * num_stages * num_microbatches

    def places(of: Spans, is_forward: npt.NDArray[np.bool_], hop: Ints | int = 0) -> Ints:
        """Numbers of forwards and backwards, by direction, stage and microbatch."""
        stage = of.stage + hop
        place = (np.where(is_forward, 0, num_stages) + stage) * num_microbatches + of.microbatch
        return np.where((stage >= 0) & (stage < num_stages), place, NONE)

    # The computations that make the inputs, on the neighbouring stages.
    is_forward, is_weight = compute.are([Op.F]), compute.are([Op.W])
    own_place = places(compute, is_forward)
    made_at = np.full(num_places + 1, NONE, np.int64)  # the last is for those without a maker
    made_at[own_place[~is_weight]] = np.flatnonzero(~is_weight)
    made_at[NONE] = NONE
    source = places(compute, is_forward, np.where(is_forward, -1, 1))
    maker = np.where(is_weight, NONE, made_at[source])
    messages = spans.at(spans.are(RECV_OPS))
    received = np.full(num_places, NONE, np.int64)  # when each input was there; NONE: no message
    received[places(messages, messages.are([Op.RECV_F]))] = messages.end_ns
    rank, start, end = compute.rank, compute.start_ns, compute.end_ns
    is_first = np.r_[True, rank[1:] != rank[:-1]]
    before = np.where(is_first, NONE, np.arange(len(compute)) - 1)
    has_maker = maker != NONE
    made = np.where(has_maker, end[maker], start)
    came = np.where(received[own_place] == NONE, made, received[own_place])
    arrived = np.where(has_maker, np.maximum(made, came), start)
    if is_paired is not None:
        other = np.flatnonzero(is_paired[of_computations[order]]) + 1
        is_first_later = has_maker[other - 1] & (arrived[other - 1] >= arrived[other])
        later = other[has_maker[other] & ~is_first_later]
        for of_halves in (maker, made, arrived):
            of_halves[later - 1] = of_halves[later]
    by_rank = np.split(end, np.flatnonzero(is_first)[1:])
    latest = np.concatenate([np.maximum.accumulate(own) for own in by_rank])
    if isinstance(begin_ns, np.ndarray):
        begin = begin_ns[rank]
    else:
        begin = np.full(len(rank), start.min() if begin_ns is None else min(begin_ns, start.min()))
    free = np.where(is_first, begin, latest[before])
    gathered = np.full(len(compute), NO_INDEX, np.int64)
    unshards = spans.at(spans.are([Op.UNSHARD]))
    for stage in np.unique(unshards.stage):  # the last that each computation's stage began before
        own = unshards.at(unshards.stage == stage)
        own = own.at(np.argsort(own.start_ns, kind="stable"))
        rows = np.flatnonzero(compute.stage == stage)
        last = np.searchsorted(own.start_ns, compute.start_ns[rows], side="right") - 1
        gathered[rows] = np.where(last < 0, NO_INDEX, own.end_ns[last])
    collectives = spans.at(spans.are([Op.UNSHARD, Op.REDUCE_GRAD]))
    over = np.full(spans.rank.max() + 1, NO_INDEX, np.int64)
    np.maximum.at(over, collectives.rank, collectives.end_ns)
    return Waits(compute, before, free, maker, made, arrived, gathered, over[rank])


def moments(waited: Waits) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Times at which a rank was free, its input made, arrived and gathered, and it began.

    Times are clipped to this order: an input made before the rank was free caused no wait.
    """
    free, is_needed = waited.free_ns, waited.maker != NONE
    start = np.maximum(waited.spans.start_ns, free)
    made = np.where(is_needed, np.clip(waited.made_ns, free, start), free)
    arrived = np.where(is_needed, np.clip(waited.arrived_ns, made, start), made)
    gathered = np.clip(waited.gathered_ns, arrived, start)
    return free, made, arrived, gathered, start


@dataclass(frozen=True)
class Gaps:
    """Idle gaps of the ranks that compute, in pieces of one cause each, by rank and start.

    `position` is that of the computation that follows (NONE after the last).
    """

    rank: Ints
    cause: Ints
    start_ns: Ints
    end_ns: Ints
    position: Ints

    def at(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Gaps:
        """Some of the pieces, by their places or by a mask."""
        return Gaps(*(getattr(self, each.name)[rows] for each in fields(self)))


def gaps(waited: Waits, until_ns: Ints | None = None) -> Gaps:
    """All idle gaps.

    Together with the computations they fill each rank from when the step began to its last
    computation's end on any rank, or until the given time of each rank.
    """
    free, made, arrived, gathered, start = moments(waited)
    rank, joined = waited.spans.rank, waited.joined_ns
    firsts = np.flatnonzero(np.r_[True, rank[1:] != rank[:-1]])
    last = np.full(len(firsts), max(waited.spans.end_ns.max(), joined.max()))
    if until_ns is not None:
        last = until_ns[rank[firsts]]
    ends = np.maximum.reduceat(waited.spans.end_ns, firsts)
    over = np.clip(joined[firsts], ends, np.maximum(ends, last))
    position, after = np.arange(len(rank)), np.full(len(firsts), NONE)
    pieces = Gaps(
        np.r_[rank, rank, rank, rank, rank[firsts], rank[firsts]],
        np.repeat(list(Cause), [len(rank)] * 4 + [len(firsts)] * 2),
        np.r_[free, made, arrived, gathered, ends, over],
        np.r_[made, arrived, gathered, start, over, last],
        np.r_[position, position, position, position, after, after],
    )
    pieces = pieces.at(pieces.end_ns > pieces.start_ns)
    return pieces.at(np.lexsort((pieces.start_ns, pieces.rank)))


def critical_path(waited: Waits) -> Ints:
    """Positions of the computations without slack, first to last.

    The path is walked back from the computation that ended last: to the maker of its input, if that
    arrived after the rank was free, else to the rank's previous computation. Ties go to the rank's
    own, as in `engine.plan.predict`.
    """
    before, maker = waited.before.tolist(), waited.maker.tolist()
    free, arrived = waited.free_ns.tolist(), waited.arrived_ns.tolist()
    path = []
    at = int(waited.spans.end_ns.argmax())
    while at != NONE:
        path.append(at)
        has_waited = maker[at] != NONE and (before[at] == NONE or arrived[at] > free[at])
        at = maker[at] if has_waited else before[at]
    return np.array(path[::-1], np.int64)
