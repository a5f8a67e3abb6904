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

from ppbench.run.machine.counters import Host, Reading
from ppbench.run.machine.environment import available_cores
from ppbench.run.machine.gpus import open_gpus

INTERVAL_S = 0.2

LOOK_BACK_NS = 1_000_000_000
"""Time before a window from which samples are read: a short window has too few for all figures."""


@dataclass(frozen=True)
class Sample:
    """All readings of one moment."""

    time_ns: int  # CLOCK_MONOTONIC, as the spans' clock
    host: Reading
    gpus: Sequence[Reading]  # those of the ranks, each once, known by their UUIDs
    absent: dict[str, str]  # cpu_load, cpu_energy, gpu: why they are missing


def host_of(root_pid: int) -> Host:
    """The node's counters for a process, its descendants and the cores that they may run on."""
    try:
        cores = os.sched_getaffinity(root_pid)
    except (AttributeError, ProcessLookupError, PermissionError):
        cores = set(range(available_cores()))
    return Host({root_pid}, cores)


class Sampler:
    """Takes samples of this node and appends them to a file as lines of JSON."""

    def __init__(self, path: Path, root_pid: int) -> None:
        """`root_pid` is the launch's supervisor: its load and its descendants' is the launch's own.

        Raises OSError where the file cannot be written.
        """
        self._file = path.open("ab", buffering=0)
        self._file.write(b"\n")  # ends the line in which another sampler was killed
        self._gpus, self._host = open_gpus(), host_of(root_pid)
        absent = {"gpu": self._gpus.absent} if self._gpus.absent else {}
        self._absent = self._host.absent | absent
        self.due_s = time.monotonic()

    def sample(self, devices: Sequence[str] = ()) -> None:
        """Take a sample now; `devices` are the ids of the ranks' GPUs, none: all that are visible.

        Raises OSError where it cannot be written.
        """
        sample = Sample(
            time.monotonic_ns(), self._host.read(), self._gpus.read(devices), self._absent
        )
        self._file.write(f"{json.dumps(vars(sample))}\n".encode())
        self.due_s = time.monotonic() + INTERVAL_S

    def sample_if_due(self, devices: Sequence[str] = ()) -> None:
        """Take a sample if the last one is as old as the interval."""
        if time.monotonic() >= self.due_s:
            self.sample(devices)

    def close(self) -> None:
        self._file.close()


def read_samples(path: Path, begin_ns: int, end_ns: int) -> list[Sample]:
    """Return the samples of a window, in order, with those around it.

    They begin `LOOK_BACK_NS` earlier, or with the last before that, and end with the first that is
    not before `end_ns`. Older ones are not parsed, nor is a line that was cut short. Empty if there
    is no file.
    """
    samples, since_ns = list[Sample](), begin_ns - LOOK_BACK_NS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            samples.append(Sample(**json.loads(line)))
        if samples and samples[-1].time_ns <= since_ns:
            break
    return samples_around(samples[::-1], since_ns, end_ns)


def samples_around(samples: Sequence[Sample], begin_ns: int, end_ns: int) -> list[Sample]:
    """Return the samples from the last before a window, or the first, to the first after it."""
    first = max((i for i, s in enumerate(samples) if s.time_ns <= begin_ns), default=0)
    last = next((i for i, s in enumerate(samples) if s.time_ns >= end_ns), len(samples))
    return list(samples[first : last + 1])
