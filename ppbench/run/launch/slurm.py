"""A sweep as a Slurm job, submitted through submitit.

    sbatch --> submitit on each node --> for each launch: torchrun --> workers

The job's first host is the rendezvous. Results go to the store's folder, which the nodes share; so
does what submitit keeps of a job: `results/slurm/<job>_*`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppbench.config.places import Slurm
from ppbench.config.sweep import Sweep
from ppbench.errors import LaunchError, UsageError
from ppbench.run.launch.torchrun import Launches, Meeting

if TYPE_CHECKING:
    from submitit import SlurmExecutor

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the ports that the system hands out by itself (32768 and up on Linux)."""


@dataclass(frozen=True)
class NodeTask:
    """What the job does on each node. Submitit sends it there; ppbench is installed on all."""

    launches: Launches

    def __call__(self) -> None:
        import submitit

        job = submitit.JobEnvironment()
        number = int(job.raw_job_id)
        port = FIRST_PORT + number % NUM_PORTS
        self.launches.run(Meeting(job.hostnames[0], port, str(number)))

    def checkpoint(self) -> Any:
        """At the time limit, or when preempted: the job is queued again, and goes on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class SlurmJob:
    """A sweep to be submitted."""

    sweep: Sweep
    results: Path
    launches: Launches

    def submit(self) -> str:
        """Hand it to Slurm; returns the job's number. Raises LaunchError with what Slurm says."""
        if shutil.which("sbatch") is None:
            raise LaunchError("no Slurm here: sbatch is not on PATH; submit from a login node")
        try:
            return str(self._executor().submit(NodeTask(self.launches)).job_id)
        except RuntimeError as error:  # submitit's, with what sbatch said
            raise LaunchError(f"Slurm did not take the job: {error}") from None

    def script(self) -> str:
        """What `submit` would hand to sbatch. Writes nothing, and needs no Slurm."""
        executor = self._executor()
        # Submitit has no public way to ask for it; a test compares it with what sbatch is given.
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def _executor(self) -> SlurmExecutor:
        try:
            from submitit import SlurmExecutor
        except ModuleNotFoundError:
            raise UsageError(
                "--launcher slurm needs submitit; install ppbench[slurm], or use "
                "--launcher torchrun inside a job of your own"
            ) from None

        class Executor(SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                return 2  # whether Slurm is here is asked by who submits; a script needs none

        executor = Executor(folder=self.results / "slurm")
        executor.update_parameters(**parameters(self.sweep, self.launches.nodes.ranks_per_node))
        return executor


def parameters(sweep: Sweep, ranks_per_node: int) -> dict[str, Any]:
    """Submitit's; cores default to what the largest case's ranks on a node can use."""
    slurm: Slurm = sweep.slurm
    per_rank = max(case.launch_threads_per_rank + case.data_num_workers for case, _ in sweep.cases)
    num_cores = slurm.cpus_per_node or ranks_per_node * per_rank
    asked: dict[str, Any] = {
        "job_name": sweep.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodes": slurm.nodes,
        "ntasks_per_node": 1,  # torchrun, which starts the ranks
        "time": slurm.time_min,
        "gpus_per_node": slurm.gpus_per_node,
        "cpus_per_task": num_cores,
        "srun_args": [f"--cpus-per-task={num_cores}"],  # since 22.05 srun does not ask the job
        "mem": f"{round(slurm.memory_gb * 1024)}M" if slurm.memory_gb else "",
        "additional_parameters": slurm.extra,
    }
    return {name: value for name, value in asked.items() if value not in ("", 0, {})}
