"""Starts a sweep on several machines: the same command on every node, or a Slurm job of it.

    a supervisor on every node --rendezvous--> one launch: all restart their ranks together
    sbatch --> submitit on each node --> for each launch: a supervisor --> ranks

The command is the same on each node, whether a person, a Slurm job or a pod starts it. There is no
controller: rank 0 plans and reports. A Slurm job's first host is the rendezvous. Results go to the
store's folder, which the nodes share; so do submitit's files: `results/slurm/<job>_*`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.packages import missing
from ppbench.config.case import Slurm, Supervision, settings_in
from ppbench.config.sweep import Sweep
from ppbench.console import note
from ppbench.errors import LaunchError, SweepInterruptedError, UsageError
from ppbench.run.launch.local import STOP_TIMEOUT_S, SUPERVISOR, end_group


@dataclass(frozen=True)
class NodeLaunches:
    """The launches that each of so many nodes starts, one after the other."""

    num_launches: int
    num_nodes: int
    ranks_per_node: int
    max_restarts: int  # of each launch
    program: tuple[str, ...]  # a module and its arguments
    supervision: Supervision = field(default_factory=Supervision)

    def commands(self, host: str, port: int) -> list[list[str]]:
        """Return the command of each launch, the same on every node; `host` is one of them.

        Each has a port of its own: the last may still be open.
        """
        chosen = [
            f"--{declared.field.replace('_', '-')}={value}"
            for declared in settings_in(Supervision)
            if (value := getattr(self.supervision, declared.field)) != declared.default
        ]
        return [
            [
                *(sys.executable, "-m", SUPERVISOR),
                f"--nodes={self.num_nodes}",
                f"--ranks-per-node={self.ranks_per_node}",
                f"--max-restarts={self.max_restarts}",
                *chosen,
                f"--rendezvous={host}:{port + launch}",
                *("-m", *self.program),
            ]
            for launch in range(self.num_launches)
        ]

    def run(self, host: str, port: int) -> None:
        """Run all launches. Raises LaunchError at the first that fails.

        Blocks. Any exception ends the supervisor and its ranks first; Ctrl-C then raises
        SweepInterruptedError.
        """
        for number, command in enumerate(self.commands(host, port), start=1):
            note(f"launch {number} of {self.num_launches}: {shlex.join(command)}")
            # In a session of its own: Ctrl-C reaches this process alone, which ends it.
            supervisor = subprocess.Popen(command, start_new_session=True)
            try:
                exit_code = supervisor.wait()
            except KeyboardInterrupt:
                raise SweepInterruptedError(
                    "stopped; the runs that are done are kept, on the first node, and every node "
                    "has to be started again"
                ) from None
            finally:
                end_group(supervisor, STOP_TIMEOUT_S)
            if exit_code != 0:
                raise LaunchError(f"the supervisor ended with exit code {exit_code}")


def node_launches(sweep: Sweep, num_nodes: int, program: Sequence[str]) -> NodeLaunches:
    """Return the launches of a sweep, with ranks for its largest case and a restart per failure."""
    num = max(measure.launches for _, measure in sweep.cases)
    largest = max(case.num_processes for case, _ in sweep.cases)
    tries = sum(2 + measure.retry for _, measure in sweep.cases)
    each = -(-largest // num_nodes)
    return NodeLaunches(num, num_nodes, each, tries, tuple(program), sweep.supervision)


def rendezvous_of(sweep: Sweep) -> tuple[str, int]:
    """Return the sweep file's rendezvous: a host and a port.

    Raises UsageError if none is set and there are several nodes.
    """
    place = sweep.torchrun
    if not place.rendezvous and place.nodes > 1:
        raise UsageError(
            f"{sweep.file}: launch.torchrun.rendezvous: not set, and {place.nodes} nodes must meet "
            "somewhere; add --set launch.torchrun.rendezvous=HOST:PORT, HOST being one of them"
        )
    host, _, port = (place.rendezvous or "127.0.0.1:29400").rpartition(":")
    return host, int(port)


if TYPE_CHECKING:
    from submitit import SlurmExecutor

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Ports below those that the system assigns (32768 and up on Linux)."""


@dataclass(frozen=True)
class NodeTask:
    """The work of the job on each node; submitit sends it to nodes that have ppbench installed."""

    launches: NodeLaunches

    def __call__(self) -> None:
        import submitit

        job = submitit.JobEnvironment()
        number = int(job.raw_job_id)
        port = FIRST_PORT + number % NUM_PORTS
        self.launches.run(job.hostnames[0], port)

    def checkpoint(self) -> Any:
        """Queue the job again at the time limit or when it is preempted; it then goes on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class SlurmJob:
    """A sweep that is to be submitted."""

    sweep: Sweep
    results: Path
    launches: NodeLaunches

    def submit(self) -> str:
        """Submit the job to Slurm; return its number.

        Raises LaunchError with the message of Slurm.
        """
        if shutil.which("sbatch") is None:
            raise LaunchError("no Slurm here: sbatch is not on PATH; submit from a login node")
        try:
            return str(self._executor().submit(NodeTask(self.launches)).job_id)
        except RuntimeError as error:  # submitit's, with the message of sbatch
            raise LaunchError(f"Slurm did not take the job: {error}") from None

    def script(self) -> str:
        """Return the script that `submit` passes to sbatch; write nothing, and need no Slurm."""
        executor = self._executor()
        # Submitit has no public way to ask for it; a test compares it with the input of sbatch.
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def preview(self) -> str:
        """The script, and as comments below it the commands that run on each node."""
        commands = self.launches.commands("FIRST_HOST", FIRST_PORT)
        heading = f"# which runs on each node (the port is {FIRST_PORT} + JOB % {NUM_PORTS}):"
        listed = (f"#   {shlex.join(command)}" for command in commands)
        return "\n".join([self.script(), heading, *listed])

    def _executor(self) -> SlurmExecutor:
        try:
            from submitit import SlurmExecutor
        except ModuleNotFoundError:
            raise UsageError(
                f"{missing('submitit', '--launcher slurm')}, or use "
                "--launcher torchrun inside a job of your own"
            ) from None

        class Executor(SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                return 2  # `submit` asks whether Slurm is here; a script needs none

        executor = Executor(folder=self.results / "slurm")
        executor.update_parameters(**parameters(self.sweep, self.launches.ranks_per_node))
        return executor


def parameters(sweep: Sweep, ranks_per_node: int) -> dict[str, Any]:
    """Return submitit's parameters; by default as many cores as the largest case can use."""
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
        "ntasks_per_node": 1,  # the supervisor, which starts the ranks
        "time": slurm.time_min,
        "gpus_per_node": slurm.gpus_per_node,
        "cpus_per_task": num_cores,
        "srun_args": [f"--cpus-per-task={num_cores}"],  # since 22.05 srun does not ask the job
        "mem": f"{round(slurm.memory_gb * 1024)}M" if slurm.memory_gb else "",
        "additional_parameters": slurm.extra,
    }
    return {name: value for name, value in asked.items() if value not in ("", 0, {})}
