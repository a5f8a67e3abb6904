"""No pipeline: the whole model on one rank, one microbatch after the other.

    for each microbatch:  F  forward and loss    B  torch's own backward, in a training

It is the reference that a pipeline is compared with: plain torch, without stages, channels or an
executor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.connection import Agreement, autocast_of
from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.plan.action import Action, Op
from engine.plan.memory import Messages
from engine.plan.program import Program
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Trainer
from ppbench.config.case import Case
from ppbench.run.runtimes.trained import EngineRuntime, Stopwatch


class Unsplit(Stopwatch):
    """Runs the microbatches of a trainer that has one rank and one stage."""

    def __init__(self, trainer: Trainer, flight: Flight) -> None:
        super().__init__(trainer, flight)
        (self._module,) = trainer.modules.values()
        self._autocast = autocast_of(trainer.config.autocast, trainer.device)
        self._loss = trainer.model.task.loss
        self._lowered, self.peak_held = trainer.agreement.lowered, 1
        if not trainer.config.data.is_variable:
            self.messages = Messages((), ())

    @property
    def lowered(self) -> Program:
        return self._lowered

    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        self.begin(step, recording)
        if recording.has_spans:
            self.clock.begin()
        losses, trains = [], self._lowered.has_backward
        for microbatch, (inputs, targets) in enumerate(
            zip(batch.inputs, batch.targets, strict=True)
        ):
            forward, backward = (Action(0, op, microbatch) for op in (Op.F, Op.B))
            with torch.set_grad_enabled(trains):
                loss = self.perform(forward, self._forward, inputs, targets, batch.num_tokens)
            if trains:
                self.perform(backward, torch.autograd.backward, loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _forward(self, inputs: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        with self._autocast:
            (output,) = self._module(inputs)
        return self._loss(output, targets, num_tokens)


class SingleRuntime(EngineRuntime):
    """The trainer with the unsplit model."""

    def __init__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight = NO_FLIGHT
    ) -> None:
        super().__init__(case, agreement, fabric, flight, Unsplit)
