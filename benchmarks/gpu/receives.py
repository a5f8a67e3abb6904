"""The cost of an open receive to the computations beside it.

NCCL's receive is a kernel that spins on some multiprocessors until its message has come.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.ranks import on_ranks
from benchmarks.outcome import Ratio
from engine.run.p2p.fabric import Fabric

NUM_ROUNDS = 12
NUM_PRODUCTS = {"cuda": 60, "cpu": 2}
SIZES = {"cuda": 8192, "cpu": 64}


@dataclass(frozen=True)
class Measurements:
    """Seconds of a row of products beside an open receive, and without one, round by round."""

    beside_s: tuple[float, ...]
    alone_s: tuple[float, ...]


def judge(measured: Measurements) -> list[Finding]:
    ratio = Ratio.of("", measured.beside_s, measured.alone_s)
    low, high = ratio.interval or (min(ratio.values), max(ratio.values))
    return [
        Finding.of(
            "receives",
            "products beside an open receive, over the same without",
            ratio.median,
            Bound(at_most=1.05),
            error=(high - low) / 2,
            note=f"the median of {len(ratio.values)} rounds, within half its 95 % interval",
        )
    ]


def measure(device: torch.device) -> Measurements:
    beside, alone = on_ranks(2, device.type, products_beside, is_shared=device.type == "cpu")[0]
    return Measurements(tuple(beside), tuple(alone))


def products_beside(fabric: Fabric) -> tuple[list[float], list[float]]:
    """Rank 0 multiplies, every second time beside a receive that rank 1 answers when told."""
    backend = "nccl" if fabric.device.type == "cuda" else "gloo"
    group, host = dist.new_group(backend=backend), dist.new_group(backend="gloo")
    number = torch.zeros(1, device=fabric.device)
    times: tuple[list[float], list[float]] = ([], [])
    _connect(number, group)
    for round_index in range(2 * NUM_ROUNDS + 2):
        has_receive = round_index % 2 == 0
        if dist.get_rank() == 0:
            took = _timed(fabric, group, number, has_receive=has_receive, host=host)
            if round_index >= 2:
                times[0 if has_receive else 1].append(took)
        else:
            dist.barrier(host)
            if has_receive:
                dist.send(number, 0, group)
    return times


def _connect(number: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send a number: NCCL builds a communicator when both ends first use it, and blocks."""
    if dist.get_rank() == 0:
        dist.recv(number, 1, group)
    else:
        dist.send(number, 0, group)
    wait_for(number.device)


def _timed(
    fabric: Fabric,
    group: dist.ProcessGroup,
    number: torch.Tensor,
    *,
    has_receive: bool,
    host: dist.ProcessGroup,
) -> float:
    """Seconds of a row of products; the message is sent only after these."""
    device = fabric.device
    size = SIZES[device.type]
    dtype = torch.bfloat16
    left = torch.rand(size, size, device=device, dtype=dtype)
    wait_for(device)
    receive = dist.irecv(number, 1, group) if has_receive else None
    done = torch.Event(device, enable_timing=False) if device.type == "cuda" else None
    began = time.perf_counter()
    for _ in range(NUM_PRODUCTS[device.type]):
        left @ left
    if done is not None:
        done.record()
        done.synchronize()  # not the device: it waits for the receive
    took = time.perf_counter() - began
    dist.barrier(host)
    if receive is not None:
        receive.wait()
    wait_for(device)
    return took
