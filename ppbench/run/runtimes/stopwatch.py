"""Marks around work, and the spans that they make: for runners that are not the executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar, TypeVarTuple

from torch.profiler import record_function

from engine.flight import Flight, Phase
from engine.plan.action import Action, Op
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark
from engine.run.watch import SPANS, Watch

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Stopwatch:
    """Does a rank's work as actions, each with a span where spans are asked for."""

    def __init__(self, rank: int, clock: Clock, flight: Flight) -> None:
        self.clock, self.watch = clock, SPANS
        self._rank, self._flight = rank, flight
        self._timed: list[tuple[Action, Mark, Mark]] = []

    def enter(self, phase: Phase) -> None:
        self._flight.enter(phase)

    def begin(self, step: int, watch: Watch) -> None:
        """What follows is of a step. With spans, the caller has begun the clock's."""
        self.watch = watch
        self._timed.clear()
        if watch.has_flight:
            self._flight.begin_step(step)
            self._flight.enter(Phase.RUNS)

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work: with a span where there are spans, a range where there are ranges.

        The flight record is not told: it names actions by their place in the engine's program.
        """
        start = self.clock.mark() if self.watch.has_spans else 0
        with self._range_of(action):
            result = work(*arguments)
        if self.watch.has_spans:
            self._timed.append((action, start, self.clock.mark()))
        return result

    def _range_of(self, action: Action) -> contextlib.AbstractContextManager[object]:
        if not self.watch.has_ranges:
            return contextlib.nullcontext()
        return record_function(action.op.value if action.op is Op.OPT else str(action))

    @contextlib.contextmanager
    def timed_by(self, clock: Clock) -> Iterator[None]:
        """Meanwhile this clock gives the marks."""
        usual, self.clock = self.clock, clock
        try:
            yield
        finally:
            self.clock = usual

    def spans(self, step: int) -> list[Span]:
        """Of what was done since the step began; the clock's step has been ended."""
        return [self._span(step, *one) for one in self._timed]

    def _span(self, step: int, action: Action, start: Mark, end: Mark) -> Span:
        stage, op, microbatch = action
        times = self.clock.read_ns(start), self.clock.read_ns(end)
        return Span(step, self._rank, lane_of(op), stage, op, microbatch, *times, 0)
