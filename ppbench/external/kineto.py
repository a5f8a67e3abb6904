"""Reads a rank's trace as torch.profiler writes it, and recognizes actions by names of ranges.

The format is Chrome's trace events, with further keys of Kineto's. A trace of a large step has
millions of events; only the fields named here are kept. Times become whole nanoseconds of the
host's clock since 1970: events count microseconds since `baseTimeNanoseconds`.

Names of ranges that are recognized:

    2F0, 0SEND_F3, OPT          engine's own
    PP:2F0, PP:(0F3;3B1)...     torch.distributed.pipelining, schedules of several stages
    Forward 3, Backward 3       torch's ScheduleGPipe, with one stage per rank
    ...: forward_one_chunk      torch's stages themselves, in a trace with Python's stack: needed
                                for Schedule1F1B, which names no ranges
    a pattern                   any other names

A file is read by the first of these forms that occurs in it, or by the pattern if there is one.
A file may hold several ranks, such as merged traces or ppbench's own: each of its processes that
has actions is a rank.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.plan.action import COLLECTIVE_OPS, NO_INDEX, RECV_OPS, SEND_OPS, Action, Op, parse_cell
from ppbench.errors import UsageError
from ppbench.external.collectives import Collective, Event, collectives_of, kind_of

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("_runtime", "_driver")
"""How the categories of launches end, such as `cuda_runtime` and `xpu_driver`."""
_EARLIEST_NS = 100_000
"""A kernel may seem to begin so much before its launch: device and host have their own clocks."""
_OPERATOR = "cpu_op"
_MESSAGES = ("c10d::send", "c10d::recv_")
_NOT_RANGES = (*_GPU_WORK, _OPERATOR, "gpu_user_annotation", "overhead", "Trace")
_RANK_IN_NAME = re.compile(r"rank[_\-. ]?(\d+)", re.IGNORECASE)
_GZIP = b"\x1f\x8b"


class Interval(NamedTuple):
    """A named interval of time: a range or an operator."""

    start_ns: int
    end_ns: int
    name: str


class Kernel(NamedTuple):
    """A piece of work of a GPU, and when the host launched it."""

    launched_ns: int
    start_ns: int
    end_ns: int
    is_communication: bool


@dataclass(frozen=True)
class Trace:
    """The trace of one rank, from a file or from one process of it."""

    path: Path
    rank: int | None  # in its job, from the trace or the file's name
    world_size: int | None  # of the job, which may have several pipelines
    hostname: str | None
    gpus: tuple[str, ...]
    backend: str | None
    ranges: list[Interval]  # by start
    operators: list[Interval]  # by start
    kernels: list[Kernel]  # by launch
    collectives: list[Collective]  # by launch
    groups: Mapping[str, tuple[int, ...]]  # ranks of the job's process groups that it is in
    accelerator: str = "cuda"  # the kind of device that its kernels ran on
    doubts: tuple[str, ...] = ()  # what is wrong with its kernels

    def operators_in(self, outer: Interval) -> Sequence[Interval]:
        """Return the operators that begin in a range, on any thread: backward may have its own."""
        first = bisect_left(self.operators, (outer.start_ns,))
        return self.operators[first : bisect_left(self.operators, (outer.end_ns,))]

    @property
    def has_messages(self) -> bool:
        """Whether it sends to another rank, or receives from one."""
        return any(operator.name in _MESSAGES for operator in self.operators)

    def kernels_of(self, outer: Interval) -> Sequence[Kernel]:
        """Return the kernels that were launched in a range, on any thread."""
        first = bisect_left(self.kernels, (outer.start_ns,))
        return self.kernels[first : bisect_right(self.kernels, (outer.end_ns,))]


def read_traces(path: Path, pattern: re.Pattern[str] | None) -> list[Trace]:
    """Read the ranks of a file, compressed by gzip or not: mostly it is one.

    Processes without actions, such as those that load data, are no ranks where others have some.
    Raises UsageError.
    """
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw.startswith(_GZIP) else raw)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UsageError(
            f"{path}: is not a Chrome trace: {error}; expected JSON as torch.profiler's "
            "export_chrome_trace writes it, compressed by gzip or not"
        ) from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path}: is not a Chrome trace: it has no list of traceEvents")
    facts: Mapping[str, object] = data if isinstance(data, dict) else {}
    complete = [event for event in events if event.get("ph") == "X" and "ts" in event]
    processes = list(dict.fromkeys(str(e.get("pid")) for e in complete if _is_range(e)))
    try:
        whole = _trace_of(path, facts, complete)
        if len(processes) < 2:
            return [whole]
        launches = [event for event in complete if _is_launch(event)]
        parts = {
            process: [
                event
                for event in complete
                if str(event.get("pid")) == process or event.get("cat") in _GPU_WORK
            ]
            for process in processes
        }
        traces = {process: _trace_of(path, facts, part) for process, part in parts.items()}
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: has an event that cannot be read: {error!r}") from None
    forms = _FORMS if pattern is None else (_form_of(pattern),)
    ranks = {
        process: trace
        for process, trace in traces.items()
        if any(any(form(trace, outer)) for form in forms for outer in trace.ranges)
    }
    if len(ranks) < 2:
        return [whole]
    by_correlation: dict[int | None, set[str]] = {}
    for event in launches:
        by_correlation.setdefault(_correlation(event), set()).add(str(event.get("pid")))
    if any(len(launching & ranks.keys()) > 1 for launching in by_correlation.values()):
        raise UsageError(
            f"{path}: holds {len(ranks)} ranks whose kernels cannot be told apart: their launches "
            "have the same numbers; give the files of the ranks, before they were merged"
        )
    names = {
        str(event.get("pid")): str(event["args"].get("name"))
        for event in events
        if event.get("name") == "process_name" and isinstance(event.get("args"), dict)
    }
    found = {process: _RANK_IN_NAME.findall(names.get(process, "")) for process in ranks}
    numbers = [int(number[-1]) if number else None for number in found.values()]
    if None in numbers or len(set(numbers)) < len(numbers):
        in_order = sorted(ranks, key=lambda process: (len(process), process))
        numbers = [in_order.index(process) for process in ranks]
    return [
        dataclasses.replace(trace, rank=number)
        for trace, number in zip(ranks.values(), numbers, strict=True)
    ]


def _trace_of(
    path: Path, facts: Mapping[str, object], complete: Sequence[Mapping[str, object]]
) -> Trace:
    info = facts.get("distributedInfo")
    distributed: Mapping[str, object] = info if isinstance(info, dict) else {}
    in_name = _RANK_IN_NAME.findall(path.name)[-1:]
    rank = distributed["rank"] if "rank" in distributed else next(iter(in_name), None)
    devices, listed = facts.get("deviceProperties"), distributed.get("pg_config")
    groups = {
        str(group.get("pg_name")): tuple(map(int, group["ranks"]))
        for group in (listed if isinstance(listed, list) else [])
        if isinstance(group, dict) and isinstance(group.get("ranks"), list)
    }
    hostname, backend = facts.get("host_name"), distributed.get("backend")
    base_ns = int(str(facts.get("baseTimeNanoseconds", 0)))
    launches = sorted({str(e.get("cat")).rpartition("_")[0] for e in complete if _is_launch(e)})
    launched: dict[int | None, int] = {  # when the host launched each kernel, by correlation
        correlation: _times(event, base_ns)[0]
        for event in complete
        if _is_launch(event) and (correlation := _correlation(event)) is not None
    }
    kernels, doubts = _kernels(complete, launched, base_ns)

    def event_of(event: Mapping[str, object]) -> Event:
        details = event.get("args")
        times = _times(event, base_ns)
        return Event(str(event["name"]), times, details if isinstance(details, dict) else {})

    named = [event for event in complete if kind_of(str(event["name"]))]
    moving = [e for e in named if e.get("cat") in _GPU_WORK and _is_communication(e)]
    collectives = collectives_of(
        (event_of(e) for e in named if str(e["name"]).startswith("c10d::")),
        (event_of(e) for e in named if str(e["name"]).startswith("gloo:")),
        ((launched[at], event_of(e)) for e in moving if (at := _correlation(e)) in launched),
        groups,
    )
    return Trace(
        path,
        None if rank is None else int(str(rank)),
        int(str(distributed["world_size"])) if "world_size" in distributed else None,
        None if hostname is None else str(hostname),
        tuple(
            str(gpu.get("name", "GPU"))
            for gpu in (devices if isinstance(devices, list) else [])
            if isinstance(gpu, dict)
        ),
        None if backend is None else str(backend),
        sorted(_interval(e, base_ns) for e in complete if _is_range(e)),
        sorted(_interval(e, base_ns) for e in complete if e.get("cat") == _OPERATOR),
        kernels,
        collectives,
        groups,
        launches[0] if launches else "cuda",
        doubts,
    )


def _is_launch(event: Mapping[str, object]) -> bool:
    return str(event.get("cat")).endswith(_LAUNCHES)


def _is_range(event: Mapping[str, object]) -> bool:
    return event.get("cat") not in _NOT_RANGES and not _is_launch(event)


def _interval(event: Mapping[str, object], base_ns: int) -> Interval:
    start_ns, end_ns = _times(event, base_ns)
    return Interval(start_ns, end_ns, str(event["name"]))


def _times(event: Mapping[str, object], base_ns: int) -> tuple[int, int]:
    start_us, duration_us = float(str(event["ts"])), float(str(event.get("dur", 0)))
    start_ns = base_ns + round(start_us * 1000)
    return start_ns, start_ns + round(duration_us * 1000)


def _kernels(
    events: Sequence[Mapping[str, object]], launches: Mapping[int | None, int], base_ns: int
) -> tuple[list[Kernel], tuple[str, ...]]:
    """Match kernels with their launches by correlation; one without a launch has no range.

    Also return what is wrong with them. A stream runs its kernels in the order of their launches,
    so the fewest that break it are left out, and those that begin before their launch.
    """
    work = [event for event in events if event.get("cat") in _GPU_WORK]
    streams: dict[tuple[object, object], list[tuple[Kernel, str]]] = {}
    wrong: list[str] = []
    for event in work:
        if (correlation := _correlation(event)) not in launches:
            continue
        name, launched_ns = str(event["name"]), launches[correlation]
        start_ns, end_ns = _times(event, base_ns)
        if start_ns < launched_ns - _EARLIEST_NS or end_ns < start_ns:
            wrong.append(name)
            continue
        kernel = Kernel(launched_ns, start_ns, end_ns, _is_communication(event))
        streams.setdefault((event.get("pid"), event.get("tid")), []).append((kernel, name))
    kernels: list[Kernel] = []
    for stream in streams.values():
        stream.sort()
        kept = _longest_rise([kernel.start_ns for kernel, _ in stream])
        kernels += [kernel for index, (kernel, _) in enumerate(stream) if index in kept]
        wrong += [name for index, (_, name) in enumerate(stream) if index not in kept]
    doubts = []
    if wrong:
        names = [f"{count} of {name[:40]}" for name, count in Counter(wrong).most_common(3)]
        doubts.append(
            f"{len(wrong)} of its {len(work)} kernels are left out, for they have impossible times "
            f"({', '.join(names)})"
        )
    if work and not kernels:
        doubts.append(
            f"its times are the host's, for none of its {len(work)} kernels has a launch and a "
            "possible time"
        )
    return sorted(kernels), tuple(doubts)


def _longest_rise(numbers: Sequence[int]) -> set[int]:
    """Return the indices of the longest subsequence that never falls."""
    ends: list[int] = []  # the least number at which a rise of each length ends
    places: list[int] = []  # their indices
    before: list[int] = []  # by index, that of the number before it in its rise
    for index, number in enumerate(numbers):
        length = bisect_right(ends, number)
        before.append(places[length - 1] if length else -1)
        ends[length : length + 1], places[length : length + 1] = [number], [index]
    kept = set()
    index = places[-1] if places else -1
    while index >= 0:
        kept.add(index)
        index = before[index]
    return kept


def _correlation(event: Mapping[str, object]) -> int | None:
    details = event.get("args")
    correlation = details.get("correlation") if isinstance(details, dict) else None
    return None if correlation is None else int(str(correlation))


def _is_communication(event: Mapping[str, object]) -> bool:
    return str(event["name"]).lower().startswith(("nccl", "rccl"))


OPTIMIZER = Action(NO_INDEX, Op.OPT, NO_INDEX)
_TORCH = "PP:"
_COLLECTIVE_NAMES = tuple(op.value for op in COLLECTIVE_OPS)
_OF_GPIPE = re.compile(r"(Forward|Backward) (\d+)", re.ASCII)
_OF_STAGES = re.compile(
    r".*pipelining/stage\.py\(\d+\): (forward|backward|backward_weight)_one_chunk"
)
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
    """A range that is an action; a stage or microbatch of None is inferred later."""

    within: Interval
    op: Op
    stage: int | None
    microbatch: int | None
    may_wait: bool  # its range may begin with waiting for a message


Form = Callable[[Trace, Interval], Iterator[Named]]
"""A way of naming actions: yields the actions that a range is."""


def named_ranges(trace: Trace, pattern: re.Pattern[str] | None) -> list[Named]:
    """Return the actions of a trace by start. Raises UsageError if there are none."""
    forms = _FORMS if pattern is None else (_form_of(pattern),)
    for form in forms:
        actions = [named for outer in trace.ranges for named in form(trace, outer)]
        if any(named.op is not Op.OPT for named in actions):
            if not any(named.op is Op.OPT for named in actions):
                actions += [
                    Named(outer, Op.OPT, NO_INDEX, NO_INDEX, may_wait=False)
                    for outer in trace.ranges
                    if outer.name.startswith("Optimizer.step#")
                ]
            return sorted(actions, key=lambda named: named.within)
    names = list(dict.fromkeys(outer.name for outer in trace.ranges))
    shown = ", ".join(f'"{name[:40]}"' for name in names[:12]) or "no ranges at all"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    expected = "that the pattern matches" if pattern else 'such as "2F0", "PP:2F0" or "Forward 0"'
    raise UsageError(
        f"{trace.path}: no range is an action of a pipeline {expected}; it has {shown}{more}. "
        "Other names are read with --pattern; torch's Schedule1F1B names its actions only if the "
        "profiler has with_stack=True"
    )


def collective_ranges(trace: Trace) -> list[Named]:
    """Return the ranges in which a schedule asks for collectives, by start."""
    return [
        Named(outer, action.op, action.stage, NO_INDEX, may_wait=False)
        for outer in trace.ranges
        if (name := outer.name.removeprefix(_TORCH))[:1].isdecimal()
        and name.rstrip("0123456789").endswith(_COLLECTIVE_NAMES)
        for action in parse_cell(name)
    ]


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
        cell = parse_cell(outer.name.removeprefix(_TORCH))
    except ValueError:
        return
    actions = [action for action in cell if action.op not in COLLECTIVE_OPS]
    parts = [outer] * len(actions)
    if len(actions) == 2:  # backward begins with the first operator of autograd, on any thread
        operators = trace.operators_in(outer)
        at_ns = next((o.start_ns for o in operators if o.name.startswith(_AUTOGRAD)), None)
        if at_ns is None:
            raise UsageError(
                f'{trace.path}: range "{outer.name}" holds a forward and a backward, and no '
                "operators of autograd to separate them; profile with ProfilerActivity.CPU"
            )
        parts = [outer._replace(end_ns=at_ns), outer._replace(start_ns=at_ns)]
    for within, action in zip(parts, actions, strict=True):
        yield Named(within, action.op, action.stage, action.microbatch, may_wait=is_torch)


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
            numbers: dict[str, int | None] = {}
            for name in ("stage", "microbatch"):
                text = groups.get(name)
                try:
                    numbers[name] = None if text is None else int(text)
                except ValueError:
                    raise UsageError(
                        f'{trace.path}: range "{outer.name}": {name} is "{text}"; expected a number'
                    ) from None
            yield Named(outer, op, numbers["stage"], numbers["microbatch"], may_wait=False)

    return read


_FORMS: tuple[Form, ...] = (_of_actions, _of_gpipe, _of_stages)


def is_transfer(op: Op) -> bool:
    return op in SEND_OPS or op in RECV_OPS
