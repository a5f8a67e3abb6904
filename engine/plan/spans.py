"""The common currency of planned and measured time: one timed action.

A tuple, not an object with behaviour: a run holds many thousands, and pandas and parquet take the
tuples as columns.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, SEND_OPS, Op


class Lane(StrEnum):
    """Where a span lives on its rank; spans of one lane of one rank and channel do not overlap."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"


class Span(NamedTuple):
    """A timed action. Times are nanoseconds on one clock shared by all ranks of the step."""

    step: int
    rank: int
    lane: Lane
    stage: int
    op: Op
    microbatch: int
    start_ns: int
    end_ns: int
    num_bytes: int  # bytes moved by a transfer, 0 for compute


COLUMNS = Span._fields


def lane_of(op: Op) -> Lane:
    if op in COMPUTE_OPS or op is Op.OPT:
        return Lane.COMPUTE
    return Lane.SEND if op in SEND_OPS else Lane.RECV
