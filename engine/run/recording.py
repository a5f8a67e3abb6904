"""Names what a step records of itself while it trains.

It is a value that is handed to each step and not a setting of the trainer: steps with and without
recording can then alternate in one process, which is how the cost of recording is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Recording:
    """The records that a step makes. Without spans no mark is taken and no transfer is timed."""

    has_spans: bool = True
    has_flight: bool = True  # each action is noted in the flight record, where the rank keeps one
    has_ranges: bool = False  # each action is a range in torch's profiler: "2F0", "0SEND_F3", "OPT"

    spans: ClassVar[Recording]
    flight_only: ClassVar[Recording]
    off: ClassVar[Recording]
    profiler_ranges: ClassVar[Recording]


Recording.spans = Recording()
Recording.flight_only = Recording(has_spans=False)
Recording.off = Recording(has_spans=False, has_flight=False)
Recording.profiler_ranges = Recording(has_spans=False, has_ranges=True)
