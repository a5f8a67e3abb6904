"""Watches a node's ranks from outside: ends a case that takes too long, or whose rank has died.

    python -m ppbench.run.failures.watchdog FOLDER RANK:PID ...

It is one small process per node, started by the node's first rank, and ends with the ranks. It
reads each rank's flight record for the time by which its case must be over. It writes the states of
the ranks into one file; then it kills those that are left, also those that are stopped or wait for
ever, so that torch's agent can start them anew.

    FOLDER/watchdog.json    the states of the ranks when the watchdog ended them
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.flight import map_record, read_deadline

LOOK_S = 0.2
NUM_LOOKS = 25
"""A kill for memory counts if it was at most so many looks ago."""
GRACE_S = 2.0
"""Time that the other ranks have, after one has died, to end and write their own errors."""
_REPORT, _UNFINISHED_REPORT = "watchdog.json", "watchdog.partial"


@dataclass(frozen=True)
class WatchdogReport:
    """The states of the ranks when the watchdog ended them, and why it did."""

    at_ns: int  # on the node's monotonic clock
    has_timed_out: bool
    processes: dict[int, str]  # rank -> `alive`, `stopped` or `dead`, at that time
    oom_kills: int  # processes of any launch that the kernel killed for memory just then


def flight_path(folder: Path, rank: int) -> Path:
    return folder / f"flight-rank{rank}"


def start_watchdog(folder: Path, pids: Mapping[int, int]) -> subprocess.Popen[bytes]:
    """Start the watchdog of these ranks, by their process ids; kill it to end it."""
    ranks = [f"{rank}:{pid}" for rank, pid in pids.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "ppbench.run.failures.watchdog", str(folder), *ranks],
        start_new_session=True,  # it must outlive the rank, whose session the agent ends
    )


def read_report(folder: Path) -> WatchdogReport | None:
    try:
        data = json.loads((folder / _REPORT).read_text())
    except (OSError, ValueError):
        return None
    data["processes"] = {int(rank): state for rank, state in data["processes"].items()}
    return WatchdogReport(**data)


def main(folder: Path, pids: Mapping[int, int]) -> None:
    """Watch until the ranks are gone."""
    processes = {rank: _Process(pid) for rank, pid in pids.items()}
    records = [map_record(flight_path(folder, rank)) for rank in processes]
    held = os.open(folder, os.O_RDONLY)
    oom_kills = deque([_num_oom_kills()], NUM_LOOKS)  # a victim dies some time after it is counted
    while True:
        oom_kills.append(_num_oom_kills())
        if all(process.fd is not None for process in processes.values()):
            poll = select.poll()
            for process in processes.values():
                poll.register(process.fd or 0, select.POLLIN)
            poll.poll(LOOK_S * 1000)
        else:
            time.sleep(LOOK_S)
        has_death = any(process.is_dead() for process in processes.values())
        now_ns = time.monotonic_ns()
        deadlines = [end_ns for record in records if (end_ns := read_deadline(record))]
        has_timed_out = not has_death and any(end_ns < now_ns for end_ns in deadlines)
        if has_death or has_timed_out:
            break
    states = {rank: process.state() for rank, process in processes.items()}
    num_killed = _num_oom_kills() - oom_kills[0]
    report = WatchdogReport(now_ns, has_timed_out, states, num_killed)
    data = json.dumps(dataclasses.asdict(report)).encode()
    # It is written into the open folder, even if ranks started anew have another in its place.
    with contextlib.suppress(FileNotFoundError):  # collected already
        file = os.open(_UNFINISHED_REPORT, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, dir_fd=held)
        os.write(file, data)
        os.close(file)
        os.rename(_UNFINISHED_REPORT, _REPORT, src_dir_fd=held, dst_dir_fd=held)
    until_s = time.monotonic() + (GRACE_S if has_death else 0.0)
    while time.monotonic() < until_s and not all(p.is_dead() for p in processes.values()):
        time.sleep(0.05)
    for process in processes.values():
        process.kill()


class _Process:
    """One rank's process, held by a descriptor where the system has them: ids are used again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self.fd: int | None = os.pidfd_open(pid)
            self._was_there = True
        except ProcessLookupError:
            self.fd, self._was_there = None, False
        except (AttributeError, OSError):  # not Linux, or one that does not have or allow it
            self.fd, self._was_there = None, True

    def is_dead(self) -> bool:
        if not self._was_there:
            return True
        if self.fd is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False

    def state(self) -> str:
        if self.is_dead():
            return "dead"
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return "alive"
        return "stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else "alive"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)
            elif self._was_there:
                os.kill(self._pid, signal.SIGKILL)


def _num_oom_kills() -> int:
    """Return how often the kernel has killed for memory, in the machine's or container's count."""
    counts = [0]
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(path).read_text().splitlines()
            counts += [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return max(counts)


if __name__ == "__main__":
    given = (pair.split(":") for pair in sys.argv[2:])
    main(Path(sys.argv[1]), {int(rank): int(pid) for rank, pid in given})
