"""One rank's trace, as torch.profiler writes it: named ranges, operators, kernels and launches.

The format is Chrome's trace events, with Kineto's own keys beside them. A trace of a large step has
millions of events; only what is asked for here is kept of them. Times become whole nanoseconds of
the host's clock since 1970: events tell microseconds since `baseTimeNanoseconds`.
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
    """Something with a name that took time: a range, or an operator."""

    start_ns: int
    end_ns: int
    name: str


class Kernel(NamedTuple):
    """Work of a GPU, and when the host launched it."""

    launched_ns: int
    start_ns: int
    end_ns: int
    is_communication: bool


@dataclass(frozen=True)
class Trace:
    """What one file tells of one rank."""

    path: Path
    rank: int | None  # in its job, as the trace or its file's name says
    world_size: int | None  # of the job, which may have several pipelines
    hostname: str | None
    gpus: tuple[str, ...]
    backend: str | None
    ranges: list[Interval]  # by start
    operators: list[Interval]  # by start
    kernels: list[Kernel]  # by launch

    def operators_in(self, outer: Interval) -> Sequence[Interval]:
        """Those that begin in a range, on whatever thread: backward may have one of its own."""
        first = bisect_left(self.operators, (outer.start_ns,))
        return self.operators[first : bisect_left(self.operators, (outer.end_ns,))]

    @property
    def has_messages(self) -> bool:
        """Whether it sends to another rank, or receives from one."""
        return any(one.name in _MESSAGES for one in self.operators)

    def kernels_of(self, outer: Interval) -> Sequence[Kernel]:
        """What was launched in a range, likewise."""
        first = bisect_left(self.kernels, (outer.start_ns,))
        return self.kernels[first : bisect_right(self.kernels, (outer.end_ns,))]


def read_trace(path: Path) -> Trace:
    """Read a file, packed by gzip or not. Raises UsageError."""
    data = _read_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(one, dict) for one in events):
        raise UsageError(f"{path}: is not a Chrome trace: it has no list of traceEvents")
    facts: Mapping[str, object] = data if isinstance(data, dict) else {}
    told = facts.get("distributedInfo")
    distributed: Mapping[str, object] = told if isinstance(told, dict) else {}
    hostname, backend = facts.get("host_name"), distributed.get("backend")
    try:
        base_ns = int(str(facts.get("baseTimeNanoseconds", 0)))
        whole = [one for one in events if one.get("ph") == "X" and "ts" in one]
        return Trace(
            path,
            _rank_of(path, distributed),
            int(str(distributed["world_size"])) if "world_size" in distributed else None,
            None if hostname is None else str(hostname),
            _gpus(facts),
            None if backend is None else str(backend),
            sorted(_interval(e, base_ns) for e in whole if e.get("cat") not in _NOT_RANGES),
            sorted(_interval(e, base_ns) for e in whole if e.get("cat") == _OPERATOR),
            _kernels(whole, base_ns),
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
            "export_chrome_trace writes it, packed by gzip or not"
        ) from None


def _rank_of(path: Path, distributed: Mapping[str, object]) -> int | None:
    if "rank" in distributed:
        return int(str(distributed["rank"]))
    found = _RANK_IN_NAME.findall(path.name)
    return int(found[-1]) if found else None


def _gpus(facts: Mapping[str, object]) -> tuple[str, ...]:
    devices = facts.get("deviceProperties")
    if not isinstance(devices, list):
        return ()
    return tuple(str(one.get("name", "GPU")) for one in devices if isinstance(one, dict))


def _interval(event: Mapping[str, object], base_ns: int) -> Interval:
    start_ns, end_ns = _times(event, base_ns)
    return Interval(start_ns, end_ns, str(event["name"]))


def _times(event: Mapping[str, object], base_ns: int) -> tuple[int, int]:
    start_us, duration_us = float(str(event["ts"])), float(str(event.get("dur", 0)))
    start_ns = base_ns + round(start_us * 1000)
    return start_ns, start_ns + round(duration_us * 1000)


def _kernels(events: Sequence[Mapping[str, object]], base_ns: int) -> list[Kernel]:
    """Each with its launch, which has the same correlation; without one it belongs to no range."""
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
    found = details.get("correlation") if isinstance(details, dict) else None
    return None if found is None else int(str(found))


def _is_communication(event: Mapping[str, object]) -> bool:
    return str(event["name"]).lower().startswith(("nccl", "rccl"))
