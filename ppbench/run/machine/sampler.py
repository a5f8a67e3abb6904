"""A process per node that reads the machine's counters while the ranks work.

    python -m ppbench.run.machine.sampler FILE ROOT_PID PARENT_PID INTERVAL_S [DEVICE ...]

A thread in a rank would take the interpreter's lock from the timed path, and the samples of a rank
that hangs or dies would be lost. This process has a low priority and imports neither torch nor
pandas. It appends a sample as a JSON line every interval, and one more for each byte that it reads;
it ends when its standard input does, or its parent. A sample costs 0.3 to 1.1 ms of CPU time where
there is no GPU (2 cores, 85 processes), about half a percent of one core; each contains its cost.

    results/launches/<launch_id>/telemetry-<node>-<host>.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.run.machine.accelerators.devices import GpuReading
from ppbench.run.machine.accelerators.nvidia import open_gpus
from ppbench.run.machine.counters import Host, HostReading
from ppbench.run.machine.environment import available_cores

INTERVAL_S = 0.2
NICENESS = 10
"""Ranks go first, but a sampler that never ran on a busy core could not see that it is busy."""

ANSWER_TIMEOUT_S = 10.0
"""Far longer than starting takes (imports, opening NVML): a sampler that is slower hangs."""

LOOK_BACK_NS = 1_000_000_000
"""Time before a window from which samples are read: a short window has too few for all figures."""

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Sample:
    """All readings of one moment."""

    time_ns: int  # CLOCK_MONOTONIC, as the spans' clock
    host: HostReading
    gpus: tuple[GpuReading, ...]  # those of the ranks, each once, known by their UUIDs
    absent: dict[str, str]  # cpu_load, cpu_energy, gpu: why they are missing
    cost_ns: int = 0  # CPU time of taking it
    gpus_ns: int = 0  # time for which the drivers of the GPUs were asked


def sample_of(text: str) -> Sample:
    """Parse the sample of a JSON line. Raises ValueError for a line that was cut short."""
    data = json.loads(text)
    host, gpus = HostReading(**data.pop("host")), []
    for gpu in data.pop("gpus"):
        reasons = gpu.pop("throttle_reasons")
        gpus.append(GpuReading(throttle_reasons=None if reasons is None else tuple(reasons), **gpu))
    return Sample(host=host, gpus=tuple(gpus), **data)


def samples_path(folder: Path, node: int) -> Path:
    """Return the file of a node's samples, in the launch's folder, which nodes may share."""
    host = re.sub(r"[^\w.-]", "_", platform.node())  # nodes may change numbers when restarted
    return folder / f"telemetry-{node}-{host}.jsonl"


class Sampler:
    """The parent's end of a sampling process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._num_awaited = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def sample(self) -> bool:
        """Have a sample taken now; return whether it is in the file. Blocks for some milliseconds.

        There is none if the process has ended or does not answer; it is then not asked again.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        if self._num_awaited:
            return False
        self._num_awaited = 1
        try:
            os.write(stdin.fileno(), b"s")
        except OSError:
            return False
        poll = select.poll()  # unlike select, for descriptors above 1023 too
        poll.register(stdout, select.POLLIN)
        if poll.poll(ANSWER_TIMEOUT_S * 1000):
            self._num_awaited -= len(os.read(stdout.fileno(), 1))
        return self._num_awaited == 0

    def stop(self) -> None:
        """End the process. Blocks until it is gone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_sampler(
    path: Path, root_pid: int, interval_s: float = INTERVAL_S, devices: Sequence[str] = ()
) -> Sampler:
    """Start sampling into `path`, one sampler per node; return at once.

    `root_pid` is the launch's agent: its load and that of its descendants is the launch's own.
    `devices` are the ids of the ranks' GPUs, each of which is asked once per sample; without any,
    those that this process may use.
    """
    arguments = [str(path), str(root_pid), str(os.getpid()), str(interval_s), *devices]
    process = subprocess.Popen(
        [sys.executable, "-m", "ppbench.run.machine.sampler", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    return Sampler(process)


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
            samples.append(sample_of(line))
    return samples


def main(
    path: Path, root_pid: int, parent_pid: int, interval_s: float, devices: Sequence[str] = ()
) -> None:
    """Sample until standard input or the parent ends."""
    os.nice(NICENESS)
    try:  # the cores that the launch, and so its ranks, may run on
        cores = os.sched_getaffinity(root_pid)
    except (AttributeError, ProcessLookupError, PermissionError):
        cores = set(range(available_cores()))
    gpus, host = open_gpus(), Host({root_pid, os.getpid()}, cores)
    absent = host.absent | ({"gpu": gpus.absent} if gpus.absent else {})

    def sample() -> Sample:
        cost_ns, time_ns = time.process_time_ns(), time.monotonic_ns()
        counters, asked_ns = host.read(), time.monotonic_ns()
        readings = gpus.read(devices)
        gpus_ns = time.monotonic_ns() - asked_ns if readings else 0
        cost_ns = time.process_time_ns() - cost_ns
        return Sample(time_ns, counters, readings, absent, cost_ns, gpus_ns)

    due_s = time.monotonic()
    with path.open("ab", buffering=0) as file:
        file.write(b"\n")  # ends the line in which another sampler was killed
        # A forked child of the parent may keep the pipe open after the parent's end.
        while os.getppid() == parent_pid:
            wait_s = max(0.0, due_s - time.monotonic())
            ready, _, _ = select.select([0], [], [], min(wait_s, INTERVAL_S))
            asked = os.read(0, 1) if ready else b""
            if ready and not asked:
                return
            if asked or time.monotonic() >= due_s:
                file.write(f"{json.dumps(dataclasses.asdict(sample()))}\n".encode())
                due_s = time.monotonic() + interval_s
            if asked:
                os.write(1, asked)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
