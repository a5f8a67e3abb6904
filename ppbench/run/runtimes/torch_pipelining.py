"""Runs a case on torch.distributed.pipelining: its schedules on the engine's stage modules.

Weights, data, loss, optimizer, clipping and the sum of shared gradients are the trainer's, and so
the same as the engine's. The order of actions, forward and backward of a stage, and the messages
are torch's. It is called as its users call it: one `step` on the whole batch, which it cuts itself.

Cases that torch cannot run are refused earlier (`ppbench.config.feasibility`). Here all messages
between two ranks share one queue per direction, over NCCL all of a rank one stream, whose order the
ranks must agree on; for schedules whose transfers torch has placed, that is proved before they run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from engine.connection import Agreement, autocast_of
from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.model.stage_module import Message, StageModule
from engine.plan.action import Action
from engine.plan.check import prove_no_deadlock
from engine.plan.memory import Messages
from engine.plan.program import Program
from engine.plan.spans import Span
from engine.plan.walk import Sharing
from engine.run.clock import Clock
from engine.run.device import is_accelerator
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.run.runner import StepMarks
from engine.trainer import Trainer
from ppbench.config.case import Case
from ppbench.config.feasibility import TORCH_SCHEDULES
from ppbench.run.runtimes.runtime import RefusalError
from ppbench.run.runtimes.torch_replicas import TorchShards, torch_shards_of
from ppbench.run.runtimes.torch_spans import Instrument, RecordedStep, program_from, program_of
from ppbench.run.runtimes.trained import EngineRuntime, Stopwatch


def proved_program(schedule: Any, transport: str) -> Program | None:
    """Return the program of a schedule whose transfers torch has placed; None for the others.

    Over gloo the transfers from one rank to another keep an order. NCCL has a stream for each
    communicator, on which a transfer waits for those before it: torch uses one for the batches of a
    rank, and, in newer versions, one for two ranks where a batch has one direction. What ends with
    one for all of a rank ends with more of them too.

    Raises ProgramError for a program that can hang on the transport.
    """
    program = program_of(schedule)
    if program is not None:
        is_over_gloo = transport == "memory" or "gloo" in transport
        prove_no_deadlock(program, Sharing.RANK_EDGE if is_over_gloo else Sharing.RANK)
    return program


@dataclass(frozen=True)
class TorchStepMarks(StepMarks):
    """The marks of a step, with those taken inside torch's schedule."""

    recorded: RecordedStep

    def read(self, clock: Clock) -> tuple[list[Span], frozenset[Action]]:
        spans, early = self.recorded.read(clock, self.step)
        return [*spans, *super().read(clock)[0]], early


class TorchPipeline(Stopwatch):
    """Runs the microbatches of a trainer with torch's schedule of the same name."""

    def __init__(self, trainer: Trainer, flight: Flight) -> None:
        super().__init__(trainer, flight)
        self._trainer = trainer
        self._num_tokens = 0
        self._stages = [_stage_of(trainer, index) for index in sorted(trainer.modules)]
        config = trainer.config
        kind = get_schedule_class(TORCH_SCHEDULES[config.schedule])
        owned = self._stages if issubclass(kind, PipelineScheduleMulti) else self._stages[0]
        self.schedule: Any = kind(
            owned, config.data.num_microbatches, loss_fn=self._loss, scale_grads=False
        )
        self._instrument = Instrument(
            self.schedule, self.clock, trainer.replica, self.work, self.come_to_next
        )
        self._program = proved_program(self.schedule, trainer.fabric.transport)
        if trainer.config.replicas > 1:
            self._program = None  # what torch has done of its collectives is known when it has run
        # Receive buffers are made once and stay; sent tensors are kept until the step is over.
        none = [0] * len(trainer.messages)
        self.messages = Messages(none, none, is_posted=True, is_queued=False)

    @property
    def lowered(self) -> Program:
        assert self._program is not None, "known after the first step only"
        return self._program

    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        self.begin(step, recording)
        self._num_tokens = batch.num_tokens
        self._instrument.clock = self.clock
        self._instrument.start_step(has_ranges=recording.has_ranges)
        losses: list[Tensor] = []
        inputs = [torch.cat(batch.inputs)] if self._stages[0].is_first else []
        targets = torch.cat(batch.targets) if self._stages[-1].is_last else None
        try:
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        except Exception as error:
            self._instrument.remove()
            if (cause := error.__cause__) is None:
                raise
            # The stage's own error, such as running out of memory, which torch has wrapped.
            error.__cause__ = None  # each would be the cause of the other
            raise cause from error
        return torch.stack(losses).sum().detach() if losses else None

    def end_step(self, step: int) -> StepMarks:
        marks = super().end_step(step)
        recorded = self._instrument.end_step()
        self.peak_held = max(self.peak_held, recorded.peak_held)
        if self._program is None:  # blocks until every rank is here, once
            rows = self._trainer.gather(recorded.row)[: self._trainer.config.world_size]
            self._program = program_from(self.schedule, rows)
        if not self.recording.has_spans:
            return marks
        return TorchStepMarks(marks.step, marks.rank, marks.replica, marks.actions, recorded)

    def held_tensors(self) -> Iterable[Tensor]:
        """Return the receive buffers of every microbatch, which exist from the first step on."""
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    buffer = getattr(info, "buffer", None)
                    if buffer is not None:
                        yield buffer

    def close(self) -> None:
        self._instrument.remove()

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self._trainer.model.task.loss(output, targets, self._num_tokens)


class TorchRuntime(EngineRuntime):
    """The trainer with one of torch's schedules."""

    def __init__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight = NO_FLIGHT
    ) -> None:
        if is_accelerator(fabric.device) and "gloo" in fabric.transport:
            raise RefusalError(
                'runtime "torch" sends what is on a GPU by NCCL, which needs a GPU for each rank; '
                'run fewer ranks, or runtime = "engine", which goes through host memory'
            )
        super().__init__(case, agreement, fabric, flight, TorchPipeline, share_by_torch)


class _Submodule(nn.Module):
    """A stage as torch needs it: it returns a tensor or a tuple, of the dtypes agreed on."""

    def __init__(self, module: StageModule, sends: Message | None, autocast: Any) -> None:
        super().__init__()
        self.module, self._sends, self._autocast = module, sends, autocast

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with self._autocast:
            outputs: tuple[Tensor, ...] = self.module(*inputs)
        if self._sends is None:
            return outputs[0]
        casts = (o.to(spec.dtype) for o, spec in zip(outputs, self._sends, strict=True))
        return tuple(_Unviewed.apply(cast) if cast._is_view() else cast for cast in casts)


class _Unviewed(torch.autograd.Function):
    """Returns the same memory, but not as a view.

    After the first half of a backward torch detaches a stage's sent tensors in place, and refuses
    views there ("Can't detach views").
    """

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _Stage(PipelineStage):
    """torch's stage, with contiguous messages, since gloo refuses others."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return _contiguous(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return _contiguous(super().get_bwd_send_ops(bwd_chunk_id))


def _contiguous(operations: list[P2POp]) -> list[P2POp]:
    for operation in operations:
        operation.tensor = operation.tensor.contiguous()  # copies only those that are not
    return operations


def _stage_of(trainer: Trainer, index: int) -> PipelineStage:
    """Build torch's stage. Given the shapes of messages, torch need not run the model for them."""
    config, module, device = trainer.config, trainer.modules[index], trainer.device
    sends, shards = None if module.is_last else trainer.messages[index], trainer.shards
    shape = (config.data.microbatch_size, config.data.longest)
    inputs, _ = trainer.model.task.example(*shape)
    output = trainer.model.output(*shape)
    return _Stage(
        shards.submodules[index]
        if isinstance(shards, TorchShards)
        else _submodule_of(trainer, index),
        index,
        trainer.agreement.lowered.num_stages,
        device,
        input_args=(
            (inputs.to("meta"),) if module.is_first else _examples(trainer.messages[index - 1])
        ),
        output_args=_examples((output,) if sends is None else sends),
        group=trainer.fabric.group_of(trainer.pipeline),
    )


def _submodule_of(trainer: Trainer, index: int) -> nn.Module:
    module = trainer.modules[index]
    sends = None if module.is_last else trainer.messages[index]
    return _Submodule(module, sends, autocast_of(trainer.config.autocast, trainer.device))


def _examples(message: Message) -> tuple[Tensor, ...]:
    """Return tensors without memory, with the shapes, dtypes and gradient flags of a message."""
    return tuple(
        torch.empty(
            spec.shape,
            dtype=spec.dtype,
            device="meta",
            requires_grad=spec.dtype.is_floating_point,
        )
        for spec in message
    )


share_by_torch = functools.partial(torch_shards_of, submodule_of=_submodule_of)
"""Makes what replicas share of the stages that torch runs."""
