"""Cuts a rank's named ranges into steps.

A range is the time of the host. The time of the device is:

    with kernels    from the first kernel launched in the range to the last one's end, without those
                    that move messages
    without         the range; if it may include waiting and sending (torch's own ranges), its
                    operators between these

Steps are the profiler's, `ProfilerStep#12`, or engine's, `step 12`. Without such ranges, or if one
of them has several steps of the pipeline, a step ends where an action occurs again.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, NO_INDEX, Action, Op
from ppbench.errors import UsageError
from ppbench.external.collectives import Range, kind_of, placed
from ppbench.external.kineto import (
    OPTIMIZER,
    Interval,
    Named,
    Trace,
    collective_ranges,
    is_transfer,
)

_STEP = re.compile(r"(?:ProfilerStep#|step )(\d+)", re.ASCII)
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "record_param_comms")
_RECEIVE = "recv"
_BACKWARD = (Op.B, Op.I, Op.W)


class Timed(NamedTuple):
    """An action and its time, on its rank's clock."""

    action: Action
    start_ns: int
    end_ns: int
    is_seen: bool  # on the device itself; for a transfer, when its bytes moved
    num_bytes: int = 0  # of a collective


Steps = dict[int, list[Timed]]
"""The actions of each step by its number, in the order in which the rank issued them."""


@dataclass(frozen=True)
class RankTrace:
    """A rank of a replica of the pipeline, its trace, and the actions in it by start."""

    rank: int
    trace: Trace
    named: list[Named]
    replica: int = 0
    replicas: tuple[int | None, ...] = ()  # the job's ranks that have its stages


def steps_of(source: RankTrace) -> Steps:
    """Return all steps of which the trace has actions. Raises UsageError."""
    numbered = _by_marks(source)
    keys = (
        Counter(_key(n) for n in part if n.op is not Op.OPT and n.microbatch is not None)
        for part in (numbered or {}).values()
    )
    if numbered is None or any(max(count.values(), default=0) > 1 for count in keys):
        numbered = _by_repeats(source)
    ranges: dict[int, list[Range]] = {}
    timed: Steps = {}
    for number, part in numbered.items():
        counts: Counter[tuple[Op, int]] = Counter()
        ranges[number], timed[number], free_ns = [], [], 0
        # No action begins before the previous one ends.
        for named in part:
            if named.op is Op.OPT:
                continue
            stage = source.rank if named.stage is None else named.stage
            microbatch = named.microbatch
            if microbatch is None:
                microbatch = counts[named.op, stage]
            counts[named.op, stage] += 1
            action = Action(stage, named.op, microbatch)
            ranges[number].append(Range(*named.within[:2], action))
            timed[number].append(_time_of(source.trace, named, action, free_ns))
            if not is_transfer(named.op):
                free_ns = timed[number][-1].end_ns
        optimizers = [
            _time_of(source.trace, named, OPTIMIZER, free_ns)
            for named in part
            if named.op is Op.OPT
        ]
        if optimizers:  # there may be one for each of the rank's stages
            start_ns = min(t.start_ns for t in optimizers)
            end_ns = max(t.end_ns for t in optimizers)
            is_seen = all(t.is_seen for t in optimizers)
            timed[number].append(Timed(OPTIMIZER, start_ns, end_ns, is_seen))
    if len(source.replicas) > 1:
        _add_collectives(source, ranges, timed)
    return timed


def leave_out_untrained(ranks: Sequence[Steps]) -> dict[int, list[int]]:
    """Take the steps that do not train out of all ranks; return the ranks where each does not.

    An evaluation looks like a step without backwards, or with empty ones (torch issues them all).
    A rank that trains in no step leaves none out.
    """
    untrained: dict[int, list[int]] = {}
    for rank, steps in enumerate(ranks):
        idle = [
            number
            for number, step in steps.items()
            if not any(t.action.op in _BACKWARD and t.end_ns > t.start_ns for t in step)
        ]
        for number in idle if len(idle) < len(steps) else ():
            untrained.setdefault(number, []).append(rank)
    for number in untrained:
        for steps in ranks:
            steps.pop(number, None)
    return untrained


def _by_marks(source: RankTrace) -> dict[int, list[Named]] | None:
    """Group actions by the range of a step that they begin in; None if there are no such ranges."""
    marks = [(m, mark) for mark in source.trace.ranges if (m := _STEP.fullmatch(mark.name))]
    if not marks:
        return None
    steps: dict[int, list[Named]] = {}
    index = 0
    for named in source.named:
        while index + 1 < len(marks) and marks[index + 1][1].start_ns <= named.within.start_ns:
            index += 1
        match, mark = marks[index]
        if mark.start_ns <= named.within.start_ns < mark.end_ns:
            steps.setdefault(int(match[1]), []).append(named)
    computing = {n: part for n, part in steps.items() if any(a.op is not Op.OPT for a in part)}
    return computing or None


def _key(named: Named) -> tuple[Op, int | None, int | None]:
    return named.op, named.stage, named.microbatch


def _by_repeats(source: RankTrace) -> dict[int, list[Named]]:
    """End a step where an action of it occurs again; an optimizer's range still belongs to it."""
    if any(named.microbatch is None for named in source.named):
        raise UsageError(
            f"{source.trace.path}: its actions do not name their microbatch, and no range such as "
            '"ProfilerStep#1" separates the steps; call the profiler\'s step() after each step, '
            "or give --pattern a group called microbatch"
        )
    parts: list[list[Named]] = [[]]
    seen: set[object] = set()
    for named in source.named:
        key = _key(named)
        if named.op is not Op.OPT and key in seen:
            parts.append([])
            seen.clear()
        seen.add(key)
        parts[-1].append(named)
    return dict(enumerate(parts))


def _add_collectives(
    source: RankTrace, ranges: Mapping[int, list[Range]], timed: Mapping[int, list[Timed]]
) -> None:
    """Add the collectives of each step among its actions, at the places of their issue.

    A gather comes before the computation that needs it, and so belongs to that one's step; all else
    belongs to the step of the computation before it. Computations are shortened by the gathers that
    they waited for, and by the sum that they ended with.
    """
    own = [one for one in source.trace.collectives if one.is_among(source.replicas)]
    steps = sorted((part[0].start_ns, number) for number, part in ranges.items() if part)
    begins = [start_ns for start_ns, _ in steps]
    asked: dict[int, list[Range]] = {number: [] for _, number in steps}
    last = {number: max(outer.end_ns for outer in ranges[number]) for _, number in steps}
    for named in collective_ranges(source.trace):
        index = bisect_right(begins, named.within.start_ns) - 1
        is_ahead = index < 0 or named.within.start_ns > last[steps[index][1]]
        index += named.op is Op.UNSHARD and is_ahead
        if 0 <= index < len(steps):
            action = Action(named.stage or 0, named.op, NO_INDEX)
            asked[steps[index][1]].append(Range(*named.within[:2], action))
    every = {number: sorted([*ranges[number], *asked[number]]) for _, number in steps}
    bounds = [*(every[number][0].start_ns for _, number in steps), math.inf]
    for index, (_, number) in enumerate(steps):
        low, high = bounds[index : index + 2]
        found = placed(every[number], [one for one in own if low <= one.launched_ns < high])
        if not found:
            continue
        ordered: list[tuple[tuple[int, int], Timed]] = []
        for outer, computed in zip(ranges[number], timed[number], strict=False):
            start_ns, end_ns = computed.start_ns, computed.end_ns
            for one in found:
                is_gather = one.action.op is Op.UNSHARD
                if one.within != outer or (one.first.is_kernel and is_gather):
                    continue
                if is_gather:
                    after = Interval(one.first.returned_ns, outer.end_ns, "")
                    operators = source.trace.operators_in(after)
                    went_on_ns = next((o.start_ns for o in operators), outer.end_ns)
                    start_ns += max(0, min(one.end_ns, went_on_ns) - one.first.launched_ns)
                elif not one.first.is_scatter:
                    end_ns = min(end_ns, one.start_ns)
            times = computed._replace(start_ns=start_ns, end_ns=max(start_ns, end_ns))
            ordered.append(((outer.start_ns, 0), times))
        free_ns = 0
        for one in found:
            start_ns = max(one.start_ns, free_ns)
            free_ns = max(start_ns, one.end_ns)
            times = Timed(one.action, start_ns, free_ns, is_seen=True, num_bytes=one.num_bytes)
            ordered.append((one.issue, times))
        gathered = {one.action.stage for one in found if one.action.op is Op.UNSHARD}
        for start_ns, _, action in asked[number]:
            if action.op is Op.RESHARD and action.stage in gathered:
                ordered.append(((start_ns, 0), Timed(action, start_ns, start_ns, is_seen=True)))
        ordered.sort(key=lambda item: item[0])
        optimizers = timed[number][len(ranges[number]) :]
        timed[number][:] = [*(times for _, times in ordered), *optimizers]


def _time_of(trace: Trace, named: Named, action: Action, free_ns: int) -> Timed:
    within, is_message = named.within, is_transfer(named.op)
    start_ns, end_ns = within[:2]
    kernels = [k for k in trace.kernels_of(within) if k.is_communication == is_message]
    if kernels:
        start_ns, end_ns = min(k.start_ns for k in kernels), max(k.end_ns for k in kernels)
    elif trace.kernels and not is_message:  # it computed nothing
        start_ns = end_ns = max(start_ns, free_ns)
    elif named.may_wait and trace.operators and not is_message:
        # It may receive, wait, compute and send: it computes from the first operator after the
        # receive to the send, and without any it computes nothing, and ends when it begins.
        operators = trace.operators_in(within)
        receives = [i for i, operator in enumerate(operators) if _RECEIVE in operator.name]
        after = operators[receives[-1] + 1 :] if receives else operators
        sends = [
            operator.start_ns
            for operator in after
            if operator.name.startswith(_COMMUNICATION) and kind_of(operator.name) is None
        ]
        if sends:
            after, end_ns = [o for o in after if o.start_ns < sends[0]], sends[0]
        start_ns = after[0].start_ns if after else end_ns
    if not is_message:
        start_ns = max(start_ns, free_ns)
    return Timed(action, start_ns, max(start_ns, end_ns), bool(kernels))


def chosen_steps(ranks: Sequence[Steps], wanted: Iterable[int]) -> list[int]:
    """Return the wanted steps, or all. Raises UsageError if a rank lacks one of them."""
    every = sorted(set().union(*ranks))
    chosen = sorted(set(wanted)) or every
    for number in chosen:
        lacking = [rank for rank, steps in enumerate(ranks) if number not in steps]
        if lacking:
            raise UsageError(
                f"step {number}: rank {lacking[0]} has no actions in it; the traces have the steps "
                f"{', '.join(map(str, every))}; with --step, choose steps that all ranks have"
            )
    return chosen


def check_whole(ranks: Sequence[Steps], chosen: Sequence[int]) -> None:
    """Check that each rank has the same actions, in the same order, in all chosen steps.

    Raises UsageError.
    """
    for rank, steps in enumerate(ranks):
        rows = {number: computations(steps[number]) for number in chosen}
        every = dict.fromkeys(action for row in rows.values() for action in row)
        for number, row in rows.items():
            if missing := [str(action) for action in every if action not in set(row)]:
                more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
                raise UsageError(
                    f"step {number}: rank {rank} lacks {', '.join(missing[:8])}{more}, which it "
                    "has in others; perhaps the trace begins or ends within it: choose whole steps "
                    "with --step"
                )
        first = chosen[0]
        for number, row in rows.items():
            if row != rows[first]:
                raise UsageError(
                    f"rank {rank}: its actions have another order in step {number} than in step "
                    f"{first}; import steps of one program at a time, with --step"
                )


def computations(step: Sequence[Timed]) -> list[Action]:
    """Return a rank's computations of a step in the order in which they were issued."""
    return [t.action for t in step if t.action.op in COMPUTE_OPS]


def issued(step: Sequence[Timed]) -> list[Action]:
    """Return a rank's computations and collectives of a step, likewise."""
    return [t.action for t in step if t.action.op in COMPUTE_OPS | COLLECTIVE_OPS]


def named_stages(source: RankTrace) -> set[int]:
    """Return the stages that the rank computes on, as far as its ranges name them."""
    return {
        named.stage
        for named in source.named
        if named.stage not in (None, NO_INDEX) and not is_transfer(named.op)
    }
