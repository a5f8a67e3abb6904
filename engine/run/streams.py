"""Streams of this rank's own, each drawn once and used by one edge or lane at a time.

torch has a pool of 32 for each device and lends them in turn: whoever draws anew for each case is
soon lent one that is in use. Two edges on one stream wait for each other, although nothing in the
program says so: they are timed wrongly, or hang. NCCL's own come from the pool of high priority.
"""

from __future__ import annotations

import torch

from engine.run import device as devices

NUM_STREAMS = 32
"""Those of torch's pool (c10/cuda/CUDAStream.h, c10/xpu/XPUStream.h: kStreamsPerPool)."""
MOST_EDGES = NUM_STREAMS - 1  # the first is the lane's


class TooManyEdgesError(ValueError):
    """A rank has more edges than there are streams."""


class Streams:
    """The streams of a rank, by number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: list[torch.Stream] = []

    def of_lane(self) -> torch.Stream:
        """The stream of the lane of collectives."""
        return self._at(0)

    def of_edge(self, position: int) -> torch.Stream:
        """The stream of the rank's edge at a position among its own, equal in every case."""
        return self._at(1 + position)

    def _at(self, number: int) -> torch.Stream:
        while len(self._drawn) <= number:
            stream = devices.new_stream(self._device)
            if stream in self._drawn:
                raise TooManyEdgesError(
                    f"a rank needs {number + 1} streams of {self._device}, and torch has "
                    f"{len(self._drawn)}: two edges would share one and wait for each other; use "
                    "fewer stages on each rank"
                )
            self._drawn.append(stream)
        return self._drawn[number]
