"""What runs a rank's microbatches, and records its actions: spans, notes, ranges of a profile.

The marks of a step leave what ran it at once, so that the next step can be run before they are
read. On an accelerator that wait would empty the device between any two steps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from torch import Tensor
from torch.profiler import record_function

from engine.flight import NO_FLIGHT, Flight, Phase
from engine.model.data import StepBatch
from engine.plan.action import Action, Op
from engine.plan.memory import Messages
from engine.plan.program import Program
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark
from engine.run.recording import Recording

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

TimedAction = tuple[Action, Mark, Mark, int]
"""An action, its start and end, and the bytes that it moved."""


@dataclass(frozen=True)
class StepMarks:
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


class Runner(ABC):
    """Runs a step's microbatches forward and backward on this rank: the executor, or others.

    It leaves the gradients of the step's mean loss per token in `.grad` of the trainer's modules.
    """

    messages: Messages | None = None
    """Who holds messages, and how long; None where no memory is predicted."""
    peak_held = 0
    """The most microbatches whose activations this rank has held at once, in any step."""

    def __init__(self, rank: int, replica: int, clock: Clock, flight: Flight) -> None:
        self.clock, self.recording = clock, Recording.spans
        self._rank, self._replica = rank, replica
        self._record = self._flight = flight
        self._timed: list[TimedAction] = []

    @property
    @abstractmethod
    def lowered(self) -> Program:
        """The program of all ranks, with transfers; known after the first step."""

    @abstractmethod
    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        """One step; returns its mean loss per token (a scalar) where the last stage is.

        `batch` is on the stages' device. Does not wait for the device.
        """

    def held_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that it keeps from step to step and may let go of within one."""
        return ()

    def close(self) -> None:  # noqa: B027  # some hold nothing
        """Give back what it holds; it is not used again."""

    def enter(self, phase: Phase) -> None:
        """Note what the rank comes to beside its actions."""
        self._flight.enter(phase)

    def begin(self, step: int, recording: Recording) -> None:
        """Begin a step. With spans, the clock has been begun as well."""
        self.recording, self._timed = recording, []
        self._flight = self._record if recording.has_flight else NO_FLIGHT
        self._flight.begin_step(step)

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work, with a span of its own where there are spans.

        What a step does beside its microbatches, such as the optimizer, is done so after it.
        """
        self._flight.work()
        if not self.recording.has_spans:
            return self._in_range(action, work, *arguments)
        start = self.clock.mark()
        result = self._in_range(action, work, *arguments)
        self._timed.append((action, start, self.clock.mark(), 0))
        return result

    def _in_range(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work, named in a profile where there are ranges."""
        if not self.recording.has_ranges:
            return work(*arguments)
        with record_function(action.op.value if action.op is Op.OPT else str(action)):
            return work(*arguments)

    @contextlib.contextmanager
    def timed_by(self, clock: Clock) -> Iterator[None]:
        """Meanwhile this clock times the actions; channels keep theirs."""
        usual, self.clock = self.clock, clock
        try:
            yield
        finally:
            self.clock = usual

    def end_step(self, step: int) -> StepMarks:
        """Hand over what was timed since the step began. Does not wait for the device."""
        self._flight.enter(Phase.DRAINS)
        timed, self._timed = self._timed, []
        return StepMarks(step, self._rank, self._replica, timed)
