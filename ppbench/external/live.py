"""A live curve of a training: what one step in every so many shows, for a board of metrics.

    schedule.step(100)       recorded; each rank has its computing, its waiting, its peak
    schedule.step(101)       each rank posts them to the job's store; nobody waits
    schedule.step(102), ...  rank 0 hands them on in the first step that finds all of them there

A rank's window reaches from the begin of its first action to the end of its last one; the longest
window of the ranks stands for the step. No clock is aligned for that. The period is measured over
the steps in between, which the curve does not record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.plan.action import COMPUTE_OPS, RECV_OPS, Op
from engine.plan.spans import Span
from ppbench.errors import UsageError
from ppbench.external.members import Members
from ppbench.run.runtimes.torch_spans import RecordedStep

PREFIX = "pipeline/"
"""Begins the names of the metrics on a board."""

Metrics = Mapping[str, float]
Callback = Callable[[int, Metrics], object]


def callback_of(to: Any) -> Callback:
    """What is called with each step's number and metrics: `to` itself, or a board's method.

    `to` is a callable, a `SummaryWriter` of TensorBoard or a run of W&B. Raises UsageError.
    """
    if hasattr(to, "add_scalar"):

        def add(step: int, metrics: Metrics) -> None:
            for name, value in metrics.items():
                to.add_scalar(PREFIX + name, value, step)

        return add
    if hasattr(to, "log") and not isinstance(to, type):
        return lambda step, metrics: to.log(
            {PREFIX + name: value for name, value in metrics.items()}, step=step
        )
    if callable(to):
        callback: Callback = to
        return callback
    raise UsageError(
        f"to={type(to).__name__}: expected a SummaryWriter of TensorBoard, a run of W&B, or a "
        "function of a step and its metrics"
    )


class LiveCurve:
    """One rank's part of the curve. Nothing in it waits for another rank."""

    def __init__(
        self, every: int, callback: Callback | None, members: Members, tokens: int | None
    ) -> None:
        """`callback` is needed on rank 0 alone; `tokens` are those of a step, if they are known."""
        self.every, self._callback, self._members, self._tokens = every, callback, members, tokens
        self._began_s: float | None = None  # the first step since the last recorded one
        self._num_between, self._period_s = 0, 0.0  # steps since then, and their mean period
        self._recorded: dict[str, float] | None = None  # of this rank, to be posted
        self._step = 0  # that is recorded, or awaited
        self._is_awaiting = False

    def begins(self, number: int) -> bool:
        """Note that a step begins; return whether it is to be recorded."""
        now_s = time.monotonic()
        is_due = number > 0 and number % self.every == 0
        if self._recorded is not None:
            self._members.post(f"step {self._step}", json.dumps(self._recorded))
            self._recorded, self._is_awaiting = None, self._members.rank == 0
        if self._is_awaiting and self._callback is not None:
            self._hand_on(self._callback)
        if self._began_s is None:
            self._began_s, self._num_between = now_s, 0
        if is_due:
            self._period_s = (now_s - self._began_s) / self._num_between
            self._began_s = None
        self._num_between += 1
        return is_due

    def ended(self, number: int, recorded: RecordedStep, spans: Iterable[Span]) -> None:
        """Take the recorded step of this rank."""
        times = [(span.op, span.start_ns, span.end_ns) for span in spans]
        begin, end = min(start for _, start, _ in times), max(end for _, _, end in times)
        self._step, self._recorded = (
            number,
            {
                "period_s": self._period_s,
                "window_ns": end - begin,
                "compute_ns": sum(end - start for op, start, end in times if op in COMPUTE_OPS),
                "waiting_ns": waiting(times),
                "in_flight_peak": recorded.peak_held,
            },
        )

    def _hand_on(self, callback: Callback) -> None:
        """Hand the awaited step on if every rank has posted its part."""
        texts = self._members.posted(f"step {self._step}")
        if texts is None:
            return
        self._is_awaiting = False
        callback(self._step, joined([json.loads(text) for text in texts], self._tokens))


def waiting(times: Iterable[tuple[Op, int, int]]) -> int:
    """How long a rank receives, or waits for it, and does not compute at that time."""
    changes = []  # of how many receives, and how many computations, go on
    for op, start, end in times:
        kind = (op in RECV_OPS, op in COMPUTE_OPS)
        changes += [(start, *map(int, kind)), (end, *(-int(each) for each in kind))]
    total, receives, computes, before = 0, 0, 0, 0
    for time_ns, more_receives, more_computes in sorted(changes):
        if receives and not computes:
            total += time_ns - before
        receives, computes, before = receives + more_receives, computes + more_computes, time_ns
    return total


def joined(ranks: list[dict[str, float]], tokens: int | None = None) -> dict[str, float]:
    """The metrics of a step, of what each rank has seen of it.

    `bubble_fraction` is the share of the ranks' time in which they do not compute, and
    `waiting_fraction` the part of it in which they receive, or wait for it. `in_flight_peak` counts
    the microbatches of the rank with most of them.
    """
    time_ns = len(ranks) * max(rank["window_ns"] for rank in ranks)
    period_s = sum(rank["period_s"] for rank in ranks) / len(ranks)
    metrics = {
        "period_s": period_s,
        "bubble_fraction": 1 - sum(rank["compute_ns"] for rank in ranks) / time_ns,
        "waiting_fraction": sum(rank["waiting_ns"] for rank in ranks) / time_ns,
        "in_flight_peak": max(rank["in_flight_peak"] for rank in ranks),
    }
    return metrics if tokens is None else {**metrics, "tokens_per_s": tokens / period_s}
