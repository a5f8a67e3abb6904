"""Events that are made once and used again: making thousands in each step costs the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


class EventPool:
    """Lends events. An event may come back when nothing will read it or wait for it any more."""

    def __init__(self, make: Callable[[], torch.Event]) -> None:
        self._make = make
        self._free: list[torch.Event] = []
        self._lent: dict[int, torch.Event] = {}

    def take(self) -> torch.Event:
        """An event that nobody else has until it is given back."""
        event = self._free.pop() if self._free else self._make()
        self._lent[id(event)] = event
        return event

    def give_back(self, event: torch.Event) -> None:
        """Raises KeyError for an event that is not lent: twice given back, two would use it."""
        self._free.append(self._lent.pop(id(event)))

    def give_back_all(self) -> None:
        """Take back every event that is lent."""
        self._free += self._lent.values()
        self._lent.clear()
