"""The interface between the worker and a runtime, and the engine's configuration of a case."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from engine.configuration import TrainerConfig, model_of
from engine.connection import Agreement
from engine.flight import Flight, Phase
from engine.model.data import DataSpec
from engine.model.descriptions import FlopFacts
from engine.model.partition import totals_of
from engine.model.spec import ModelSpec
from engine.model.stage_module import StageModule
from engine.plan.lower import Policy
from engine.plan.program import Program
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import CSV_PREFIX
from engine.run.alignment import Alignment
from engine.run.device import uuid_of
from engine.run.memory import MemoryUse
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import StepResult
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case
from ppbench.config.programs import has_pairs_of, sharding_of, slice_lengths_of
from ppbench.run.machine.placement import Place, machine_id


class RefusalError(ValueError):
    """A case that the runtime cannot run; the run is `invalid`. The message names the fix."""


class Runtime(Protocol):
    """One rank's part of a case. All ranks make the same calls with the same numbers.

    One that also has `find_not_finite`, as `Trainer` has, is asked for tensors that are not finite;
    of others only the loss is checked. One that has `gathered` can be verified.
    """

    @property
    def lowered(self) -> Program:
        """The program of a step, with transfers; read after the first step."""

    @property
    def peak_held(self) -> int:
        """The most microbatches that this rank has held at once, over its stages."""

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """This rank's stages by number, with the weights that it trains; read by verification."""

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        """Train one step; returns when this rank's part of it is over.

        `recording` chooses spans, or ranges for a profiler that the caller started, or neither.
        """

    def steps(self, numbers: range) -> list[StepResult]:
        """Train these steps with spans, one right after the other; returns when all are over.

        A device is waited for once, after the last of them.
        """

    def measure_memory(self, step: int) -> MemoryUse | None:
        """Run one more step under memory accounting; None where no memory is accounted for."""

    def peak(self) -> tuple[str, Peak] | None:
        """Return the device's name and peak speed; None where nothing is computed.

        A speed that is not known is measured by all ranks at the same time.
        """

    def flop_facts(self) -> FlopFacts | None:
        """Return the facts for a token's FLOPs, on rank 0; None where nothing is computed."""

    def close(self) -> None:
        """Release all resources; the runtime is not used again."""

    def run_facts(self) -> dict[str, object]:
        """Return columns of `runs` that are the same on every rank; called on rank 0."""

    def rank_facts(self) -> dict[str, object]:
        """Return columns of `ranks` that are known without running."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a case: its runtime, and its connections to the other ranks."""

    case: Case
    runtime: Runtime
    fabric: Fabric
    group: dist.ProcessGroup  # for control messages
    flight: Flight  # the record of its progress
    config: TrainerConfig
    cores: tuple[int, ...] | None = None  # those it is bound to
    places: tuple[Place, ...] = ()  # where each of the case's ranks is

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of the case: replica after replica, each in order of its ranks."""
        return tuple(range(self.case.num_processes))

    def wait(self) -> None:
        """Wait until the other ranks of the case are here as well."""
        self.flight.enter(Phase.WAITS)
        dist.barrier(self.group)


def id_of(device: torch.device) -> str:
    """Return an id of an accelerator that is the same in every process, on every machine."""
    try:
        return uuid_of(device)
    except AttributeError:  # a backend that tells none
        return f"{machine_id()} {device}"


class Factory(Protocol):
    """Makes this rank's part of a case; a class is a factory through its constructor.

    Every process of the case calls it. They are connected already: `fabric.group_of` has their
    communicator. Raises RefusalError for a case that the runtime cannot run.
    """

    def __call__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight, /
    ) -> Runtime:
        """Return the runtime, built and ready to step."""


def facts_of_run(agreement: Agreement, device: torch.device, transport: str) -> dict[str, object]:
    """Return columns of `runs`: how the model is cut into stages, and what moves messages."""
    config, partition = agreement.config, agreement.partition
    model = model_of(config, device)
    sizes = totals_of(model.part_sizes, partition)
    return {
        "num_parameters": model.num_parameters,
        "num_stages": len(partition),
        "layers_per_stage": json.dumps([len(owned) for owned in partition]),
        "parameters_per_stage": json.dumps([int(size) for size in sizes]),
        "stage_shares": json.dumps([round(share, 6) for share in agreement.shares]),
        "transport": transport if config.num_processes > 1 else "none",
    }


def facts_of_rank(
    device: str,
    program: Program,
    rank: int,
    modules: Collection[StageModule],
    num_parameters: int,
) -> dict[str, object]:
    """Return columns of `ranks`: the rank's part of the model. An emulated one has no modules."""
    return {
        "device": device,
        "stages": json.dumps(sorted(program.placement.stages_of(rank))),
        "num_layers": sum(len(module.layers) for module in modules),
        "num_parameters": num_parameters,
        "planned_peak_held_microbatches": peak_activations(program)[rank],
    }


def clock_facts(rank: int, alignment: Alignment, device_error_ns: int) -> dict[str, object]:
    """Return columns of `ranks`; `device_error_ns` is the device clock's error on the host's."""
    shared = "rank 0" if rank == 0 else "shared with rank 0"
    return {
        "clock": shared if alignment.is_shared else "aligned by pings",
        "clock_offset_ns": alignment.offset_ns,
        "clock_drift_ppb": alignment.drift_ppb,
        "clock_error_ns": alignment.error_ns + device_error_ns,
    }


Spec = TypeVar("Spec", ModelSpec, DataSpec, OptimizerSpec)


def trainer_config(case: Case) -> TrainerConfig:
    """Return the engine's configuration for a case."""

    def spec(kind: type[Spec], section: str, **given: Any) -> Spec:
        """Make one whose fields are the settings of a section, but for those that are given."""
        names = {field.name for field in dataclasses.fields(kind)} - given.keys()
        return kind(**given, **{name: getattr(case, f"{section}_{name}") for name in names})

    return TrainerConfig(
        model=spec(ModelSpec, "model", name=case.model_preset),
        data=spec(
            DataSpec,
            "data",
            seq_len=case.seq_len,
            num_microbatches=case.num_microbatches,
            microbatch_size=case.train_microbatch_size,
        ),
        schedule=case.schedule,
        world_size=case.world_size,
        stages_per_rank=None if case.schedule.startswith(CSV_PREFIX) else case.stages_per_rank,
        policy=Policy(case.transfer_policy),
        look_ahead=case.transfer_look_ahead,
        optimizer=spec(OptimizerSpec, "train", name=case.train_optimizer),
        autocast=case.train_autocast,
        recompute=case.recompute,
        compile=case.train_compile,
        replicas=case.replicas,
        sharding=sharding_of(case),
        issue_ahead=case.launch_issue_ahead,
        mode=case.mode,
        has_pairs=has_pairs_of(case),
        slices=slice_lengths_of(case),
        attention=case.slices_attention,
    )
