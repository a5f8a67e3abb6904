"""Measures the memory of a step on this rank: when, for what, and what is predicted.

One extra, untimed step is run while its allocations are recorded, and they are added up on top of
what was alive before. Accelerators: the peak itself is the caching allocator's own counter, which
needs no recording; CPU: torch has no such counter. Messages whose shapes vary are left out on the
CPU, since other threads make room for them, and then nothing is predicted, since no two
microbatches cost the same. Both: the process's high-water mark.

Gradients come and go within the step. Those that are there when it is over are traced back to when
their memory was last allocated; before that they were something else, or not there.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine.plan.action import Op
from engine.plan.memory import MeasuredBytes, Messages, StageOp, predict_peak
from engine.plan.program import Program
from engine.plan.sharded_bytes import NOTHING_SHARED, ActionBytes, SharedBytes
from engine.plan.spans import Lane, Span
from engine.run import device as devices
from engine.run.allocations import MemoryChange, record

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

MAX_LEVELS = 2000
"""A longer timeline is kept as its envelope."""


class Level(NamedTuple):
    """From `time_ns` on, `num_bytes` are allocated."""

    time_ns: int
    num_bytes: int


class Block(NamedTuple):
    """Memory that was allocated during a step; `end_ns` None where it outlived the step."""

    start_ns: int
    end_ns: int | None
    num_bytes: int


@dataclass(frozen=True)
class MemorySplit:
    """Bytes by what they are for."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int  # all else: activations, messages, the batch, temporaries


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a step; None where the device or system does not tell.

    `timeline` begins with what was alive before and is exact at its peak; elsewhere it may be an
    envelope. Its times are the host's monotonic clock: on a device, when work was issued. There it
    counts what was asked for, so that its peak lacks what the allocator does not split off, and it
    is empty where the allocator keeps no history; the split then takes all gradients for alive.
    """

    peak_bytes: int  # allocated to tensors
    timeline: tuple[Level, ...]
    at_peak: MemorySplit  # adds up to `peak_bytes`
    predicted_peak_bytes: int | None  # by the program; None without a timeline to learn costs from
    process_peak_bytes: int | None = None  # resident set of the process until that step (Linux)
    # Of an accelerator only:
    reserved_bytes: int | None = None  # held by the caching allocator
    active_bytes: int | None = None  # allocated, or freed while a stream still used it
    in_flight_bytes: int | None = None  # the most of the latter: messages on their way
    outside_bytes: int | None = None  # of the device used by all else: contexts, communicators


@dataclass(frozen=True)
class Owned:
    """A rank's tensors between steps, and its gradients, on its device only."""

    parameters: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()
    optimizer_state: Sequence[Tensor] = ()
    buffers: Sequence[Tensor] = ()
    held: Sequence[Tensor] = ()  # kept from step to step, but may be replaced within one


@dataclass(frozen=True)
class MemoryPlan:
    """The facts that a rank's peak is predicted from, besides the measured costs."""

    lowered: Program
    rank: int
    messages: Messages
    shared: SharedBytes = NOTHING_SHARED


def measure_memory(
    device: torch.device,
    step: Callable[[], Sequence[Span]],
    owned: Callable[[], Owned],
    plan: MemoryPlan | None = None,
) -> MemoryUse:
    """Run `step` once and report its memory; `step` returns its spans as the host issued them.

    `owned` is asked before and after; gradients must not be alive before, and all else must stay.
    Without a plan nothing is predicted. Synchronises the device before and after the step.
    """
    process_bytes = process_peak_bytes()  # of the steps before: recording takes room of its own
    gc.collect()  # a tensor that dies during the step should be the step's
    if devices.is_accelerator(device):
        # What the allocator counts before must be done: a free that waits for a stream would be
        # counted in the step.
        devices.wait_for_all(device)
        alive_bytes = devices.allocated_bytes(device)
        devices.reset_peaks(device)
        spans, allocations = record(device, step)
        devices.wait_for_all(device)
        peaks = devices.peaks_of(device)
        outside_bytes = max(0, devices.used_bytes(device) - devices.reserved_bytes(device))
        start = Level(allocations.start_ns, alive_bytes)
        known = start, allocations.changes, peaks.allocated_bytes
        return dataclasses.replace(
            use_of(*known, spans, owned(), device, plan),
            process_peak_bytes=process_bytes,
            reserved_bytes=peaks.reserved_bytes,
            active_bytes=peaks.active_bytes,
            in_flight_bytes=allocations.in_flight_bytes,
            outside_bytes=outside_bytes,
        )
    before = owned()
    stays = (before.parameters, before.gradients, before.optimizer_state, before.buffers)
    every = itertools.chain(*stays, before.held)
    alive_bytes, held = sum(storages(every, device).values()), storages(before.held, device)
    del before, stays, every  # what the step lets go of is not to be held here
    spans, allocations = record(device, step)
    if allocations.changes is None:
        raise RuntimeError("the profiler has recorded no allocations; is another one running?")
    changes = own_changes(allocations.changes, held)
    start = Level(allocations.start_ns, alive_bytes)
    peak_bytes = max(level.num_bytes for level in _levels(start, changes))
    use = use_of(start, changes, peak_bytes, spans, owned(), device, plan)
    return dataclasses.replace(use, process_peak_bytes=process_bytes)


def use_of(
    start: Level,
    changes: Sequence[MemoryChange] | None,
    peak_bytes: int,
    spans: Sequence[Span],
    owned: Owned,
    device: torch.device,
    plan: MemoryPlan | None,
) -> MemoryUse:
    """Put together the memory of a step, what is owned after it, and the plan.

    `start` is what was alive when it began; `changes` are None where no history is kept.
    """
    is_known, changes = changes is not None, changes or ()
    levels = _levels(start, changes)
    peak_at = max(range(len(levels)), key=lambda position: levels[position].num_bytes)
    last_made = {c.address: at for at, c in enumerate(changes, start=1) if c.num_bytes > 0}
    predicted = None
    if is_known and plan is not None:
        live: dict[int, MemoryChange] = {}
        blocks = []  # what was allocated, with its end; earlier allocations are not among them
        for change in changes:
            if change.num_bytes > 0:
                live[change.address] = change
            elif (made := live.pop(change.address, None)) is not None:
                blocks.append(Block(made.time_ns, change.time_ns, made.num_bytes))
        blocks += [Block(made.time_ns, None, made.num_bytes) for made in live.values()]
        start_bytes, costs = costs_of(levels, blocks, spans)
        predicted = predict_peak(
            plan.lowered, plan.rank, start_bytes, costs, plan.messages, plan.shared
        )
    seen: set[int] = set()

    def bytes_at_peak(tensors: Sequence[Tensor]) -> int:
        """Bytes of storages that were alive at the peak; what is two things counts as the first."""
        there = storages(tensors, device).items()
        alive = {at: n for at, n in there if at not in seen and last_made.get(at, 0) <= peak_at}
        seen.update(alive)
        return sum(alive.values())

    kinds = (owned.parameters, owned.gradients, owned.optimizer_state, owned.buffers)
    parameters, gradients, states, buffers = map(bytes_at_peak, kinds)
    rest = peak_bytes - (parameters + gradients + states + buffers)
    split = MemorySplit(parameters, gradients, states, buffers, rest)
    timeline = envelope(levels, MAX_LEVELS) if is_known else ()
    return MemoryUse(peak_bytes, timeline, split, predicted)


def costs_of(
    timeline: Sequence[Level], blocks: Iterable[Block], spans: Iterable[Span]
) -> tuple[int, MeasuredBytes]:
    """The costs that a rank's measured step shows, and what it had when it first computed.

    `engine.plan.memory` predicts a row's peak from them.
    `timeline` and `spans` are of one clock; `blocks` tell which memory outlives the spans.
    """
    compute = sorted((s for s in spans if s.lane is Lane.COMPUTE), key=lambda span: span.start_ns)
    chosen: dict[StageOp, list[int]] = {}  # the first two of each; of F, which are alike, the first
    for position, span in enumerate(compute):
        positions = chosen.setdefault((span.stage, span.op), [])
        if len(positions) < (1 if span.op is Op.F else 2):
            positions.append(position)
    starts = [span.start_ns for span in compute]

    def place_of(time_ns: int) -> int | None:
        at = bisect.bisect_right(starts, time_ns) - 1
        return at if at >= 0 and time_ns <= compute[at].end_ns else None

    handed = [0] * len(compute)  # bytes that each span allocated and that were freed once sent
    for block in blocks:
        at = place_of(block.start_ns)
        if at is not None and block.end_ns is not None and place_of(block.end_ns) is None:
            handed[at] += block.num_bytes

    def cost(at: int) -> ActionBytes:
        span = compute[at]
        start_bytes = _level_at(timeline, span.start_ns)
        first, stop = (_position(timeline, time_ns) for time_ns in (span.start_ns, span.end_ns))
        within = [level.num_bytes for level in itertools.islice(timeline, first, stop)]
        end_bytes = within[-1] if within else start_bytes
        rise_bytes = max([start_bytes, *within]) - start_bytes
        return ActionBytes(rise_bytes, end_bytes - start_bytes, handed[at])

    first, later = (
        {key: cost(positions[n]) for key, positions in chosen.items() if n < len(positions)}
        for n in (0, 1)
    )
    later |= {key: cost for key, cost in first.items() if key[1] is Op.F}
    return _level_at(timeline, compute[0].start_ns), MeasuredBytes(first, later)


def _level_at(timeline: Sequence[Level], time_ns: int) -> int:
    """The bytes allocated at a time; before the timeline begins, as when it does."""
    return timeline[max(0, _position(timeline, time_ns) - 1)].num_bytes


def _position(timeline: Sequence[Level], time_ns: int) -> int:
    """Return how many levels begin up to a time."""
    return bisect.bisect_right(timeline, time_ns, key=lambda level: level.time_ns)


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Bytes of the tensors' storages on a device, by address: each counts once."""
    there = (t.untyped_storage() for t in _with_memory(tensors) if t.device.type == device.type)
    return {storage.data_ptr(): storage.nbytes() for storage in there if storage.nbytes()}


def _with_memory(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, and in place of such as `DTensor`, which has no memory, what it is made of."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = (getattr(tensor, name) for name in names)  # also of its mesh
            yield from _with_memory(part for part in parts if isinstance(part, Tensor))
        else:
            yield tensor


def own_changes(
    changes: Iterable[MemoryChange], held: Mapping[int, int] | None = None
) -> list[MemoryChange]:
    """Without the frees of what was there before: the CPU's profiler does not know their size.

    They are not of what a rank owns, which stays, unless it is among what it `held`: bytes by
    address.
    """
    live: set[int] = set()
    known = dict(held or {})
    kept = []
    for change in changes:
        if change.num_bytes > 0:
            live.add(change.address)
            kept.append(change)
        elif change.address in live:
            live.remove(change.address)
            kept.append(change)
        elif change.address in known:
            kept.append(change._replace(num_bytes=-known.pop(change.address)))
    return kept


def envelope(levels: Sequence[Level], max_levels: int) -> tuple[Level, ...]:
    """At most so many levels: the first, and the lowest and highest of equal times, in order.

    A highest one that is met again is kept where it is first.
    """
    if len(levels) <= max_levels:
        return tuple(levels)
    num_buckets = (max_levels - 1) // 2
    start_ns, duration_ns = levels[0].time_ns, levels[-1].time_ns + 1 - levels[0].time_ns
    kept = {0}
    buckets = itertools.groupby(
        range(len(levels)),
        key=lambda at: (levels[at].time_ns - start_ns) * num_buckets // duration_ns,
    )
    for _, positions in buckets:
        bucket = list(positions)
        kept |= {choose(bucket, key=lambda at: levels[at].num_bytes) for choose in (min, max)}
    return tuple(levels[position] for position in sorted(kept))


def _levels(start: Level, changes: Iterable[MemoryChange]) -> list[Level]:
    levels = [start]
    for change in changes:
        levels.append(Level(change.time_ns, levels[-1].num_bytes + change.num_bytes))
    return levels


def process_peak_bytes() -> int | None:
    """The process's resident high-water mark since the last reset; None where unknown."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def reset_process_peak() -> None:
    """Make the high-water mark start again from now, where Linux allows it."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")
