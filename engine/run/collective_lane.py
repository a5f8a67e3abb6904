"""The lane on which a rank does what it does together with the same rank of other replicas.

The executor begins a collective and goes on; the lane does them one after the other, in the order
in which they were begun, while the rank computes:

    rank    0UNSHARD 2UNSHARD  0F0 ........ 2F0 ...
    lane    [0UNSHARD---------][2UNSHARD-----]

On the host a thread does them. On an accelerator it is a stream: nothing waits but the streams.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from engine.flight import NO_FLIGHT, Flight
from engine.plan.action import Action
from engine.run import device as devices
from engine.run.clock import Clock, HostClock
from engine.run.events import EventPool
from engine.run.p2p.channel import Transfer, TransferError

Work = Callable[[], None]


class CollectiveError(TransferError):
    """A collective has failed: another replica died, or did not come in time."""

    def __init__(self, rank: int, replica: int, action: Action | None, reason: str) -> None:
        what = "a collective" if action is None else str(action)
        super().__init__(f"{what} of rank {rank}, replica {replica}: {reason}")
        self.rank, self.replica, self.action, self.reason = rank, replica, action, reason

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[int, int, Action | None, str]]:
        """Keep the fields when the error is sent to other ranks."""
        return type(self), (self.rank, self.replica, self.action, self.reason)


class Collectives(Protocol):
    """What the executor asks for where its program has collectives."""

    lane: CollectiveLane

    def begin(self, action: Action) -> None:
        """Put an UNSHARD or REDUCE_GRAD on the lane, or do a RESHARD. Never blocks."""

    def wait_for(self, stage: int) -> None:
        """Block until the stage's UNSHARD is done; of an accelerator only the compute stream."""

    def finish_step(self) -> list[Transfer]:
        """Wait as `wait_for` does for all; returns the timed ones. Raises CollectiveError."""

    def close(self) -> None:
        """End the lane, if it has not ended; it is not used again."""


@dataclass
class Job:
    """A collective on the lane, or work of no action beside them."""

    action: Action | None
    transfer: Transfer | None  # None where it is not timed
    work: Work | None  # with the tensors that it needs
    done: threading.Event = field(default_factory=threading.Event)
    event: torch.Event | None = None  # when it is done, on a stream


class CollectiveLane(Protocol):
    """Does jobs in the order in which they are issued."""

    is_timed: bool  # whether collectives are timed; set between steps
    waiting: list[int]
    """At each issue, how many jobs before it still kept their tensors, until it is cleared."""

    def issue(self, action: Action | None, work: Work, num_bytes: int = 0) -> Job:
        """Do work when all before it is done. Never blocks. Without an action it is not timed."""

    def wait(self, job: Job) -> None:
        """Wait for a job and all before it. Raises CollectiveError."""

    def finish(self) -> list[Transfer]:
        """Wait for all jobs and forget them; returns what was timed. Raises CollectiveError."""

    def close(self) -> None:
        """End it, if it has not ended; it is not used again."""


class HostLane:
    """A thread, which waits for what moves through the host."""

    def __init__(self, rank: int, replica: int, flight: Flight = NO_FLIGHT) -> None:
        self._rank, self._replica, self._flight = rank, replica, flight
        self._clock, self.is_timed = HostClock(), True
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._issued: list[Job] = []
        self.waiting: list[int] = []
        self._error: CollectiveError | None = None
        self._thread = threading.Thread(target=self._do_in_order, daemon=True)
        self._thread.start()

    def issue(self, action: Action | None, work: Work, num_bytes: int = 0) -> Job:
        self.waiting.append(self._let_go_of_done())
        transfer = Transfer(action, num_bytes, 0) if action is not None and self.is_timed else None
        job = Job(action, transfer, work)
        self._issued.append(job)
        self._jobs.put(job)
        return job

    def wait(self, job: Job) -> None:
        job.done.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> list[Transfer]:
        if not self._issued:
            return []
        self.wait(self._issued[-1])
        self._let_go_of_done()
        finished, self._issued = self._issued, []
        return [job.transfer for job in finished if job.transfer is not None]

    def close(self) -> None:
        """Does not wait for a job that hangs: the thread dies with the process."""
        self._jobs.put(None)

    def _let_go_of_done(self) -> int:
        """Drop the tensors of jobs on the rank's own thread, where the profiler counts frees.

        Returns how many jobs keep theirs.
        """
        num_waiting = 0
        for job in reversed(self._issued):
            if job.work is None:
                break
            if job.done.is_set():
                job.work = None
            else:
                num_waiting += 1
        return num_waiting

    def _do_in_order(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                self._flight.join(job.action)
                start = self._clock.mark()
                try:
                    assert job.work is not None
                    job.work()
                except Exception as error:  # raised again by the rank's own thread
                    lost = self._rank, self._replica, job.action, str(error)
                    self._error = CollectiveError(*lost)
                else:
                    if job.transfer is not None:
                        job.transfer.start, job.transfer.end = start, self._clock.mark()
                    self._flight.join(None)
            job.done.set()


class StreamLane:
    """A stream of the device, for collectives of its own backend.

    Tensors of a job are kept until the compute stream has waited for it, so that their memory is
    not given away before.
    """

    def __init__(self, device: torch.device, clock: Clock, stream: torch.Stream) -> None:
        self._device, self._clock, self._stream = device, clock, stream
        self._events = EventPool(functools.partial(devices.order_event, device))
        self._issued: list[Job] = []
        self.waiting: list[int] = []
        self.is_timed = True

    def issue(self, action: Action | None, work: Work, num_bytes: int = 0) -> Job:
        self._stream.wait_stream(devices.current_stream(self._device))
        with self._stream:
            transfer = None
            if action is not None and self.is_timed:
                transfer = Transfer(action, num_bytes, self._clock.mark())
            work()
            if transfer is not None:
                transfer.end = self._clock.mark()
            event = self._events.take()
            event.record()
        job = Job(action, transfer, work, event=event)
        self.waiting.append(len(self._issued))
        self._issued.append(job)
        return job

    def wait(self, job: Job) -> None:
        if job.event is None:  # all streams have waited for it at the end of a step
            return
        devices.current_stream(self._device).wait_event(job.event)

    def finish(self) -> list[Transfer]:
        devices.current_stream(self._device).wait_stream(self._stream)
        finished, self._issued = self._issued, []
        for job in finished:
            assert job.event is not None
            self._events.give_back(job.event)
            job.event = None
        return [job.transfer for job in finished if job.transfer is not None]

    def close(self) -> None:
        """A stream needs no end."""
