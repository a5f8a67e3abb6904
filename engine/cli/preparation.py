"""Prepares a rank for training: its device, model, data, checkpoint and connections."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine import device_variables
from engine.cli.launch import Launch
from engine.cli.options import LATEST, OptionError, Options, configuration, read_options

if TYPE_CHECKING:
    import torch

    from engine.configuration import TrainerConfig
    from engine.run.p2p.fabric import Fabric


@dataclass(frozen=True)
class Job:
    """A checked configuration, on this rank."""

    options: Options
    config: TrainerConfig
    device: torch.device
    checkpoint: Path | None  # to resume from


def prepare(arguments: Sequence[str], launch: Launch) -> Job | None:
    """Check everything that needs no other rank; None after `--help`.

    Raises errors that `is_known` accepts.
    """
    options = read_options(arguments)
    if options is None:
        return None
    import torch

    from engine.configuration import (
        data_of,
        model_of,
        program_of,
        recomputed_stages,
        tokenizer_of,
    )
    from engine.model.partition import BY_COST, partition_layers

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _device(options.device, launch)
    config = configuration(options, launch.world_size)
    num_stages = program_of(config).num_stages  # model, data, program and partition can be made
    model = model_of(config, device)
    if config.model.partition not in BY_COST:
        partition_layers(config.model.partition, model.num_layers, num_stages)
    recomputed_stages(config, num_stages)
    data_of(config, model, tokenizer_of(config), device).close()
    checkpoint = _checkpoint(options)
    if options.save is not None:
        make_folder("--save", options.save)
    return Job(options, config, device, checkpoint)


def _device(kind: str, launch: Launch) -> torch.device:
    """The rank's device: its own GPU, or a shared one on a machine with fewer GPUs than ranks."""
    from engine.run import device as devices

    if kind == "cpu" or (kind == "auto" and not devices.count()):
        return devices.CPU
    if (problem := device_variables.refused(os.environ)) is not None:
        raise OptionError(f"--device {kind}: {problem}")
    try:
        return devices.of_local_rank(launch.local_rank, None if kind == "auto" else kind)
    except RuntimeError as error:
        raise OptionError(f"--device: {error}, or auto") from None


def _checkpoint(options: Options) -> Path | None:
    from engine.run import restoring, snapshot

    if options.resume is None:
        # A folder with checkpoints is refused: those of two runs would be taken for one run's.
        existing = None if options.save is None else snapshot.latest(options.save)
        if existing is not None:
            raise OptionError(
                f"--save: {existing} exists already; go on from it with --resume latest, or choose "
                "another folder"
            )
        return None
    if options.resume == LATEST:
        assert options.save is not None
        return snapshot.latest(options.save)
    folder = Path(options.resume)
    snapshot.latest(folder.parent)  # restores a checkpoint whose replacement was interrupted
    found = snapshot.latest(folder) or folder  # it may be a folder of checkpoints
    restoring.read_state(found)
    return found


def make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{option}: cannot write in {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{option}: cannot write in {folder}: permission denied")


def fabric_of(job: Job, launch: Launch) -> Fabric:
    """Connect this rank to the others. Blocks until all ranks call it."""
    from engine.run import device as devices
    from engine.run.clock import clock_for
    from engine.run.p2p.fabric import Fabric

    kinds = set(launch.gather(job.device.type))

    def refuse() -> None:
        mixed = " and ".join(sorted(kinds))
        raise OptionError(f"some ranks have {mixed}; give --device cpu, or use machines with GPUs")

    if len(kinds) > 1:
        launch.attempt(refuse)
    # All ranks need the same answer: both ends of a channel must be of one kind.
    is_shared = any(launch.gather(launch.local_world_size > devices.count()))
    return Fabric(job.device, clock_for(job.device), is_device_shared=is_shared)
