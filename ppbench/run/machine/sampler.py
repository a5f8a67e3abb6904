"""Reads the machine's counters while the ranks work: the samples of a node, in one file.

A thread in a rank would take the interpreter's lock from the timed path, and the samples of a rank
that hangs or dies would be lost. So the node's supervisor takes them, one every interval and one
whenever a rank asks. A sample costs 0.3 to 1.1 ms of CPU time where there is no GPU (2 cores, 85
processes), about half a percent of one core, which it contains.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.run.machine.accelerators.nvidia import open_gpus
from ppbench.run.machine.counters import Host, Reading
from ppbench.run.machine.environment import available_cores

INTERVAL_S = 0.2

LOOK_BACK_NS = 1_000_000_000
"""Time before a window from which samples are read: a short window has too few for all figures."""

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Sample:
    """All readings of one moment."""

    time_ns: int  # CLOCK_MONOTONIC, as the spans' clock
    host: Reading
    gpus: Sequence[Reading]  # those of the ranks, each once, known by their UUIDs
    absent: dict[str, str]  # cpu_load, cpu_energy, gpu: why they are missing


class Sampler:
    """Takes samples of this node and appends them to a file as lines of JSON."""

    def __init__(self, path: Path, root_pid: int, interval_s: float = INTERVAL_S) -> None:
        """`root_pid` is the launch's supervisor: its load and its descendants' is the launch's own.

        Raises OSError where the file cannot be written.
        """
        self._file = path.open("ab", buffering=0)
        self._file.write(b"\n")  # ends the line in which another sampler was killed
        try:  # the cores that the launch, and so its ranks, may run on
            cores = os.sched_getaffinity(root_pid)
        except (AttributeError, ProcessLookupError, PermissionError):
            cores = set(range(available_cores()))
        self._gpus, self._host = open_gpus(), Host({root_pid}, cores)
        absent = {"gpu": self._gpus.absent} if self._gpus.absent else {}
        self._absent, self._interval_s = self._host.absent | absent, interval_s
        self.due_s = time.monotonic()

    def sample(self, devices: Sequence[str] = ()) -> None:
        """Take a sample now; `devices` are the ids of the ranks' GPUs, none: all that are visible.

        Raises OSError where it cannot be written.
        """
        sample = Sample(
            time.monotonic_ns(), self._host.read(), self._gpus.read(devices), self._absent
        )
        self._file.write(f"{json.dumps(vars(sample))}\n".encode())
        self.due_s = time.monotonic() + self._interval_s

    def sample_if_due(self, devices: Sequence[str] = ()) -> None:
        """Take a sample if the last one is as old as the interval."""
        if time.monotonic() >= self.due_s:
            self.sample(devices)

    def close(self) -> None:
        self._file.close()


def read_samples(path: Path, begin_ns: int, end_ns: int) -> list[Sample]:
    """Return the samples of a window, in order, with those around it.

    They begin `LOOK_BACK_NS` earlier, or with the last before that, and end with the first that is
    not before `end_ns`. The file is read from its end, so this costs the same however long the
    launch has lasted. Empty if there is no file.
    """
    since_ns = begin_ns - LOOK_BACK_NS
    size = path.stat().st_size if path.exists() else 0
    num_bytes = min(_BLOCK_BYTES, size)
    samples = _last_samples(path, num_bytes)
    while num_bytes < size and (not samples or samples[0].time_ns > since_ns):
        num_bytes = min(2 * num_bytes, size)
        samples = _last_samples(path, num_bytes)
    return samples_around(samples, since_ns, end_ns)


def samples_around(samples: Sequence[Sample], begin_ns: int, end_ns: int) -> list[Sample]:
    """Return the samples from the last before a window, or the first, to the first after it."""
    first = max((i for i, s in enumerate(samples) if s.time_ns <= begin_ns), default=0)
    last = next((i for i, s in enumerate(samples) if s.time_ns >= end_ns), len(samples))
    return list(samples[first : last + 1])


def _last_samples(path: Path, num_bytes: int) -> list[Sample]:
    """Return the samples that lie wholly in the file's last bytes; incomplete lines are skipped."""
    samples: list[Sample] = []
    if num_bytes == 0:
        return samples
    with path.open("rb") as file:
        file.seek(-num_bytes, os.SEEK_END)
        lines = file.read(num_bytes).decode(errors="replace").split("\n")
    for line in lines:
        with contextlib.suppress(ValueError):
            samples.append(Sample(**json.loads(line)))
    return samples
