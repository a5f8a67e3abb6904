"""Trainings on GPUs: exact gradients, messages, memory, and memory that is almost full.

    python -m benchmarks.gpu.training [exactness] [memory] [messages] [receives] [memory_full]

`exactness`: several ranks on one GPU against the unsplit model there, loss and every gradient, in
float64. `memory`: the peak by number of microbatches is linear for AFAB, flat for 1F1B, and as
predicted. `messages`: NCCL's are exact and each edge has a stream of its own; over one GPU too, as
ranks are hosts to it. `receives`: an open receive of NCCL is a kernel that spins on some
multiprocessors; its cost to computations beside it. `memory_full`: a pipeline on two GPUs that are
almost full ends, or says that memory is out, and never hangs. What is out of memory synchronises
the device, under receives that are open; AFAB and zbv have places at which that hangs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.claims import Goal
from benchmarks.gpu.device import run_checks, trainer_on, unknown, wait_for
from benchmarks.loop import in_turns, sides
from benchmarks.ranks import ENDED, RankError, on_ranks
from benchmarks.rows import NO_STARTS, Row
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.spans import Span
from engine.run import device as devices
from engine.run.clock import clock_for
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree

ON_ONE = (("afab", 2), ("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2))
OVER_NCCL = ("afab", "1f1b", "interleaved_1f1b", "zbv")
NUM_MICROBATCHES, NUM_CASES, TOLERANCE = 4, 12, 1e-10


@dataclass(frozen=True)
class Trained:
    """A rank's part of a training of three steps, on the CPU."""

    loss: float | None
    gradients: dict[str, Tensor]
    spans: list[Span]
    transport: str
    memory: MemoryUse


def exactness(device: torch.device) -> Iterator[Row]:
    """Train on ranks that share the device."""
    for row, _ in compared(device, ON_ONE, is_shared=True):
        yield row


def compared(
    device: torch.device, cases: Sequence[tuple[str, int]], *, is_shared: bool
) -> Iterator[tuple[Row, str]]:
    """Train each case on ranks, and once on one rank; the row, and what moved messages."""
    alone = Fabric(device, clock_for(device), is_device_shared=False)
    unsplit = train(alone, settings_of("afab", 1))
    for num_ranks in sorted({size for _, size in cases}):
        schedules = [schedule for schedule, size in cases if size == num_ranks]
        every = [settings_of(schedule, num_ranks) for schedule in schedules]
        ranks = on_ranks(num_ranks, device.type, train_all, every, is_shared=is_shared)
        for schedule, parts in zip(schedules, zip(*ranks, strict=True), strict=True):
            name = f"{schedule} on {num_ranks} ranks: loss and gradients off the unsplit model's"
            note = f"float64, relative to each largest element; over {parts[0].transport}"
            worst = difference(parts, unsplit)
            yield Row.exact(name, worst, Goal(None, TOLERANCE), note=note), parts[0].transport


def train_all(fabric: Fabric, every: Sequence[TrainerConfig]) -> list[Trained]:
    """One rank's part of several cases, one after the other."""
    return [train(fabric, settings) for settings in every]


def settings_of(schedule: str, world_size: int) -> TrainerConfig:
    data = DataSpec(seq_len=32, num_microbatches=NUM_MICROBATCHES)
    return TrainerConfig(ModelSpec("llama-tiny", "float64"), data, schedule, world_size)


def train(fabric: Fabric, settings: TrainerConfig) -> Trained:
    """One rank's gradients of step 0, the spans of step 1, and the memory of step 2."""
    trainer = Trainer(agree(settings, fabric), fabric)
    loss = trainer.step(0).loss
    grads = {name: p.grad for name, p in trainer.parameters().items()}
    gradients = {name: grad.cpu() for name, grad in grads.items() if grad is not None}
    spans = trainer.step(1).spans
    memory_use = trainer.measure_memory(2)
    assert memory_use is not None
    trainer.close()
    return Trained(loss, gradients, spans, fabric.transport, memory_use)


def difference(parts: Sequence[Trained], unsplit: Trained) -> float:
    """The largest relative difference; infinite where a gradient is missing."""
    merged = {name: gradient for part in parts for name, gradient in part.gradients.items()}
    if merged.keys() != unsplit.gradients.keys():
        return float("inf")
    (loss,) = (part.loss for part in parts if part.loss is not None)
    assert unsplit.loss is not None
    worst = abs(loss / unsplit.loss - 1)
    for name, gradient in merged.items():
        theirs = unsplit.gradients[name]
        largest = float(theirs.abs().max()) or 1.0
        worst = max(worst, float((gradient - theirs).abs().max()) / largest)
    return worst


# Memory


class Peak(NamedTuple):
    """The peak of a step, measured and predicted; None without a prediction."""

    num_microbatches: int
    peak_bytes: int
    predicted_bytes: int | None


def memory(device: torch.device) -> Iterator[Row]:
    """Measure the peaks of both schedules."""
    afab, flat = peaks("afab", device), peaks("1f1b", device)
    name, note = "peak of afab, off its line over microbatches by", "of its growth"
    yield Row.exact(name, off_line(afab), Goal(None, 0.05), note=note)
    name = "peak of afab with the most microbatches, over that of 1f1b"
    yield Row.exact(name, afab[-1].peak_bytes / flat[-1].peak_bytes, Goal(1.2))
    of_flat = [peak.peak_bytes for peak in flat]
    name = "peak of 1f1b over numbers of microbatches, the most over the least, less 1"
    yield Row.exact(name, max(of_flat) / min(of_flat) - 1, Goal(None, 0.05))
    name = "predicted peak off the measured one by, at worst"
    off = [abs(p.predicted_bytes / p.peak_bytes - 1) for p in afab + flat if p.predicted_bytes]
    if len(off) == len(afab + flat):
        yield Row.exact(name, max(off), Goal(None, 0.05))
    else:
        yield unknown(name, "the allocator keeps no history to learn from")


def peaks(schedule: str, device: torch.device) -> list[Peak]:
    """The peak of the third step by number of microbatches."""
    found = []
    for number in (2, 3, 4, 5):
        trainer = trainer_on(device, schedule, number)
        use = trainer.measure_memory(2)
        assert use is not None
        trainer.close()
        found.append(Peak(number, use.peak_bytes, use.predicted_peak_bytes))
    return found


def off_line(found: Sequence[Peak]) -> float:
    """The worst distance from the line through the first and the last, of what these differ by."""
    first, last = found[0], found[-1]
    growth = last.peak_bytes - first.peak_bytes
    if growth <= 0:
        return float("inf")
    slope = growth / (last.num_microbatches - first.num_microbatches)
    off = (
        peak.peak_bytes
        - first.peak_bytes
        - slope * (peak.num_microbatches - first.num_microbatches)
        for peak in found
    )
    return max(map(abs, off)) / growth


# Messages


def messages(device: torch.device) -> Iterator[Row]:
    """Train on ranks with a GPU each, and count the streams of their edges."""
    cases = [(schedule, 2) for schedule in OVER_NCCL]
    rows, transports = zip(*compared(device, cases, is_shared=False), strict=True)
    yield from rows
    num_nccl = sum(transport == "nccl" for transport in transports)
    yield Row.exact("cases over nccl", num_nccl, Goal(len(cases)))
    counts = on_ranks(2, device.type, count_streams, is_shared=False)
    num_edges, num_streams = max(counts)[0], min(fewest for _, fewest in counts)
    name = f"streams of {num_edges} edges, the fewest of {NUM_CASES} cases in a launch"
    note = "edges that share a stream serialise, or hang"
    yield Row.exact(name, num_streams, Goal(num_edges), note=note)


def count_streams(fabric: Fabric) -> tuple[int, int]:
    """The edges of this rank, and the fewest streams that their channels had in a launch."""
    fewest, num_edges = 10**6, 0
    for _ in range(NUM_CASES):
        trainer = Trainer(agree(settings_of("interleaved_1f1b", 2), fabric), fabric)
        trainer.step(0)
        channels = list(trainer.runner._channels.values())  # type: ignore[attr-defined]  # the engine's runner
        streams = {getattr(channel, "_stream", id(channel)) for channel in channels}
        fewest, num_edges = min(fewest, len(streams)), len(channels)
        trainer.close()
    return num_edges, fewest


def receives(device: torch.device) -> Iterator[Row]:
    """Multiply matrices beside an open receive, and without one, in turns."""
    turns = on_ranks(2, device.type, products_beside, is_shared=device.type == "cpu")[0]
    name = "products beside an open receive, over the same without"
    yield Row.ratio(name, [sides(turns, "alone", "beside")], Goal(None, 1.05), starts=NO_STARTS)


def products_beside(fabric: Fabric) -> dict[str, list[float]]:
    """Rank 0 multiplies; the message of a receive is sent only after its products."""
    device, is_first = fabric.device, dist.get_rank() == 0
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    host = dist.new_group(backend="gloo")
    size, num_products = (8192, 60) if device.type == "cuda" else (64, 2)
    left = torch.rand(size, size, device=device, dtype=torch.bfloat16)
    number = torch.zeros(1, device=device)
    if is_first:  # NCCL builds a communicator when both ends first use it, and blocks
        dist.recv(number, 1, group)
    else:
        dist.send(number, 0, group)
    wait_for(device)

    def turn(*, has_receive: bool) -> float:
        if not is_first:
            dist.barrier(host)
            if has_receive:
                dist.send(number, 0, group)
            return 1.0
        wait_for(device)
        receive = dist.irecv(number, 1, group) if has_receive else None
        done = torch.Event(device, enable_timing=False) if device.type == "cuda" else None
        began = time.perf_counter()
        for _ in range(num_products):
            left @ left
        if done is not None:
            done.record()
            done.synchronize()  # not the device: it waits for the receive
        took = time.perf_counter() - began
        dist.barrier(host)
        if receive is not None:
            receive.wait()
        return took

    arms = {"beside": lambda: turn(has_receive=True), "alone": lambda: turn(has_receive=False)}
    return in_turns(arms, range(12))


# Memory that is almost full

PATIENCE_S = 15.0  # two steps that take longer are taken to hang, and the ranks are ended
OUT_OF_MEMORY = "out of memory"


def memory_full(device: torch.device) -> Iterator[Row]:
    """Train two steps with few bytes left; out of memory is an end, too."""
    if device.type == "cuda" and devices.count() < 2:
        yield unknown("pipelines on GPUs that are almost full", "needs 2 GPUs; there is 1")
        return
    for schedule in ("afab", "zbv"):
        for left in (256, 64) if device.type == "cuda" else (256,):
            end, sizes = "ended", (schedule, left * 2**20)
            try:
                on_ranks(2, device.type, fill_and_train, *sizes, is_shared=device.type == "cpu")
            except RankError as error:
                end = str(error).strip().splitlines()[-1]
                if ENDED in str(error):
                    end = f"hangs: two steps took longer than {PATIENCE_S:.0f} s"
                elif OUT_OF_MEMORY in str(error):
                    end = OUT_OF_MEMORY
            name = f"{schedule} with {left} MiB left: ends, or is out of memory"
            yield Row.exact(name, int(end in ("ended", OUT_OF_MEMORY)), Goal(1), note=end)


def fill_and_train(fabric: Fabric, schedule: str, left_bytes: int) -> bool:
    """Two steps with all but so many bytes of the device taken, in pieces of growing lengths."""
    preset, seq_len = ("llama-160m", 1024) if fabric.device.type == "cuda" else ("llama-tiny", 16)
    data = DataSpec(seq_len=seq_len, num_microbatches=2 * NUM_MICROBATCHES)
    config = TrainerConfig(ModelSpec(preset, "float32"), data, schedule, 2)
    trainer, filling = Trainer(agree(config, fabric), fabric), list[Tensor]()
    if fabric.device.type == "cuda":
        size = max(0, devices.free_bytes(fabric.device) - left_bytes)
        filling.append(torch.empty(size, dtype=torch.uint8, device=fabric.device))
    watchdog = threading.Timer(PATIENCE_S, os._exit, [1])
    watchdog.daemon = True
    watchdog.start()
    for step in range(2):
        trainer.step(step)
    watchdog.cancel()
    del filling
    return True


PARTS = {"exactness": exactness, "memory": memory, "messages": messages, "receives": receives}
PARTS |= {"memory_full": memory_full}

if __name__ == "__main__":
    run_checks("gpu.training", __doc__, PARTS)
