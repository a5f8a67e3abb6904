"""Starts the workers on this machine, under torch's elastic agent.

The agent is run as a subprocess: the controller stays free of torch, and a crash of the agent is
an exit code here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_TIMEOUT_S = 15


class LocalLaunch:
    """The agent and its workers, from start to end."""

    def __init__(
        self, job_file: Path, num_ranks: int, threads_per_rank: int, max_restarts: int
    ) -> None:
        self._log = (job_file.parent / "agent.log").open("wb")
        self._agent = subprocess.Popen(
            local_command(job_file, num_ranks, max_restarts),
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


def local_command(job_file: Path, num_ranks: int, max_restarts: int) -> list[str]:
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
        f"--log-dir={job_file.parent / 'logs'}",
        "--redirects=3",
        "-m",
        "ppbench.run.worker",
        str(job_file),
    ]
