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

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine.plan.footprint import Messages, predict_peak, there_before_computing
from engine.plan.program import Program
from engine.plan.sharded_bytes import NOTHING_SHARED, Shared
from engine.plan.spans import Span
from engine.run import device as devices
from engine.run.action_costs import Block, Level, costs_of
from engine.run.allocations import Change, record

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

MAX_LEVELS = 2000
"""A longer timeline is kept as its envelope."""


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
    reserved_bytes: int | None  # held by the caching allocator, as the next three of a device only
    process_peak_bytes: int | None  # resident set of the process until that step (Linux)
    timeline: tuple[Level, ...]
    at_peak: MemorySplit  # adds up to `peak_bytes`
    predicted_peak_bytes: int | None  # by the program; None without a timeline to learn costs from
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
class Plan:
    """The facts that a rank's peak is predicted from, besides the measured costs."""

    lowered: Program
    rank: int
    messages: Messages
    shared: Shared = NOTHING_SHARED


@dataclass(frozen=True)
class Account:
    """A device's memory during a step."""

    alive: Level  # when it began
    changes: Sequence[Change] | None  # None where no history is kept
    peak_bytes: int
    reserved_bytes: int | None
    active_bytes: int | None = None
    in_flight_bytes: int | None = None
    outside_bytes: int | None = None


def measure_memory(
    device: torch.device,
    step: Callable[[], Sequence[Span]],
    owned: Callable[[], Owned],
    plan: Plan | None = None,
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
        spans, recording = record(device, step)
        devices.wait_for_all(device)
        peaks = devices.peaks_of(device)
        account = Account(
            Level(recording.start_ns, alive_bytes),
            recording.changes,
            peaks.allocated_bytes,
            peaks.reserved_bytes,
            peaks.active_bytes,
            recording.in_flight_bytes,
            max(0, devices.used_bytes(device) - devices.reserved_bytes(device)),
        )
        return use_of(account, spans, owned(), device, plan, process_bytes)
    before = owned()
    stays = (before.parameters, before.gradients, before.optimizer_state, before.buffers)
    every = itertools.chain(*stays, before.held)
    alive_bytes, held = sum(storages(every, device).values()), storages(before.held, device)
    del before, stays, every  # what the step lets go of is not to be held here
    spans, recording = record(device, step)
    if recording.changes is None:
        raise RuntimeError("the profiler has recorded no allocations; is another one running?")
    changes = own_changes(recording.changes, held)
    start = Level(recording.start_ns, alive_bytes)
    peak_bytes = max(level.num_bytes for level in _levels(start, changes))
    account = Account(start, changes, peak_bytes, None)
    return use_of(account, spans, owned(), device, plan, process_bytes)


def use_of(
    account: Account,
    spans: Sequence[Span],
    owned: Owned,
    device: torch.device,
    plan: Plan | None,
    process_bytes: int | None = None,
) -> MemoryUse:
    """Put together what the device tells, what is owned after the step, and the plan."""
    changes = account.changes or ()
    levels = _levels(account.alive, changes)
    peak_at = max(range(len(levels)), key=lambda position: levels[position].num_bytes)
    is_known = account.changes is not None
    last_made = {c.address: at for at, c in enumerate(changes, start=1) if c.num_bytes > 0}
    predicted = None
    if is_known and plan is not None:
        start_bytes, costs = costs_of(levels, _blocks(changes), spans)
        lowered, rank, messages, shared = plan.lowered, plan.rank, plan.messages, plan.shared
        start_bytes -= there_before_computing(lowered, rank, messages, shared)
        predicted = predict_peak(lowered, rank, start_bytes, costs, messages, shared)
    return MemoryUse(
        account.peak_bytes,
        account.reserved_bytes,
        process_bytes,
        envelope(levels, MAX_LEVELS) if is_known else (),
        _split(account.peak_bytes, owned, device, lambda made: last_made.get(made, 0) <= peak_at),
        predicted,
        account.active_bytes,
        account.in_flight_bytes,
        account.outside_bytes,
    )


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


def own_changes(changes: Iterable[Change], held: Mapping[int, int] | None = None) -> list[Change]:
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


def _levels(start: Level, changes: Iterable[Change]) -> list[Level]:
    levels = [start]
    for change in changes:
        levels.append(Level(change.time_ns, levels[-1].num_bytes + change.num_bytes))
    return levels


def _split(
    peak_bytes: int, owned: Owned, device: torch.device, was_alive: Callable[[int], bool]
) -> MemorySplit:
    """The peak by what it is for; a storage that is two things counts as the first."""
    seen: set[int] = set()

    def new_bytes(tensors: Sequence[Tensor]) -> int:
        there = storages(tensors, device).items()
        new = {address: n for address, n in there if address not in seen and was_alive(address)}
        seen.update(new)
        return sum(new.values())

    kinds = (owned.parameters, owned.gradients, owned.optimizer_state, owned.buffers)
    parameters, gradients, state, buffers = map(new_bytes, kinds)
    rest = peak_bytes - parameters - gradients - state - buffers
    return MemorySplit(parameters, gradients, state, buffers, rest)


def _blocks(changes: Iterable[Change]) -> list[Block]:
    """Return what was allocated, with its end. Earlier allocations are not among them."""
    live: dict[int, Change] = {}
    blocks = []
    for change in changes:
        if change.num_bytes > 0:
            live[change.address] = change
        elif (made := live.pop(change.address, None)) is not None:
            blocks.append(Block(made.time_ns, change.time_ns, made.num_bytes))
    return blocks + [Block(made.time_ns, None, made.num_bytes) for made in live.values()]


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
