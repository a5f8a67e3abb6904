"""What the ranks agree on before any of them builds a stage, and the communicators they will use.

Rank 0 decides for all: no two would measure the same, and a model that is refused is refused once.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
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
    model_of,
    recomputed_stages,
)
from engine.model.partition import (
    BY_COST,
    balance,
    partition_layers,
    times_to_balance,
    totals_of,
)
from engine.model.split import try_model
from engine.model.stage_module import Message
from engine.plan.program import Program
from engine.run.layer_costs import measure_model_costs
from engine.run.p2p.fabric import Fabric, Processes, Ranks

Decided = TypeVar("Decided")


@dataclass(frozen=True)
class Agreement:
    """What is asked for, with what the ranks have agreed on: all that a trainer is built by."""

    config: TrainerConfig
    lowered: Program  # the program of the step with its transfers and collectives
    partition: list[range]  # the layers of each stage of one direction
    shares: list[float]  # each one's share of what the partition balances, else of the layers
    messages: list[Message]  # what each stage but the last sends for one microbatch, at its longest
    sharing: list[Ranks]  # who share a weight, one entry for each that several ranks share
    num_targets: int  # of one microbatch, at its longest


@dataclass(frozen=True)
class Place:
    """This process's place among those of all replicas."""

    process: int
    replica: int
    rank: int  # within the replica
    everyone: Processes
    pipeline: Processes  # this replica's, by rank
    counterparts: Processes  # of this rank, by replica

    @classmethod
    def of(cls, config: TrainerConfig) -> Place:
        process, size = dist.get_rank() if config.num_processes > 1 else 0, config.world_size
        everyone, (replica, rank) = tuple(range(config.num_processes)), divmod(process, size)
        pipeline = everyone[replica * size :][:size]
        return cls(process, replica, rank, everyone, pipeline, everyone[rank::size])


def agree(config: TrainerConfig, fabric: Fabric) -> Agreement:
    """Agree on how the model is cut, and make the communicators that trainers of it use.

    Collective: every rank of the default process group calls it, also those that will not train.
    With one process nothing is communicated; others, which will not train, agree to anything.
    Raises, on all ranks alike, ModelError, PartitionError and what building the program raises.
    """
    lowered = lowered_of(config)
    if config.num_processes == 1 and dist.is_initialized() and dist.get_rank() > 0:
        return Agreement(config, lowered, [], [], [], [], 0)
    decide = functools.partial(_decide, config, lowered, fabric.device)
    decided = decide() if config.num_processes == 1 else broadcast(decide)
    agreement = Agreement(config, lowered, *decided)
    if config.num_processes > 1:
        owners = lowered.placement.ranks
        fabric.connect(edges_of(lowered), owners, agreement.sharing, config.replicas)
    return agreement


def _decide(
    config: TrainerConfig, program: Program, device: torch.device
) -> tuple[list[range], list[float], list[Message], list[Ranks], int]:
    """Decide the fields of the agreement after the program."""
    model, placement = model_of(config, device), program.placement
    num_stages = placement.depth
    try_model(model, config.model, is_sliced=bool(config.slices), trains=config.trains)
    data = data_spec_of(config, model)
    shape, kind = (data.microbatch_size, data.longest), config.model.partition
    sent = (data.microbatch_size, config.longest) if config.slices else shape
    recomputed = recomputed_stages(config, placement.num_stages)
    parts: Sequence[float] = [0, *[1] * model.num_layers, 0]  # what a partition balances
    if kind in BY_COST:
        parts = model.part_sizes
        if kind == "measured" and num_stages > 1:
            autocast = autocast_of(config.autocast, device)
            measured = measure_model_costs(
                *(model, shape, device, autocast, config.optimizer), recompute=all(recomputed)
            )
            parts = times_to_balance(measured)
        partition = balance(parts, num_stages)
    else:
        partition = partition_layers(kind, model.num_layers, num_stages)
    messages = [*model.messages(partition, *sent), ()] * placement.directions  # () of a last stage
    weights = model.shared_weights(partition)
    together = [{stage for stage, _ in weight.owners} for weight in weights]
    if placement.directions > 1:  # all weights are shared by the copies of a stage, and the loss
        together += [{part} for part in range(num_stages)]
    sharing = [
        owners_of((s for part in of_one for s in placement.copies_of(part)), placement.ranks)
        for of_one in together
    ]
    totals = totals_of(parts, partition)
    return (
        partition,
        [total / max(sum(totals), 1e-30) for total in totals],
        messages[:-1],
        [ranks for ranks in sharing if len(ranks) > 1],
        model.task.example(*shape)[1].numel(),
    )


def autocast_of(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Entered for each forward; reentrant."""
    dtype = AUTOCAST[name]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def owners_of(stages: Iterable[int], rank_of: tuple[int, ...]) -> Ranks:
    """The ranks that own some of these stages, each once; `rank_of` has the rank of each stage."""
    return tuple(sorted({rank_of[stage] for stage in stages}))


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
