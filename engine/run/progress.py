"""Notes in the flight record what the device has come to, not what was issued to it.

The host issues actions long before the device does them. When a step hangs, what tells why is where
the device stands. So each note waits for an event on the stream of computations, and is made when
that is done; a thread looks every few milliseconds, and the rank itself between steps:

    host      comes to 0F0, works, comes to 0F1, works, ...   each with an event
    device    [waits for its input][0F0.....
    record    came to 0F0

A time in the record is when it was looked, up to `INTERVAL_S` after the device.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable

import torch

from engine.flight import Flight, Phase
from engine.plan.action import Action
from engine.run import device as devices
from engine.run.events import EventPool

INTERVAL_S = 0.01

Note = Callable[[], None]


class DeviceProgress:
    """A flight record that is written as the device gets on."""

    def __init__(self, flight: Flight, device: torch.device) -> None:
        """Nothing looks by itself before `watch`."""
        self._flight, self._device = flight, device
        self._events = EventPool(functools.partial(devices.order_event, device))
        self._notes: deque[tuple[torch.Event | None, Note]] = deque()
        self._has_issued = False  # computations since the last event
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_step(self, step: int) -> None:
        self._put(functools.partial(self._flight.begin_step, step))

    def come_to(self, index: int) -> None:
        self._put(functools.partial(self._flight.come_to, index))

    def work(self) -> None:
        self._has_issued = True  # the wait for its input, if nothing else
        self._put(self._flight.work)
        self._has_issued = True

    def enter(self, phase: Phase) -> None:
        self._put(functools.partial(self._flight.enter, phase))

    def join(self, collective: Action | None) -> None:
        self._flight.join(collective)

    def catch_up(self) -> None:
        """Make every note whose event is done."""
        with self._lock:
            while self._notes:
                event, note = self._notes[0]
                if event is not None:
                    if not event.query():
                        break
                    self._events.give_back(event)
                self._notes.popleft()
                note()

    def watch(self) -> None:
        """Let a thread catch up every `INTERVAL_S`, until the end."""

        def look() -> None:
            devices.make_current(self._device)
            while not self._is_over.wait(INTERVAL_S):
                try:
                    self.catch_up()
                except RuntimeError:  # the device has failed: the rank's own thread raises it too
                    return

        self._thread = threading.Thread(target=look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: the record, which the next case has too, is not written by it again."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self.catch_up()

    def _put(self, note: Note) -> None:
        with self._lock:
            event = self._events.take() if self._has_issued else None
            if event is not None:
                event.record()
            self._has_issued = False
            self._notes.append((event, note))
