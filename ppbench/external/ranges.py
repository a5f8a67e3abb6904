"""Recognizes a pipeline's actions by the names of ranges in a trace.

    2F0, 0SEND_F3, OPT          engine's own
    PP:2F0, PP:(0F3;3B1)...     torch.distributed.pipelining, schedules of several stages
    Forward 3, Backward 3       torch's ScheduleGPipe, with one stage per rank
    ...: forward_one_chunk      torch's stages themselves, in a trace with Python's stack: needed
                                for Schedule1F1B, which names no ranges
    a pattern                   any other names

A file is read by the first of these forms that occurs in it, or by the pattern if one is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import NO_INDEX, RECV_OPS, SEND_OPS, Action, Op, parse_cell
from ppbench.errors import UsageError
from ppbench.external.kineto import Interval, Trace

OPTIMIZER = Action(NO_INDEX, Op.OPT, NO_INDEX)
_TORCH = "PP:"
_OF_GPIPE = re.compile(r"(Forward|Backward) (\d+)", re.ASCII)
_OF_STAGES = re.compile(
    r".*pipelining/stage\.py\(\d+\): (forward|backward|backward_weight)_one_chunk"
)
_TORCH_OPTIMIZER = re.compile(r"Optimizer\.step#.*")
_AUTOGRAD = "autograd::engine::"
_WORDS = {
    Op.F: ("f", "fwd", "forward"),
    Op.B: ("b", "bwd", "backward"),
    Op.I: ("i", "input", "dgrad", "backward_input"),
    Op.W: ("w", "weight", "wgrad", "backward_weight"),
    Op.OPT: ("opt", "optimizer"),
}
_OPS = {word: op for op, words in _WORDS.items() for word in words}


class Named(NamedTuple):
    """A range that is an action. A stage or microbatch of None is inferred from the others."""

    within: Interval
    op: Op
    stage: int | None
    microbatch: int | None
    may_wait: bool  # its range may begin with waiting for a message


@dataclass(frozen=True)
class Form:
    """One way of naming actions."""

    name: str
    read: Callable[[Trace, Interval], Sequence[Named]]


def named_ranges(trace: Trace, pattern: re.Pattern[str] | None) -> list[Named]:
    """Return the actions of a trace by start. Raises UsageError if there are none."""
    forms = _FORMS if pattern is None else (_form_of(pattern),)
    for form in forms:
        actions = [named for outer in trace.ranges for named in form.read(trace, outer)]
        if any(named.op is not Op.OPT for named in actions):
            has_optimizer = any(named.op is Op.OPT for named in actions)
            others = [] if has_optimizer else list(_optimizer_ranges(trace))
            return sorted([*actions, *others], key=lambda named: named.within)
    raise UsageError(_nothing_found(trace, pattern))


def check_pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression with the group `op`, and maybe `stage` and `microbatch`.

    Raises UsageError.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--pattern {text}: is not a regular expression: {error}") from None
    if "op" not in pattern.groupindex:
        raise UsageError(
            f"--pattern {text}: has no group called op; expected for example "
            r'"(?P<op>fwd|bwd) s(?P<stage>\d+) m(?P<microbatch>\d+)"'
        )
    return pattern


def _of_actions(trace: Trace, outer: Interval) -> Iterator[Named]:
    is_torch = outer.name.startswith(_TORCH)
    if outer.name == Op.OPT.value:
        yield Named(outer, Op.OPT, NO_INDEX, NO_INDEX, may_wait=False)
        return
    try:
        actions = parse_cell(outer.name.removeprefix(_TORCH))
    except ValueError:
        return
    parts = _split(trace, outer) if len(actions) == 2 else [outer] * len(actions)
    for within, action in zip(parts, actions, strict=True):
        yield Named(within, action.op, action.stage, action.microbatch, may_wait=is_torch)


def _split(trace: Trace, outer: Interval) -> list[Interval]:
    """Split a range with a forward and a backward where the first operator of autograd begins.

    It may be on any thread. Raises UsageError if there is none.
    """
    operators = trace.operators_in(outer)
    starts_ns = (o.start_ns for o in operators if o.name.startswith(_AUTOGRAD))
    at_ns = next(starts_ns, None)
    if at_ns is None:
        raise UsageError(
            f'{trace.path}: range "{outer.name}" holds a forward and a backward, and no operators '
            "of autograd to separate them; profile with ProfilerActivity.CPU"
        )
    return [outer._replace(end_ns=at_ns), outer._replace(start_ns=at_ns)]


def _of_gpipe(_trace: Trace, outer: Interval) -> Iterator[Named]:
    if match := _OF_GPIPE.fullmatch(outer.name):
        op = Op.F if match[1] == "Forward" else Op.B
        yield Named(outer, op, None, int(match[2]), may_wait=True)


def _of_stages(_trace: Trace, outer: Interval) -> Iterator[Named]:
    if match := _OF_STAGES.fullmatch(outer.name):
        op = {"forward": Op.F, "backward": Op.B}.get(match[1], Op.W)
        yield Named(outer, op, None, None, may_wait=False)


def _form_of(pattern: re.Pattern[str]) -> Form:
    def read(trace: Trace, outer: Interval) -> Iterator[Named]:
        if match := pattern.search(outer.name):
            groups = match.groupdict()
            op = _OPS.get((groups["op"] or "").lower())
            if op is None:
                raise UsageError(
                    f'{trace.path}: range "{outer.name}": op is "{groups["op"]}"; expected one '
                    f"of {', '.join(_OPS)}"
                )
            stage, microbatch = (_number(trace, outer, groups, n) for n in ("stage", "microbatch"))
            yield Named(outer, op, stage, microbatch, may_wait=False)

    return Form("pattern", lambda trace, outer: list(read(trace, outer)))


def _number(trace: Trace, outer: Interval, groups: dict[str, str | None], name: str) -> int | None:
    text = groups.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f'{trace.path}: range "{outer.name}": {name} is "{text}"; expected a number'
        ) from None


_FORMS = (
    Form("actions", lambda trace, outer: list(_of_actions(trace, outer))),
    Form("GPipe", lambda trace, outer: list(_of_gpipe(trace, outer))),
    Form("stages", lambda trace, outer: list(_of_stages(trace, outer))),
)


def _optimizer_ranges(trace: Trace) -> Iterator[Named]:
    for outer in trace.ranges:
        if _TORCH_OPTIMIZER.fullmatch(outer.name):
            yield Named(outer, Op.OPT, NO_INDEX, NO_INDEX, may_wait=False)


def is_transfer(op: Op) -> bool:
    return op in SEND_OPS or op in RECV_OPS


def _nothing_found(trace: Trace, pattern: re.Pattern[str] | None) -> str:
    names = list(dict.fromkeys(outer.name for outer in trace.ranges))
    shown = ", ".join(f'"{name[:40]}"' for name in names[:12]) or "no ranges at all"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    expected = "that the pattern matches" if pattern else 'such as "2F0", "PP:2F0" or "Forward 0"'
    return (
        f"{trace.path}: no range is an action of a pipeline {expected}; it has {shown}{more}. "
        "Other names are read with --pattern; torch's Schedule1F1B names its actions only if the "
        "profiler has with_stack=True"
    )
