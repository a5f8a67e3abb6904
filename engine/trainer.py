"""One configuration, ready to step: model, data, program, channels and optimizer put together.

step = zero gradients, run the program, sum the gradients of tied weights, optimizer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.model.data import Data, DataSpec, StepBatch
from engine.model.presets import PRESETS
from engine.model.split import ModelSpec, build_stage
from engine.plan.action import COMPUTE_OPS, NO_INDEX, Action, Op
from engine.plan.lower import Channel as Edge
from engine.plan.lower import channel_of, lower
from engine.plan.program import Program
from engine.plan.rules import check
from engine.plan.schedules.registry import build_program
from engine.plan.spans import Span
from engine.run.executor import Executor
from engine.run.memory import MemoryPeaks, measure_peaks
from engine.run.p2p import Fabric
from engine.run.stage import Stage

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
OPTIMIZER_ACTION = Action(NO_INDEX, Op.OPT, NO_INDEX)


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that decides what a step computes."""

    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    schedule: str = "1f1b"
    world_size: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-4


@dataclass(frozen=True)
class StepResult:
    """What one rank knows of a step."""

    loss: float | None  # mean per token; on the rank of the last stage
    spans: list[Span]


def connect(config: TrainerConfig, fabric: Fabric) -> None:
    """Make the communicators that a trainer of this configuration uses.

    Collective: every rank of the default process group calls it, also those that will not train.
    Raises what building the program raises.
    """
    if config.world_size > 1:
        lowered = lower(_checked_program(config))
        ranks = lowered.placement.ranks
        is_tied = PRESETS[config.model.preset].tie_word_embeddings
        fabric.connect(_edges(lowered), ranks, (ranks[0], ranks[-1]) if is_tied else None)


class Trainer:
    """This rank's part of a pipeline.

    The first `config.world_size` ranks of the default process group build one each, with the same
    configuration, after all ranks have called `connect`, and call `step` with the same numbers.
    With one rank nothing is communicated and neither a process group nor `connect` is needed.

    Raises UnknownScheduleError, ProgramError, PartitionError or DataError before anything runs.
    """

    def __init__(self, config: TrainerConfig, fabric: Fabric) -> None:
        self.config = config
        self.rank = dist.get_rank() if config.world_size > 1 else 0
        self.device = fabric.device
        self.program = _checked_program(config)
        lowered = lower(self.program)
        placement = self.program.placement
        self.modules = {
            stage: build_stage(config.model, stage, placement.num_stages, self.device)
            for stage in placement.stages_of(self.rank)
        }
        self._data = Data(config.data, next(iter(self.modules.values())).vocab_size)
        self._channels = fabric.open_channels(_edges(lowered), placement.ranks)
        self._clock = fabric.clock
        self._tied = [p for m in self.modules.values() if (p := m.tied_parameter()) is not None]
        self._tied_ranks = (placement.ranks[0], placement.ranks[-1])
        self._fabric = fabric
        self._executor = self._build_executor(lowered)
        self._optimizer = _build_optimizer(config, list(self.parameters().values()))

    def step(self, step: int) -> StepResult:
        """Train on the batch of step `step`; returns when its work is done on this rank."""
        loss = self._accumulate_gradients(step)
        self._executor.time_action(OPTIMIZER_ACTION, self._update)
        spans = self._executor.collect_spans(step)
        return StepResult(None if loss is None else loss.item(), spans)

    def compute_gradients(self, step: int) -> float | None:
        """The step without its optimizer: leaves the gradients in place, returns the loss."""
        loss = self._accumulate_gradients(step)
        self._executor.collect_spans(step)
        return None if loss is None else loss.item()

    def measure_memory(self, step: int) -> MemoryPeaks:
        """Peaks of one more step of training, run under the device's memory accounting."""
        self._zero_gradients()
        buffers = [b for module in self.modules.values() for b in module.buffers()]
        persistent = [*self.parameters().values(), *buffers, *self._optimizer_state()]
        return measure_peaks(self.device, lambda: self.step(step), persistent)

    def batch(self, step: int) -> StepBatch:
        """Inputs and targets of a step, on this rank's device."""
        batch = self._data.step(step)
        return StepBatch(batch.inputs.to(self.device), batch.targets.to(self.device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their name in the unsplit model.

        A head tied to the embeddings keeps its own name where the embeddings are on another rank.
        """
        return {
            name: parameter
            for module in self.modules.values()
            for name, parameter in module.own_parameters().items()
        }

    @property
    def peak_held(self) -> int:
        """The most microbatches whose activations this rank has held at once, in any step."""
        return self._executor.peak_held

    def close(self) -> None:
        """Give back the channels; the trainer is not used again."""
        for channel in self._channels.values():
            channel.close()

    def _accumulate_gradients(self, step: int) -> Tensor | None:
        batch = self.batch(step)
        self._zero_gradients()
        self._clock.begin_step()
        loss = self._executor.run(batch)
        self._sum_tied_gradients()
        return loss

    def _zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def _update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def _sum_tied_gradients(self) -> None:
        """Blocks until the other owner is here. Both end with the same sum, bit for bit."""
        for parameter in self._tied:
            assert parameter.grad is not None
            self._fabric.sum_over_pair(parameter.grad, self._tied_ranks)

    def _optimizer_state(self) -> Iterator[Tensor]:
        if self._optimizer is not None:
            for values in self._optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor))

    def _build_executor(self, lowered: Program) -> Executor:
        data = self.config.data
        hidden_size = next(iter(self.modules.values())).hidden_size
        return Executor(
            lowered,
            self.rank,
            {s: Stage(module, data.tokens_per_step) for s, module in self.modules.items()},
            self._channels,
            self._clock,
            (data.microbatch_size, data.seq_len, hidden_size),
            self.config.model.torch_dtype,
        )


def _checked_program(config: TrainerConfig) -> Program:
    program = build_program(config.schedule, config.world_size, config.data.num_microbatches)
    check(program)
    return program


def _edges(lowered: Program) -> list[Edge]:
    """Every channel of the program, in one order on all ranks."""
    transfers = (a for row in lowered.actions for a in row if a.op not in COMPUTE_OPS)
    return sorted({channel_of(transfer) for transfer in transfers})


def _build_optimizer(
    config: TrainerConfig, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """None for a rank that owns no parameters."""
    if not parameters:
        return None
    if config.optimizer not in OPTIMIZERS:
        raise ValueError(f'unknown optimizer "{config.optimizer}"; known: {", ".join(OPTIMIZERS)}')
    optimizer: torch.optim.Optimizer = OPTIMIZERS[config.optimizer](
        parameters, lr=config.learning_rate, fused=True
    )
    return optimizer
