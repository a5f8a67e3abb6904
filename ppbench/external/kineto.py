"""Reads one rank's trace as torch.profiler writes it: ranges, operators, kernels and launches.

The format is Chrome's trace events, with further keys of Kineto's. A trace of a large step has
millions of events; only the fields named here are kept. Times become whole nanoseconds of the
host's clock since 1970: events count microseconds since `baseTimeNanoseconds`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ppbench.errors import UsageError

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OPERATOR = "cpu_op"
_MESSAGES = ("c10d::send", "c10d::recv_")
_NOT_RANGES = (*_GPU_WORK, *_LAUNCHES, _OPERATOR, "gpu_user_annotation", "overhead", "Trace")
_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)
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
    """The trace of one rank, from one file."""

    path: Path
    rank: int | None  # in its job, from the trace or the file's name
    world_size: int | None  # of the job, which may have several pipelines
    hostname: str | None
    gpus: tuple[str, ...]
    backend: str | None
    ranges: list[Interval]  # by start
    operators: list[Interval]  # by start
    kernels: list[Kernel]  # by launch

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


def read_trace(path: Path) -> Trace:
    """Read a file, compressed by gzip or not. Raises UsageError."""
    data = _read_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path}: is not a Chrome trace: it has no list of traceEvents")
    facts: Mapping[str, object] = data if isinstance(data, dict) else {}
    info = facts.get("distributedInfo")
    distributed: Mapping[str, object] = info if isinstance(info, dict) else {}
    hostname, backend = facts.get("host_name"), distributed.get("backend")
    try:
        base_ns = int(str(facts.get("baseTimeNanoseconds", 0)))
        complete = [event for event in events if event.get("ph") == "X" and "ts" in event]
        return Trace(
            path,
            _rank_of(path, distributed),
            int(str(distributed["world_size"])) if "world_size" in distributed else None,
            None if hostname is None else str(hostname),
            _gpus(facts),
            None if backend is None else str(backend),
            sorted(_interval(e, base_ns) for e in complete if e.get("cat") not in _NOT_RANGES),
            sorted(_interval(e, base_ns) for e in complete if e.get("cat") == _OPERATOR),
            _kernels(complete, base_ns),
        )
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: has an event that cannot be read: {error!r}") from None


def _read_json(path: Path) -> object:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw.startswith(_GZIP) else raw)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UsageError(
            f"{path}: is not a Chrome trace: {error}; expected JSON as torch.profiler's "
            "export_chrome_trace writes it, compressed by gzip or not"
        ) from None


def _rank_of(path: Path, distributed: Mapping[str, object]) -> int | None:
    if "rank" in distributed:
        return int(str(distributed["rank"]))
    numbers = _RANK_IN_NAME.findall(path.name)
    return int(numbers[-1]) if numbers else None


def _gpus(facts: Mapping[str, object]) -> tuple[str, ...]:
    devices = facts.get("deviceProperties")
    if not isinstance(devices, list):
        return ()
    return tuple(str(gpu.get("name", "GPU")) for gpu in devices if isinstance(gpu, dict))


def _interval(event: Mapping[str, object], base_ns: int) -> Interval:
    start_ns, end_ns = _times(event, base_ns)
    return Interval(start_ns, end_ns, str(event["name"]))


def _times(event: Mapping[str, object], base_ns: int) -> tuple[int, int]:
    start_us, duration_us = float(str(event["ts"])), float(str(event.get("dur", 0)))
    start_ns = base_ns + round(start_us * 1000)
    return start_ns, start_ns + round(duration_us * 1000)


def _kernels(events: Sequence[Mapping[str, object]], base_ns: int) -> list[Kernel]:
    """Match kernels with their launches by correlation; one without a launch has no range."""
    launches = {
        correlation: _times(event, base_ns)[0]
        for event in events
        if event.get("cat") in _LAUNCHES and (correlation := _correlation(event)) is not None
    }
    return sorted(
        Kernel(launches[correlation], *_times(event, base_ns), _is_communication(event))
        for event in events
        if event.get("cat") in _GPU_WORK and (correlation := _correlation(event)) in launches
    )


def _correlation(event: Mapping[str, object]) -> int | None:
    details = event.get("args")
    correlation = details.get("correlation") if isinstance(details, dict) else None
    return None if correlation is None else int(str(correlation))


def _is_communication(event: Mapping[str, object]) -> bool:
    return str(event["name"]).lower().startswith(("nccl", "rccl"))
