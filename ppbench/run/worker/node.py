"""A rank's node: samples of its load, memory and accelerators, which its supervisor takes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from engine.run.device import is_accelerator
from ppbench.run.machine.node_folder import ASKS, samples_path
from ppbench.run.machine.placement import Place, ranks_on_devices
from ppbench.run.machine.sampler import Sample, read_samples
from ppbench.run.machine.telemetry import Figures, sample_rows, summarize

SAMPLES_BYTES = 8 * 2**20
"""Most bytes of a node's samples, which lie in its folder."""
ANSWER_TIMEOUT_S = 10.0
"""Far longer than a sample takes: a supervisor that is slower hangs."""


Window = tuple[int, int]
"""The begin and the end of an interval on this node's monotonic clock."""


class Node:
    """This rank's node; the first rank on it asks for samples."""

    def __init__(self, folder: Path, place: Place) -> None:
        """`folder` is the node's. Collective: every rank says its place."""
        self._path = samples_path(folder)
        here, rank = os.environ["GROUP_RANK"], dist.get_rank()
        ours = (here, place)
        ranks: list[tuple[str, Place]] = [ours] * dist.get_world_size()
        dist.all_gather_object(ranks, ours)
        self.places, self._rank = tuple(place for _, place in ranks), rank
        self._devices = list(
            dict.fromkeys(one.device for node, one in ranks if node == here and one.device)
        )
        asks = socket.socket(fileno=int(os.environ[ASKS]))
        asks.settimeout(ANSWER_TIMEOUT_S)
        self._asks: socket.socket | None = asks
        if os.environ["LOCAL_RANK"] != "0":
            self.close()
        self._is_first = self._asks is not None
        self.sample()

    def look_after(self) -> None:
        """Limit the size of the samples, before each case: those of earlier ones are not needed."""
        if self._is_first and self._path.exists() and self._path.stat().st_size > SAMPLES_BYTES:
            os.truncate(self._path, 0)

    def sample(self) -> None:
        """Take a sample, from one rank per node; the others see it once all have called this.

        From now on there is one every interval, until `rest`.
        """
        self._ask(self._devices)

    def rest(self) -> None:
        """Take no samples until the next is asked for, while other processes have their turn."""
        self._ask(None)

    def _ask(self, wanted: list[str] | None) -> None:
        """Blocks for some milliseconds. A supervisor that does not answer is not asked again."""
        if self._asks is None:
            return
        try:
            self._asks.sendall(json.dumps(wanted).encode())
            self._asks.recv(1)
        except OSError:
            self.close()

    def summary(
        self, windows: Sequence[Window], device: torch.device, places: Sequence[Place]
    ) -> Figures:
        """Summarize the node during the windows, and this rank's GPU if it computes on one.

        `places` are those of the case's ranks, which may share the GPU.
        """
        own = self.places[self._rank].device if is_accelerator(device) else ""
        num_sharing = ranks_on_devices(places).get(own, 1)
        return summarize(self._read(windows), windows, own or None, num_sharing)

    def rows(self, windows: Sequence[Window]) -> list[Figures]:
        """Return the samples of the windows, from one rank per node."""
        if not self._is_first:
            return []
        samples = self._read(windows)
        return [row for window in windows for row in sample_rows(samples, *window)]

    def _read(self, windows: Sequence[Window]) -> list[Sample]:
        return read_samples(self._path, windows[0][0], windows[-1][1])

    def close(self) -> None:
        if self._asks is not None:
            self._asks.close()
        self._asks = None
