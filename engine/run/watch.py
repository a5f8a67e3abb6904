"""What a step records of itself, beside training.

A value that is handed to each step, not a setting of the trainer: steps with and without can then
alternate in one process, which is how the cost of recording is measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watch:
    """What to record. Where spans are off, no mark is taken and no transfer is written down."""

    has_spans: bool = True
    has_flight: bool = True  # each action is noted in the flight record, where the rank keeps one
    has_ranges: bool = False  # each action is a range in torch's profiler: "2F0", "0SEND_F3", "OPT"


SPANS = Watch()
NOTHING = Watch(has_spans=False)
BARE = Watch(has_spans=False, has_flight=False)
RANGES = Watch(has_spans=False, has_ranges=True)
