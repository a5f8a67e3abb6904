"""Cuts a rank's named ranges into steps, and finds when each action computed.

A range is the time of the host. The time of the device is:

    with kernels    from the first kernel launched in the range to the last one's end, without those
                    that move messages
    without         the range; if it may include waiting and sending (torch's own ranges), its
                    operators between these

Steps are the profiler's, `ProfilerStep#12`, or engine's, `step 12`. Without such ranges, or if one
of them has several steps of the pipeline, a step ends where an action occurs again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import NO_INDEX, Action, Op
from ppbench.errors import UsageError
from ppbench.external.kineto import Interval, Trace
from ppbench.external.ranges import OPTIMIZER, Named, is_transfer

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


Steps = dict[int, list[Timed]]
"""The actions of each step by its number, in the order in which the rank issued them."""


@dataclass(frozen=True)
class RankTrace:
    """A rank of the pipeline, its trace, and the actions in it by start."""

    rank: int
    trace: Trace
    named: list[Named]


def steps_of(source: RankTrace) -> Steps:
    """Return all training steps of which the trace has actions. Raises UsageError.

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


def _has_repeats(part: Sequence[Named]) -> bool:
    counts = Counter(
        _key(named) for named in part if named.op is not Op.OPT and named.microbatch is not None
    )
    return any(count > 1 for count in counts.values())


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


def _timed(source: RankTrace, part: Sequence[Named]) -> list[Timed]:
    """Time the actions of a step and fill in numbers; none begins before the previous one ends."""
    counts: Counter[tuple[Op, int]] = Counter()
    timed: list[Timed] = []
    free_ns = 0
    for named in part:
        if named.op is Op.OPT:
            continue
        stage = source.rank if named.stage is None else named.stage
        microbatch = named.microbatch
        if microbatch is None:
            microbatch = counts[named.op, stage]
        counts[named.op, stage] += 1
        action = Action(stage, named.op, microbatch)
        timed.append(_time_of(source.trace, named, action, free_ns))
        if not is_transfer(named.op):
            free_ns = timed[-1].end_ns
    optimizers = [named for named in part if named.op is Op.OPT]
    return timed + _optimizer(source.trace, optimizers, free_ns)


def _optimizer(trace: Trace, ranges: Sequence[Named], free_ns: int) -> list[Timed]:
    """Join a rank's optimizers: there may be one for each of its stages."""
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
    """Return when a range that may receive, wait, compute and send has computed.

    That is from the first operator after the receive to the send. Without operators it computed
    nothing, and ends when it begins.
    """
    start_ns, end_ns = named.within[:2]
    if not (named.may_wait and trace.operators) or is_transfer(named.op):
        return start_ns, end_ns
    operators = trace.operators_in(named.within)
    receives = [i for i, operator in enumerate(operators) if _RECEIVE in operator.name]
    after = operators[receives[-1] + 1 :] if receives else operators
    sends = [operator.start_ns for operator in after if _is_communication(operator)]
    if sends:
        after, end_ns = [o for o in after if o.start_ns < sends[0]], sends[0]
    return (after[0].start_ns if after else end_ns), end_ns


def _is_communication(operator: Interval) -> bool:
    return operator.name.startswith(_COMMUNICATION)


def chosen_steps(ranks: Sequence[Steps], wanted: Iterable[int]) -> list[int]:
    """Return the wanted steps, or all. Raises UsageError if a rank lacks one of them."""
    every = sorted(set().union(*ranks))
    chosen = sorted(set(wanted)) or every
    for number in chosen:
        lacking = [rank for rank, steps in enumerate(ranks) if number not in steps]
        if lacking:
            there = ", ".join(map(str, every))
            raise UsageError(
                f"step {number}: rank {lacking[0]} has no actions in it; the traces have the steps "
                f"{there}. Choose those that all ranks have with --step"
            )
    return chosen


def check_whole(ranks: Sequence[Steps], chosen: Sequence[int]) -> None:
    """Check that each rank has the same actions, in the same order, in all chosen steps.

    Raises UsageError.
    """
    for rank, steps in enumerate(ranks):
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


def program_rows(ranks: Sequence[Steps], step: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's computations of a step in the order in which they were issued."""
    return tuple(tuple(_computes(steps[step])) for steps in ranks)


def named_stages(source: RankTrace) -> set[int]:
    """Return the stages that the rank computes on, as far as its ranges name them."""
    return {
        named.stage
        for named in source.named
        if named.stage not in (None, NO_INDEX) and not is_transfer(named.op)
    }
