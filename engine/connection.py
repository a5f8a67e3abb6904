"""What the ranks agree on before any of them builds a stage, and the communicators they will use.

Rank 0 decides for all: no two would measure the same, and a model that is refused is refused once.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.configuration import (
    AUTOCAST,
    TrainerConfig,
    data_spec_of,
    edges_of,
    lowered_of,
    messages_of,
    model_of,
    partition_of,
    settled,
)
from engine.model.stage_module import Message
from engine.plan.program import Program
from engine.run.layer_costs import measure_costs
from engine.run.p2p.fabric import Fabric, Ranks

Decided = TypeVar("Decided")


def connect(config: TrainerConfig, fabric: Fabric) -> TrainerConfig:
    """Settle the partition, and make the communicators that a trainer of it uses.

    Returns the configuration with its partition as a list, to build the trainers with. Collective:
    every rank of the default process group calls it, also those that will not train. Raises, on all
    ranks alike, ModelError, PartitionError and what building the program raises.
    """
    return agree(config, fabric).config


@dataclass(frozen=True)
class Agreement:
    """Facts of the model that all ranks must know."""

    config: TrainerConfig
    shared: list[Ranks]  # those who share a weight, one entry per weight that several ranks share
    messages: list[Message]  # what each stage but the last sends for one microbatch


def agree(config: TrainerConfig, fabric: Fabric) -> Agreement:
    """Connect the ranks as `connect` does, and return all that was agreed on.

    With one process nothing is communicated; others, which will not train, agree to anything.
    """
    if config.num_processes == 1 and dist.is_initialized() and dist.get_rank() > 0:
        return Agreement(config, [], [])
    lowered = lowered_of(config)
    decide = functools.partial(_decide, config, lowered, fabric.device)
    if config.num_processes == 1:
        return decide()
    decided = broadcast(decide)
    fabric.connect(edges_of(lowered), lowered.placement.ranks, decided.shared, config.replicas)
    return decided


def _decide(config: TrainerConfig, lowered: Program, device: torch.device) -> Agreement:
    """`lowered` is the program with its transfers."""
    model, num_stages = model_of(config, device), lowered.num_stages
    if num_stages > 1:
        data = data_spec_of(config, model)
        shape = (data.microbatch_size, data.longest)
        autocast = autocast_of(config.autocast, device)
        measure = functools.partial(measure_costs, model, shape, device, autocast)
        config = settled(config, model, num_stages, measure)
    partition = partition_of(config, model, num_stages)
    messages = messages_of(config, model, partition)
    ranks = lowered.placement.ranks
    owners = [ranks_of((s for s, _ in w.owners), ranks) for w in model.shared_weights(partition)]
    shared = [some for some in owners if len(some) > 1]
    return Agreement(config, shared, messages)


def autocast_of(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Entered for each forward; reentrant."""
    dtype = AUTOCAST[name]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def ranks_of(stages: Iterable[int], ranks: tuple[int, ...]) -> Ranks:
    """The ranks that own some of these stages, each once."""
    return tuple(sorted({ranks[stage] for stage in stages}))


def broadcast(decide: Callable[[], Decided], group: dist.ProcessGroup | None = None) -> Decided:
    """Return rank 0's decision, or raise its exception, on every rank. Blocks until then.

    `group` has rank 0 and those that are to know; None: all.
    """
    decided: list[Decided | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            decided = [decide()]
        except Exception as error:
            decided = [error]
            try:
                pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
            except Exception:  # it cannot travel: its words can
                decided = [RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(decided, src=0, group=group)
    if isinstance(decided[0], Exception):
        raise decided[0]
    assert decided[0] is not None
    return decided[0]
