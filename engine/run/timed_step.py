"""What was timed of a step: marks that are read when the device is done with them.

The marks of a step leave what ran it at once, so that the next step can be run before they are
read. On an accelerator that wait would empty the device between any two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.action import Action
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark

TimedAction = tuple[Action, Mark, Mark, int]
"""An action, its start and end, and the bytes that it moved."""


@dataclass(frozen=True)
class TimedStep:
    """The marks of one rank's step."""

    step: int
    rank: int
    replica: int
    actions: list[TimedAction]  # empty where the step was run without spans

    def read(self, clock: Clock) -> tuple[list[Span], frozenset[Action]]:
        """The spans, and the receives that had arrived when the rank asked for them, if known.

        Called after the clock's `end` and before its next `begin`.
        """
        spans = []
        for (stage, op, microbatch), start, end, num_bytes in self.actions:
            what = lane_of(op), stage, op, microbatch
            times = clock.read_ns(start), clock.read_ns(end)
            spans.append(Span(self.step, self.rank, *what, *times, num_bytes, self.replica))
        return spans, frozenset()
