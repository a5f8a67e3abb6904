"""A rank's named ranges, cut into steps and timed: when each action computed.

A range is what the host did. What is wanted is when its device computed:

    with kernels    from the first kernel launched in the range to the last one's end, those that
                    move messages left aside
    without         the range; where it may hold waiting and sending too (torch's own ranges), its
                    operators between these

Steps are the profiler's, `ProfilerStep#12`, or engine's, `step 12`; without such ranges, or where
one of them holds several steps of the pipeline, a step ends where an action comes again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import NO_INDEX, Action, Op
from ppbench.errors import UsageError
from ppbench.foreign.kineto import Interval, Trace
from ppbench.foreign.naming import OPTIMIZER, Named, is_transfer

_STEP = re.compile(r"(?:ProfilerStep#|step )(\d+)", re.ASCII)
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "record_param_comms")
_RECEIVE = "recv"
_BACKWARD = (Op.B, Op.I, Op.W)


class Timed(NamedTuple):
    """An action and when it was done, on its rank's clock."""

    action: Action
    start_ns: int
    end_ns: int
    is_seen: bool  # on the device itself: of a transfer, when its bytes moved


Steps = dict[int, list[Timed]]
"""By number of the step, in the order in which the rank came to the actions."""


@dataclass(frozen=True)
class RankTrace:
    """A rank of the pipeline, its file, and the actions in it by start."""

    rank: int
    trace: Trace
    named: list[Named]


def steps_of(source: RankTrace) -> Steps:
    """All steps of training that the trace holds actions of. Raises UsageError.

    An evaluation looks like a step without backwards, or with empty ones (torch issues them all).
    """
    numbered = _by_marks(source)
    if numbered is None or any(map(_has_repeats, numbered.values())):
        numbered = _by_repeats(source)
    timed = {number: _timed(source, part) for number, part in numbered.items()}
    return {number: step for number, step in timed.items() if _trains(step)} or timed


def _trains(step: Sequence[Timed]) -> bool:
    return any(t.action.op in _BACKWARD and t.end_ns > t.start_ns for t in step)


def _by_marks(source: RankTrace) -> dict[int, list[Named]] | None:
    """By the ranges of steps that actions begin in; None where there are no such ranges."""
    marks = [(m, one) for one in source.trace.ranges if (m := _STEP.fullmatch(one.name))]
    if not marks:
        return None
    found: dict[int, list[Named]] = {}
    index = 0
    for named in source.named:
        while index + 1 < len(marks) and marks[index + 1][1].start_ns <= named.within.start_ns:
            index += 1
        match, mark = marks[index]
        if mark.start_ns <= named.within.start_ns < mark.end_ns:
            found.setdefault(int(match[1]), []).append(named)
    whole = {n: part for n, part in found.items() if any(one.op is not Op.OPT for one in part)}
    return whole or None


def _key(named: Named) -> tuple[Op, int | None, int | None]:
    return named.op, named.stage, named.microbatch


def _has_repeats(part: Sequence[Named]) -> bool:
    counts = Counter(
        _key(one) for one in part if one.op is not Op.OPT and one.microbatch is not None
    )
    return any(count > 1 for count in counts.values())


def _by_repeats(source: RankTrace) -> dict[int, list[Named]]:
    """A step ends where an action of it comes again; an optimizer's range belongs to it still."""
    if any(one.microbatch is None for one in source.named):
        raise UsageError(
            f"{source.trace.path}: its actions do not tell their microbatch, and no range such as "
            '"ProfilerStep#1" tells the steps apart; call the profiler\'s step() after each step, '
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


def _timed(source: RankTrace, part: Sequence[Named]) -> list[Timed]:
    """The actions of a step, numbers filled in, none begun before the one before is over."""
    counts: Counter[tuple[Op, int]] = Counter()
    found: list[Timed] = []
    free_ns = 0
    for named in part:
        if named.op is Op.OPT:
            continue
        stage = source.rank if named.stage is None else named.stage
        microbatch = named.microbatch
        if microbatch is None:
            microbatch = counts[named.op, stage]
        counts[named.op, stage] += 1
        one = _time_of(source.trace, named, Action(stage, named.op, microbatch), free_ns)
        if not is_transfer(named.op):
            free_ns = one.end_ns
        found.append(one)
    return found + _optimizer(source.trace, [one for one in part if one.op is Op.OPT], free_ns)


def _optimizer(trace: Trace, ranges: Sequence[Named], free_ns: int) -> list[Timed]:
    """One for all: a rank may have an optimizer for each of its stages."""
    times = [_time_of(trace, named, OPTIMIZER, free_ns) for named in ranges]
    if not times:
        return []
    start_ns, end_ns = min(t.start_ns for t in times), max(t.end_ns for t in times)
    return [Timed(OPTIMIZER, start_ns, end_ns, all(t.is_seen for t in times))]


def _time_of(trace: Trace, named: Named, action: Action, free_ns: int) -> Timed:
    within = named.within
    is_message = is_transfer(named.op)
    kernels = [k for k in trace.kernels_of(within) if k.is_communication == is_message]
    if kernels:
        start_ns, end_ns = min(k.start_ns for k in kernels), max(k.end_ns for k in kernels)
    elif trace.kernels and not is_message:  # it computed nothing
        start_ns = end_ns = max(within.start_ns, free_ns)
    else:
        start_ns, end_ns = _work_ns(trace, named)
    if not is_message:
        start_ns = max(start_ns, free_ns)
    return Timed(action, start_ns, max(start_ns, end_ns), bool(kernels))


def _work_ns(trace: Trace, named: Named) -> tuple[int, int]:
    """Of a range that receives, waits, computes and sends: from the first operator after the
    receive to the send. Without operators it computed nothing, and ends as it begins.
    """
    start_ns, end_ns = named.within[:2]
    if not (named.may_wait and trace.operators) or is_transfer(named.op):
        return start_ns, end_ns
    operators = trace.operators_in(named.within)
    receives = [i for i, one in enumerate(operators) if _RECEIVE in one.name]
    after = operators[receives[-1] + 1 :] if receives else operators
    sends = [one.start_ns for one in after if _is_communication(one)]
    if sends:
        after, end_ns = [one for one in after if one.start_ns < sends[0]], sends[0]
    return (after[0].start_ns if after else end_ns), end_ns


def _is_communication(operator: Interval) -> bool:
    return operator.name.startswith(_COMMUNICATION)


def chosen_steps(found: Sequence[Steps], wanted: Iterable[int]) -> list[int]:
    """The wanted steps, or all, that every rank has. Raises UsageError where one lacks some."""
    every = sorted(set().union(*found))
    chosen = sorted(set(wanted)) or every
    for number in chosen:
        lacking = [rank for rank, steps in enumerate(found) if number not in steps]
        if lacking:
            there = ", ".join(map(str, every))
            raise UsageError(
                f"step {number}: rank {lacking[0]} has no actions in it; the traces hold the steps "
                f"{there}. Choose those that all ranks have with --step"
            )
    return chosen


def check_whole(found: Sequence[Steps], chosen: Sequence[int]) -> None:
    """Every rank does the same in every chosen step. Raises UsageError that says what is missing.

    In another order, too, it would be another program.
    """
    for rank, steps in enumerate(found):
        rows = {number: _computes(steps[number]) for number in chosen}
        every = dict.fromkeys(action for row in rows.values() for action in row)
        for number, row in rows.items():
            if missing := [str(action) for action in every if action not in set(row)]:
                raise UsageError(
                    f"step {number}: rank {rank} lacks {_some(missing)}, which it has in others; "
                    "perhaps the trace begins or ends within it: choose whole steps with --step"
                )
        first = chosen[0]
        for number, row in rows.items():
            if row != rows[first]:
                raise UsageError(
                    f"rank {rank}: its actions have another order in step {number} than in step "
                    f"{first}; import steps of one program at a time, with --step"
                )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _computes(step: Sequence[Timed]) -> list[Action]:
    return [t.action for t in step if not is_transfer(t.action.op) and t.action.op is not Op.OPT]


def program_rows(found: Sequence[Steps], step: int) -> tuple[tuple[Action, ...], ...]:
    """By rank, the computations of a step in the order in which they were issued."""
    return tuple(tuple(_computes(steps[step])) for steps in found)


def stages_told(source: RankTrace) -> set[int]:
    """The stages that the rank computes on, as far as its ranges tell."""
    return {
        one.stage
        for one in source.named
        if one.stage not in (None, NO_INDEX) and not is_transfer(one.op)
    }
