"""Bounds how far the host runs ahead of its device.

Without a bound the host issues a whole step at once: every receive that it opens spins on SMs from
then on, and the allocator can reuse nothing that a stream has yet to read. So before it issues a
computation it waits until the one `most` before is done:

    host    0F0 0F1 0F2 | waits for 0F0 | 0F3 | waits for 0F1 | ...     most = 3
    device  [0F0........][0F1........]

It never waits for a message that is sent or received later than that computation, so a program that
cannot hang when every computation blocks (`engine.plan.lower`) cannot hang here.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch

from engine.plan.action import Action
from engine.run import device as devices
from engine.run.events import EventPool

DEFAULT_ISSUE_AHEAD = 8
"""Computations: enough that a host that is held up for some milliseconds is not seen."""


class IssueLimit:
    """Lets the host issue at most so many computations that its device has not done."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._most = most
        self._events = EventPool(functools.partial(devices.host_event, device))
        self._issued: deque[torch.Event] = deque()

    def bounded(self, compute: Callable[[Action], None]) -> Callable[[Action], None]:
        """The operation of a computation, issued when there is room for it. Blocks until then."""

        def issue(action: Action) -> None:
            while len(self._issued) >= self._most:
                oldest = self._issued.popleft()
                oldest.synchronize()
                self._events.give_back(oldest)
            compute(action)
            event = self._events.take()
            event.record()
            self._issued.append(event)

        return issue
