"""Stages that only take time, for a trainer of a pipeline without a model.

Rank 0 looks at the model to know the size of every message; no rank holds weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from engine.configuration import edges_of
from engine.connection import Agreement
from engine.flight import Flight
from engine.model.data import StepBatch
from engine.model.stage_module import StageModule
from engine.plan.action import NO_INDEX, Action, Op
from engine.run.collective_lane import HostLane
from engine.run.emulation import (
    EmulatedCollectives,
    EmulatedDevice,
    EmulatedStage,
    Emulation,
    wake_on_time,
)
from engine.run.host import clock_identity, is_same
from engine.run.p2p.fabric import Fabric, Processes
from engine.run.p2p.shared_memory import MemoryChannel
from engine.run.runner import Arguments, Result
from engine.run.stage import Tensors
from engine.trainer import PipelineRunner, Trainer


class EmulatedStages:
    """Makes a rank's stages, which sleep as `Emulation` says and have no modules."""

    modules: Mapping[int, StageModule] = MappingProxyType({})
    tokenizer = None

    def __init__(self, agreement: Agreement, emulation: Emulation) -> None:
        config = agreement.config
        self._emulation = emulation
        # They are never read. As in training, the targets are those of all replicas.
        microbatches = (torch.empty(0),) * config.num_messages
        num_tokens = config.replicas * config.data.num_microbatches * agreement.num_targets
        self._batch = StepBatch(microbatches, microbatches, num_tokens)

    def batch(self, step: int) -> StepBatch:  # noqa: ARG002  # all are alike
        """Return what stands for the batch of any step."""
        return self._batch

    def runner(self, trainer: Trainer, flight: Flight) -> PipelineRunner:
        """Runs these stages; replicas meet in their collectives, over gloo, as copies do."""
        agreement, fabric, emulation = trainer.agreement, trainer.fabric, self._emulation
        program, messages = agreement.lowered, agreement.messages
        wake_on_time()  # before the lane's thread, which inherits it
        device = EmulatedDevice()
        stages = {
            stage: EmulatedStage(
                stage,
                messages[stage - 1] if stage else (),
                None if program.placement.is_last(stage) else messages[stage],
                emulation,
                device,
                trainer.replica,
            )
            for stage in program.placement.stages_of(trainer.rank)
        }
        collectives = None
        if trainer.config.replicas > 1:
            clocks = fabric.gather_objects(clock_identity(), trainer.counterparts)
            meeting = _Meeting(fabric, trainer.counterparts, clocks)
            lane = HostLane(trainer.rank, trainer.replica, flight)
            collectives = EmulatedCollectives(emulation, meeting.meet, lane, device)
        delays_ns = emulation.delays_ns(edges_of(program))
        parts = agreement, fabric, stages, flight, collectives
        if trainer.config.replicas > 1 or not program.has_collectives:
            return EmulatedRunner(device, *parts, delays_ns=delays_ns)
        clocks = fabric.gather_objects(clock_identity(), trainer.pipeline)
        meetings = {
            stage: _Meeting(
                fabric,
                tuple(trainer.pipeline[rank] for rank in owners),
                [clocks[rank] for rank in owners],
            )
            for stage in stages
            if len(owners := sorted(program.placement.owners_of(stage))) > 1
        }

        def sum_copies(stage: int) -> None:
            took_ns = emulation.collective_ns(Action(stage, Op.REDUCE_GRAD, NO_INDEX))
            device.meet(meetings[stage].meet, took_ns)

        return EmulatedRunner(device, *parts, delays_ns=delays_ns, sum_copies=sum_copies)

    def close(self) -> None:
        """Do nothing: they hold no resources."""


class EmulatedRunner(PipelineRunner):
    """Runs emulated stages; a span of theirs is as long as the emulated device took."""

    def __init__(self, device: EmulatedDevice, *parts: Any, **how: Any) -> None:
        """`device` is that of the stages; the rest is as for the engine's own."""
        super().__init__(*parts, **how)
        self._device = device

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work on the device, whose times are those of its span."""
        self._flight.work()
        result = self._in_range(action, work, *arguments)
        if self.recording.has_spans:
            self._timed.append((action, *self._device.latest_ns, 0))
        return result

    def _take(self, action: Action) -> Tensors:
        """Take an input; the device cannot begin before it had come."""
        tensors = super()._take(action)
        if (receive := self._receives.get(action)) is not None:
            channel, came_ns = self._channel_of[receive], time.monotonic_ns()
            self._device.hold_until(
                channel.came_ns if isinstance(channel, MemoryChannel) else came_ns
            )
        return tensors


class _Meeting:
    """Where a rank meets its counterparts in the other replicas, or who has copies of a stage."""

    def __init__(self, fabric: Fabric, members: Processes, clocks: Sequence[str | None]) -> None:
        """The members are connected; `clocks` are those of their machines."""
        self._group = fabric.group_of(members)
        self._is_one_clock = all(is_same(clocks[0], clock) for clock in clocks)

    def meet(self, came_ns: int | None = None) -> int:
        """Block until all of them are here; returns since when they are, on our clock.

        `came_ns`: since when this rank is; None: it comes now.

        What the message about it takes is no part of a collective's planned time. Where the
        clocks are not one, it is: then it is the time at which this rank knows.
        """
        latest = torch.tensor(time.monotonic_ns() if came_ns is None else came_ns)
        dist.all_reduce(latest, dist.ReduceOp.MAX, self._group)
        known_ns = time.monotonic_ns()
        return min(int(latest), known_ns) if self._is_one_clock else known_ns
