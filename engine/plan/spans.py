"""The common currency of planned and measured time: one timed action.

A tuple, not an object with behaviour: a run holds many thousands, and pandas and parquet take the
tuples as columns.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, SEND_OPS, Op


class Lane(StrEnum):
    """Where a span lives on its rank; spans of one lane of one rank and channel do not overlap."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"


class Span(NamedTuple):
    """A timed action. Times are nanoseconds on one clock shared by all ranks of the step.

    A collective lasts from when its rank could begin it to its end, with the wait for the other
    replicas.
    """

    step: int
    rank: int
    lane: Lane
    stage: int
    op: Op
    microbatch: int
    start_ns: int
    end_ns: int
    num_bytes: int  # bytes moved by a transfer or a collective, 0 for compute
    replica: int = 0  # of the pipeline; `rank` is that within it


COLUMNS = Span._fields


def lane_of(op: Op) -> Lane:
    if op in COMPUTE_OPS or op is Op.OPT:
        return Lane.COMPUTE
    if op in COLLECTIVE_OPS:
        return Lane.COLLECTIVE
    return Lane.SEND if op in SEND_OPS else Lane.RECV
