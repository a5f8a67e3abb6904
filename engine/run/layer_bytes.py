"""Bytes of lone stages, cut out of a recording of their allocations.

    whole    |  F  | send |  B  | send            split    |  F  | send |  I  | send |  W  |
             +--------------------------- points: ---------+-----------------------------+

At each point a few allocations of one odd size are recorded. Times would not do: the recording's
clock and the host's differ by more than the time between two actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.run.allocations import record
from engine.run.lone_stage import LoneStage
from engine.run.memory import own_changes

_POINT_BYTES = 41 * 512
_POINT = 2 * [_POINT_BYTES, -_POINT_BYTES]
_POINTS_OF_PART = 10


class PartBytes(NamedTuple):
    """Bytes that a part holds for one microbatch, and for all; see `engine.plan.model_costs`."""

    held_after_forward: int
    held_after_input: int
    transient: int
    static: int


class _Segment(NamedTuple):
    """The bytes between two points: by how much they rise at most, and in the end."""

    rise: int
    net: int


def measure_bytes(parts: Sequence[LoneStage], device: torch.device) -> list[PartBytes]:
    """Bytes of parts that have run a whole and a split microbatch before, and an update.

    Raises RuntimeError where the device's allocator keeps no history.
    """

    def walk() -> None:
        """Run each part's microbatches, with a point before each action and message."""
        for part in parts:
            for is_split in (False, True):
                part.use(is_split=is_split)
                _mark(device)
                part.prepare_forward()
                part.forward()
                _mark(device)
                part.send()
                _mark(device)
                part.prepare_backward()
                (part.backward_input if is_split else part.backward)()
                _mark(device)
                part.send()
            _mark(device)
            part.backward_weight()
            _mark(device)

    _, recording = record(device, walk)
    sizes = [change.num_bytes for change in own_changes(recording.changes or ())]
    between: list[list[int]] = [[]]  # before the first point, between each two, after the last
    at = 0
    while at < len(sizes):
        if sizes[at : at + len(_POINT)] == _POINT:
            between.append([])
            at += len(_POINT)
        else:
            between[-1].append(sizes[at])
            at += 1
    segments = [_Segment(max(itertools.accumulate(b, initial=0)), sum(b)) for b in between]
    if len(segments) != _POINTS_OF_PART * len(parts) + 1:
        raise RuntimeError(
            f"{device}: the bytes of layers cannot be measured, since their allocations were not "
            "recorded completely; use the native allocator (unset PYTORCH_CUDA_ALLOC_CONF) and run "
            "no other profiler"
        )
    sizes_of_parts = []
    for start, part in zip(range(1, len(segments), _POINTS_OF_PART), parts, strict=True):
        forward, sent, backward, _, split_forward, split_sent, split_input, input_sent, weight = (
            segments[start : start + _POINTS_OF_PART - 1]
        )
        of_whole = forward.net + sent.net
        of_split = split_forward.net + split_sent.net
        held = max(0, of_whole, of_split)
        after_input = max(0, of_split + split_input.net + input_sent.net)
        above = (
            forward.rise - held,
            split_forward.rise - held,
            of_whole + backward.rise - held,
            of_split + split_input.rise - held,
            weight.rise,
        )
        sizes_of_parts.append(PartBytes(held, after_input, max(0, *above), part.static_bytes))
    return sizes_of_parts


def _mark(device: torch.device) -> None:
    for _ in range(len(_POINT) // 2):
        torch.empty(_POINT_BYTES, dtype=torch.uint8, device=device)
