"""Finds what the replicas of a stage did together in a rank's trace.

A collective belongs to the range in which the host began it, and so to its stage:

    PP:0UNSHARD, 0UNSHARD           the gathers in it are one UNSHARD, the sums in it one
    PP:0REDUCE_GRAD, 0REDUCE_GRAD   REDUCE_GRAD
    a computation                   a gather that it begins is an UNSHARD issued before it, and
                                    the time that it waits for it comes off its start; it ends
                                    where DDP begins to sum the last of its gradients
    none                            a reduce-scatter is a REDUCE_GRAD, if the rank has one stage

The time is that of NCCL's kernel, or of gloo's thread; of other backends that of the operator.
Collectives of other groups (tensor parallelism, norms of gradients) are left out: by the ranks of
their group where the trace has them, else by what is begun in no such range.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, NO_INDEX, Action, Op

_GATHERS = re.compile(r"all_?gather", re.IGNORECASE)
_SUMS = re.compile(r"reduce_?scatter|all_?reduce", re.IGNORECASE)
_SCATTERS = re.compile(r"reduce_?scatter", re.IGNORECASE)
_ELEMENT_BYTES = {"Byte": 1, "Char": 1, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8}


class Collective(NamedTuple):
    """A collective of one rank, begun by the host and done by a device or a thread."""

    launched_ns: int
    returned_ns: int  # when the operator that began it was over; with a kernel, its launch
    start_ns: int
    end_ns: int
    op: Op
    num_bytes: int  # of all that was gathered or summed; 0 if it is not known
    ranks: tuple[int, ...] | None  # of its group in the job, if they are known
    is_scatter: bool
    is_kernel: bool

    def is_among(self, replicas: Sequence[int | None]) -> bool:
        """Whether its group may be of these ranks, or of some of them and of others."""
        if self.ranks is None:
            return True
        ours, theirs = set(self.ranks), set(replicas)
        return len(ours) > 1 and (ours <= theirs or theirs <= ours)


class Event(NamedTuple):
    """What a trace has of one collective, in one place."""

    name: str
    times: tuple[int, int]  # start and end in nanoseconds
    details: Mapping[str, object]


def kind_of(name: str) -> Op | None:
    """Return what a collective does for replicas; None for any other name."""
    if _GATHERS.search(name):
        return Op.UNSHARD
    return Op.REDUCE_GRAD if _SUMS.search(name) else None


def collectives_of(
    operators: Iterable[Event],
    threads: Iterable[Event],
    kernels: Iterable[tuple[int, Event]],
    groups: Mapping[str, tuple[int, ...]],
) -> list[Collective]:
    """Join the host's part of each collective with the device's, by launch.

    `operators` are of c10d, `threads` of gloo, `kernels` of NCCL with their launches; `groups` are
    the ranks of process groups by name.
    """
    found = [
        _collective((launched_ns, launched_ns), event, event.times, groups, is_kernel=True)
        for launched_ns, event in kernels
    ]
    if not found:
        begun = sorted(operators, key=lambda event: event.times)
        done = sorted(threads, key=lambda event: event.times)
        for op in (Op.UNSHARD, Op.REDUCE_GRAD):
            events = [event for event in begun if kind_of(event.name) is op]
            ends = [event for event in done if kind_of(event.name) is op]
            same = len(ends) == len(events)
            for event, other in zip(events, ends if same else events, strict=True):
                found.append(_collective(event.times, event, other.times, groups))
    return sorted(one for one in found if one is not None)


def _collective(
    launched: tuple[int, int],
    event: Event,
    times: tuple[int, int],
    groups: Mapping[str, tuple[int, ...]],
    *,
    is_kernel: bool = False,
) -> Collective | None:
    op = kind_of(event.name)
    if op is None:
        return None
    text = str(event.details.get("Process Group Ranks", ""))
    ranks = groups.get(str(event.details.get("Process Group Name", "")))
    if re.fullmatch(r"\[\d+(, *\d+)*\]", text):  # a long one is cut
        ranks = tuple(map(int, re.findall(r"\d+", text)))
    counts = (str(event.details.get(f"{way} msg nelems", "")) for way in ("In", "Out"))
    most = max((int(count) for count in counts if count.isdecimal()), default=0)
    num_bytes = most * _ELEMENT_BYTES.get(str(event.details.get("dtype")), 4)
    is_scatter = bool(_SCATTERS.search(event.name))
    return Collective(*launched, *times, op, num_bytes, ranks, is_scatter, is_kernel)


class Range(NamedTuple):
    """A range of the host that is an action of the program."""

    start_ns: int
    end_ns: int
    action: Action


class Placed(NamedTuple):
    """A collective of a stage, or several that the schedule asked for at once."""

    action: Action
    start_ns: int
    end_ns: int
    num_bytes: int
    within: Range | None  # in which it was begun
    first: Collective

    @property
    def issue(self) -> tuple[int, int]:
        """Its place among the rank's actions, of which each comes at (start of its range, 0)."""
        if self.within is None:
            return self.first.launched_ns, 0
        if self.within.action.op in COLLECTIVE_OPS:
            return self.within.start_ns, 0
        return self.within.start_ns, -1 if self.action.op is Op.UNSHARD else 1

    @property
    def is_in_computation(self) -> bool:
        return self.within is not None and self.within.action.op in COMPUTE_OPS


def placed(ranges: Sequence[Range], collectives: Sequence[Collective]) -> list[Placed]:
    """Return the collectives that a step's ranges have begun, and its sums after them."""
    starts_ns = [outer.start_ns for outer in ranges]
    stages = {outer.action.stage for outer in ranges if outer.action.op in COMPUTE_OPS}
    found: list[Placed] = []
    for one in collectives:
        index = bisect_right(starts_ns, one.launched_ns) - 1
        within = ranges[index] if index >= 0 and one.launched_ns < ranges[index].end_ns else None
        if within is None and not (one.is_scatter and len(stages) == 1):
            continue
        outer = None if within is None else within.action.op
        # A forward sums no gradients.
        if outer in (None, Op.B, Op.W, *COLLECTIVE_OPS) or one.op is Op.UNSHARD:
            stage = min(stages) if within is None else within.action.stage
            action = Action(stage, one.op, NO_INDEX)
            times = one.start_ns, one.end_ns
            found.append(Placed(action, *times, one.num_bytes, within, one))
    # What one range of the schedule asks for is one, and so are the sums of a stage. Of sums within
    # a backward only the last is left: those before it are hidden behind it.
    alone: list[Placed] = []
    joined: dict[tuple[Action, Range | None], Placed] = {}
    for own in found:
        if own.is_in_computation and own.action.op is Op.UNSHARD:
            alone.append(own)
            continue
        first = joined.setdefault((own.action, own.within), own)
        if first is not own:
            start = max if own.is_in_computation else min
            joined[own.action, own.within] = first._replace(
                start_ns=start(first.start_ns, own.start_ns),
                end_ns=max(first.end_ns, own.end_ns),
                num_bytes=first.num_bytes + own.num_bytes,
            )
    return sorted([*alone, *joined.values()], key=lambda own: (own.issue, own.start_ns))
