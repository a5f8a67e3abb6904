"""What single actions cost in bytes, cut out of a step that was measured.

See `engine.plan.footprint`, which predicts a row's peak from them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.plan.action import Op
from engine.plan.footprint import Cost, Costs, StageOp
from engine.plan.spans import Lane, Span


class Level(NamedTuple):
    """From `time_ns` on, `num_bytes` are allocated."""

    time_ns: int
    num_bytes: int


class Block(NamedTuple):
    """Memory that was allocated during a step; `end_ns` None where it outlived the step."""

    start_ns: int
    end_ns: int | None
    num_bytes: int


def costs_of(
    timeline: Sequence[Level], blocks: Iterable[Block], spans: Iterable[Span]
) -> tuple[int, Costs]:
    """The costs that a rank's measured step shows, and what it had when it first computed.

    `timeline` and `spans` are of one clock; `blocks` tell which memory outlives the spans.
    """
    compute = sorted((s for s in spans if s.lane is Lane.COMPUTE), key=lambda span: span.start_ns)
    chosen: dict[StageOp, list[int]] = {}  # the first two of each; of F, which are alike, the first
    for position, span in enumerate(compute):
        positions = chosen.setdefault((span.stage, span.op), [])
        if len(positions) < (1 if span.op is Op.F else 2):
            positions.append(position)
    starts = [span.start_ns for span in compute]

    def position(time_ns: int) -> int | None:
        at = bisect.bisect_right(starts, time_ns) - 1
        return at if at >= 0 and time_ns <= compute[at].end_ns else None

    handed = [0] * len(compute)  # bytes that each span allocated and that were freed once sent
    for block in blocks:
        at = position(block.start_ns)
        if at is not None and block.end_ns is not None and position(block.end_ns) is None:
            handed[at] += block.num_bytes

    def cost(at: int) -> Cost:
        span = compute[at]
        start_bytes = _level_at(timeline, span.start_ns)
        first, stop = (_position(timeline, time_ns) for time_ns in (span.start_ns, span.end_ns))
        within = [level.num_bytes for level in itertools.islice(timeline, first, stop)]
        end_bytes = within[-1] if within else start_bytes
        return Cost(max([start_bytes, *within]) - start_bytes, end_bytes - start_bytes, handed[at])

    first, later = (
        {key: cost(positions[n]) for key, positions in chosen.items() if n < len(positions)}
        for n in (0, 1)
    )
    later |= {key: cost for key, cost in first.items() if key[1] is Op.F}
    return _level_at(timeline, compute[0].start_ns), Costs(first, later)


def _level_at(timeline: Sequence[Level], time_ns: int) -> int:
    """The bytes allocated at a time; before the timeline begins, as when it does."""
    return timeline[max(0, _position(timeline, time_ns) - 1)].num_bytes


def _position(timeline: Sequence[Level], time_ns: int) -> int:
    """Return how many levels begin up to a time."""
    return bisect.bisect_right(timeline, time_ns, key=lambda level: level.time_ns)
