"""A rank's node: its sampler, with the samples of a window, and its watchdog."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from engine.run.device import is_accelerator
from ppbench.run.failures.watchdog import start_watchdog
from ppbench.run.machine.placement import Place, ranks_on_devices
from ppbench.run.machine.sampler import Sample, read_samples, samples_path, start_sampler
from ppbench.run.machine.telemetry import Figures, Summary, sample_rows, summarize

SAMPLES_BYTES = 8 * 2**20
"""Most bytes of a node's samples, which lie in its folder."""


@dataclass(frozen=True)
class Window:
    """An interval on this node's monotonic clock."""

    begin_ns: int
    end_ns: int


class Node:
    """This rank's node; the first rank on it starts and ends the sampler and the watchdog."""

    def __init__(self, local: Path, rank: int, place: Place) -> None:
        """Start the sampler and the watchdog, on the node's first rank. Collective.

        `local` is the launch's folder on this node, with the flight records of its ranks. The agent
        that started this process is the launch's root. Every rank says its place.
        """
        self._path = samples_path(local, int(os.environ.get("GROUP_RANK", "0")))
        ours = (os.environ.get("GROUP_RANK", "0"), rank, os.getpid(), place)
        ranks: list[tuple[str, int, int, Place]] = [ours] * dist.get_world_size()
        dist.all_gather_object(ranks, ours)
        self.places = tuple(place for *_, place in ranks)
        here = [theirs for theirs in ranks if theirs[0] == ours[0]]
        self._sampler, self._watchdog = None, None
        if os.environ["LOCAL_RANK"] == "0":
            gpus = list(dict.fromkeys(place.device for *_, place in here if place.device))
            self._sampler = start_sampler(self._path, os.getppid(), devices=gpus)
            pids = {rank: pid for _, rank, pid, _ in here}
            self._start_watchdog = functools.partial(start_watchdog, local, pids)
            self._watchdog = self._start_watchdog()

    def look_after(self) -> None:
        """Restart a killed watchdog and limit the size of the samples, before each case.

        Samples of earlier cases are not needed any more.
        """
        if self._watchdog is None:  # another rank of the node does it
            return
        if self._watchdog.poll() is not None:
            self._watchdog = self._start_watchdog()
        if self._path.exists() and self._path.stat().st_size > SAMPLES_BYTES:
            os.truncate(self._path, 0)

    def sample(self) -> None:
        """Take a sample, from one rank per node; the others see it once all have called this."""
        if self._sampler is not None:
            self._sampler.sample()

    def summary(
        self, windows: Sequence[Window], device: torch.device, places: Sequence[Place]
    ) -> Summary:
        """Summarize the node during the windows, and this rank's GPU if it computes on one.

        `places` are those of the case's ranks, which may share the GPU.
        """
        own = self.places[dist.get_rank()].device if is_accelerator(device) else ""
        num_sharing = ranks_on_devices(places).get(own, 1)
        ends = [(window.begin_ns, window.end_ns) for window in windows]
        return summarize(self._read(windows), ends, own or None, num_sharing)

    def rows(self, windows: Sequence[Window]) -> list[Figures]:
        """Return the samples of the windows, from one rank per node."""
        if self._sampler is None:
            return []
        samples = self._read(windows)
        return [row for w in windows for row in sample_rows(samples, w.begin_ns, w.end_ns)]

    def _read(self, windows: Sequence[Window]) -> list[Sample]:
        return read_samples(self._path, windows[0].begin_ns, windows[-1].end_ns)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
