"""Marks around work, and the spans and the flight record that they make: for runners that are not
the executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, TypeVarTuple

from torch.profiler import record_function

from engine.flight import NO_FLIGHT, Flight, Phase
from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark
from engine.run.watch import SPANS, Watch

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Stopwatch:
    """Does a rank's work as actions, each with a span where spans are asked for.

    The flight record is told of computations alone: when the rank has come to one, that is, to the
    wait for its input, and when it works on it. Where transfers are issued is the runner's affair.
    """

    def __init__(self, rank: int, clock: Clock, flight: Flight, row: Sequence[Action]) -> None:
        """`row`: this rank's of the case's lowered program, whose computations it keeps to."""
        self.clock, self.watch = clock, SPANS
        self._rank, self._record = rank, flight
        self._flight: Flight = NO_FLIGHT
        self._computations = [n for n, action in enumerate(row) if action.op in COMPUTE_OPS]
        self._ahead = iter(self._computations)
        self._timed: list[tuple[Action, Mark, Mark]] = []

    def enter(self, phase: Phase) -> None:
        self._record.enter(phase)

    def begin(self, step: int, watch: Watch) -> None:
        """What follows is of a step. With spans, the caller has begun the clock's."""
        self.watch = watch
        self._timed.clear()
        self._flight = self._record if watch.has_flight else NO_FLIGHT
        self._flight.begin_step(step)
        self._ahead = iter(self._computations)
        self.come_to_next()

    def come_to_next(self) -> None:
        """Note that the rank has come to the next computation of its row, or to its end."""
        index = next(self._ahead, None)
        if index is None:
            self._flight.enter(Phase.DRAINS)
        else:
            self._flight.come_to(index)

    def work(self) -> None:
        """Note that what the rank has come to has its input."""
        self._flight.work()

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work: with a span where spans are asked for, and a range likewise."""
        self.work()
        start = self.clock.mark() if self.watch.has_spans else 0
        with self._range_of(action):
            result = work(*arguments)
        if self.watch.has_spans:
            self._timed.append((action, start, self.clock.mark()))
        if action.op in COMPUTE_OPS:
            self.come_to_next()
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
