"""Starts the workers on this machine, under torch's elastic agent.

The agent is run as a subprocess: the controller stays free of torch, and a crash of the agent is
an exit code here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STOP_TIMEOUT_S = 15
LOG_LINES = 30


class LocalLaunch:
    """The agent and its workers, from start to end. Their logs go to `folder`."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str],
        *,
        num_ranks: int,
        threads_per_rank: int,
        max_restarts: int,
    ) -> None:
        """`program` is what each worker runs: a module's name and its arguments."""
        self._folder = folder
        self._log = (folder / "agent.log").open("wb")
        self._agent = subprocess.Popen(
            local_command(folder, program, num_ranks, max_restarts),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(threads_per_rank),
            start_new_session=True,  # Ctrl-C reaches the controller alone, which stops the agent
        )

    def poll(self) -> int | None:
        """The agent's exit code, or None while it runs."""
        return self._agent.poll()

    def stop(self) -> None:
        """End the agent and, through it, every worker. Blocks until they are gone."""
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)
            try:
                self._agent.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._agent.pid, signal.SIGKILL)
                self._agent.wait()
        self._log.close()

    def num_starts(self) -> int:
        """How often the workers have been started."""
        return len(list(self._folder.glob("logs/*/attempt_*")))

    def worker_exit_code(self) -> int | None:
        """The exit code of the first worker that failed, by the agent's account of it."""
        text = (self._folder / "agent.log").read_text(errors="replace")
        found = re.findall(r"^\s*exitcode\s*:\s*(-?\d+)", text, flags=re.MULTILINE)
        return int(found[-1]) if found else None  # the root cause is the account's last part

    def last_lines(self) -> list[str]:
        """The end of the newest worker's log, or of the agent's."""
        logs = self._folder.glob("logs/*/attempt_*/*/stderr.log")
        written = [path for path in logs if path.stat().st_size]
        agent = self._folder / "agent.log"
        newest = max(written, key=lambda path: path.stat().st_mtime, default=agent)
        return newest.read_text(errors="replace").splitlines()[-LOG_LINES:]


def _environment(threads_per_rank: int) -> dict[str, str]:
    """Each channel has a CUDA stream of its own.

    With fewer hardware queues than streams (the default is 8), a receive that waits could stand in
    front of the compute that its peer waits for.
    """
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        **os.environ,
        "OMP_NUM_THREADS": str(threads_per_rank),
    }


def local_command(
    folder: Path, program: Sequence[str], num_ranks: int, max_restarts: int
) -> list[str]:
    """The command that starts the workers; the rendezvous listens on a free loopback port."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={num_ranks}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--log-dir={folder / 'logs'}",
        "--redirects=3",
        "-m",
        *program,
    ]
