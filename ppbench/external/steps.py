"""Cuts a rank's named ranges into steps, and aligns the clocks of several hosts.

A range is the time of the host. The time of the device is:

    with kernels    from the first kernel launched in the range to the last one's end, without those
                    that move messages
    without         the range; if it may include waiting and sending (torch's own ranges), its
                    operators between these

Steps are the profiler's, `ProfilerStep#12`, or engine's, `step 12`. Without such ranges, or if one
of them has several steps of the pipeline, a step ends where an action occurs again.

Clocks are aligned by messages. No message arrives before it was sent. So the end of rank a's action
that makes a message, and the start of rank b's action that needs it, bound the offset between them:

    offset_b - offset_a <= start_b - end_a          for every message from a to b; the least counts

Messages go both ways (forward and backward), so the offset lies in an interval. Within it the
smallest correction is taken: hosts keep time by NTP, and a clock that is consistent is not changed.
The error is the distance to the ends of the interval, which can be as long as messages waited.
Ranks of one host share its clock, unless their messages contradict that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.plan.action import NO_INDEX, Action, Op
from ppbench.errors import UsageError
from ppbench.external.kineto import OPTIMIZER, Interval, Named, Trace, is_transfer

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


def computations(step: Sequence[Timed]) -> list[Action]:
    """Return a rank's computations of a step in the order in which they were issued."""
    return [t.action for t in step if not is_transfer(t.action.op) and t.action.op is not Op.OPT]


def named_stages(source: RankTrace) -> set[int]:
    """Return the stages that the rank computes on, as far as its ranges name them."""
    return {
        named.stage
        for named in source.named
        if named.stage not in (None, NO_INDEX) and not is_transfer(named.op)
    }


Slack = Mapping[tuple[int, int], int]
"""(rank a, rank b) -> the least time in nanoseconds from the end of a's action to the start of the
action of b that needs it, each on its own clock."""
TOLERANCE_NS = 1_000
"""Traces count microseconds, and each process relates its clock to the date on its own."""


@dataclass(frozen=True)
class Clock:
    """The offset of a rank's clock from rank 0's, and its error."""

    offset_ns: int
    error_ns: int
    is_shared: bool


def clocks_of(hosts: Sequence[str | None], slack: Slack) -> list[Clock]:
    """Return a clock for each rank; ranks of unnamed hosts have one each."""
    names: list[Hashable] = [rank if host is None else host for rank, host in enumerate(hosts)]
    clocks, violated_ns = _solve(names, slack)
    if violated_ns > TOLERANCE_NS and len(set(names)) < len(names):
        clocks, _ = _solve(list(range(len(hosts))), slack)
    return clocks


def _solve(names: Sequence[Hashable], slack: Slack) -> tuple[list[Clock], int]:
    """Find an offset for each name, the first rank's being 0; return the ranks' clocks.

    The number is by how many nanoseconds messages still arrive too early.
    """
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    clock_of = [numbers[name] for name in names]
    bounds = np.full((len(numbers), len(numbers)), np.inf)
    np.fill_diagonal(bounds, 0.0)
    within_ns = 0
    for (a, b), ns in slack.items():
        source, target = clock_of[a], clock_of[b]
        if source == target:
            within_ns = max(within_ns, -ns)
        else:
            bounds[source, target] = min(bounds[source, target], ns)
    violated_ns = max(within_ns, _relax(bounds))
    reach = _shortest(bounds)
    offsets = _least_correction(bounds)
    clocks = []
    for number in clock_of:
        low, high = -reach[number, 0], reach[0, number]
        far = max(high - offsets[number], offsets[number] - low, 0.0) if number else 0.0
        error_ns = round(far) if np.isfinite(far) else 0
        clocks.append(Clock(round(offsets[number]), error_ns + violated_ns, number == 0))
    return clocks, violated_ns


def _relax(bounds: np.ndarray) -> int:
    """Widen bounds in place until they are consistent; return by how much.

    Around a cycle of messages the bounds must not add up to a negative number: if they do, the
    clocks have drifted, or ranges were not recognized rightly.
    """
    widened_ns = 0.0
    while (worst := float(np.diag(_shortest(bounds)).min())) < 0:  # the most negative cycle
        step = -worst / len(bounds)
        bounds[np.isfinite(bounds) & ~np.eye(len(bounds), dtype=bool)] += step + 1
        widened_ns += step + 1
    return round(widened_ns)


def _shortest(bounds: np.ndarray) -> np.ndarray:
    """Return all shortest paths (Floyd-Warshall); a negative cycle shows on the diagonal."""
    reach = bounds.copy()
    for via in range(len(reach)):
        reach = np.minimum(reach, reach[:, [via]] + reach[[via], :])
    return reach


def _least_correction(bounds: np.ndarray) -> np.ndarray:
    """Return offsets within the bounds, the first 0, with the least sum of absolute values."""
    from scipy.optimize import linprog

    count = len(bounds)
    if count == 1:
        return np.zeros(1)
    rows, limits = [], []
    for source in range(count):
        for target in range(count):
            if source != target and np.isfinite(bounds[source, target]):
                row = np.zeros(2 * count)
                row[target], row[source] = 1.0, -1.0
                rows.append(row)
                limits.append(bounds[source, target] / 1e3)
        for sign in (1.0, -1.0):  # the variable to minimise is at least the absolute value
            row = np.zeros(2 * count)
            row[source], row[count + source] = sign, -1.0
            rows.append(row)
            limits.append(0.0)
    free = [(0.0, 0.0)] + [(None, None)] * (count - 1) + [(0.0, None)] * count
    cost = np.r_[np.zeros(count), np.ones(count)]
    result = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=free, method="highs")
    assert result.x is not None, result.message
    return np.asarray(result.x[:count], dtype=float) * 1e3
