"""Traces of torch.profiler, made by hand: every time in them is chosen."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

BASE_NS = 1_700_000_000_000_000_000


def complete(name, start, end, cat="user_annotation", tid=7, **args):
    """An event with microseconds, as Kineto writes them."""
    times = {"ts": float(start), "dur": float(end - start)}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def operator(name, start, end, tid=7):
    return complete(name, start, end, "cpu_op", tid)


def launch(correlation, at, tid=7, cat="cuda_runtime"):
    return complete("cudaLaunchKernel", at, at + 1, cat, tid, correlation=correlation)


def kernel(name, correlation, start, end):
    """NCCL has a stream of its own."""
    stream = 21 if name.startswith("nccl") else 20
    return complete(name, start, end, "kernel", stream, correlation=correlation)


def on_device(rank, cat="cuda_runtime", num_steps=1):
    """A rank's steps in which the host is done at once and a kernel takes each action's time."""
    events = []
    for step in range(num_steps):
        for number, (name, (begin, end)) in enumerate(ONE_STEP[rank].items(), 10 * step):
            at = STEP_US * step
            events.append(complete(name, at + begin, at + begin + 2))
            events.append(launch(number, at + begin, cat=cat))
            events.append(kernel("gemm", number, at + begin, at + end))
    return events


def trace(folder: Path, rank: int | None, events, host="vm", name=None, **facts) -> Path:
    """A file `rank<r>.json`, or what `name` says; packed where it ends so."""
    path = folder / (name or f"rank{rank}.json")
    told = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank}}
    data = {
        **told,
        "host_name": host,
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}, *events],
        **facts,
    }
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


ONE_STEP = {  # 1F1B of two ranks and two microbatches, without waiting inside; microseconds
    0: {"0F0": (0, 10), "0F1": (10, 20), "0B0": (45, 65), "0B1": (80, 100), "OPT": (100, 105)},
    1: {"1F0": (12, 22), "1B0": (22, 42), "1F1": (42, 52), "1B1": (52, 72), "OPT": (72, 78)},
}
STEP_US = 200


def one_step(rank, start=0, clock=0, prefix=""):
    """A rank's ranges of ONE_STEP, begun at `start` on a clock that is `clock` ahead."""
    at = start + clock
    return [
        complete(name if name == "OPT" else prefix + name, at + begin, at + end)
        for name, (begin, end) in ONE_STEP[rank].items()
    ]


def two_ranks(folder: Path, num_steps=3, clock=0, hosts=("vm", "vm")) -> list[Path]:
    """Files of two ranks; the clock of the second is so many microseconds ahead."""
    return [
        trace(
            folder,
            rank,
            [
                event
                for step in range(num_steps)
                for event in one_step(rank, step * STEP_US, clock * rank)
            ],
            host=hosts[rank],
        )
        for rank in (0, 1)
    ]
