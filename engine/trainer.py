"""One configuration, ready to step: model, data, program, channels and optimizer put together.

step = zero gradients, run the program, sum the gradients of shared weights, clip, optimizer

What runs the program is the executor, unless another runner is handed in: then everything around it
is the same all the same, which is what makes runners comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.checkpoints import Checkpoints, Progress
from engine.configuration import (
    TrainerConfig,
    data_of,
    edges_of,
    is_open,
    lowered_of,
    messages_of,
    model_of,
    partition_of,
    recomputed_stages,
    tokenizer_of,
)
from engine.connection import autocast_of, connect
from engine.flight import NO_FLIGHT, Flight, Phase
from engine.model.data import StepBatch
from engine.model.stage_module import gradient_message, message_bytes
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.footprint import Messages
from engine.plan.program import Program
from engine.plan.spans import Span
from engine.run.clock import Clock, IssueClock
from engine.run.executor import Executor
from engine.run.finiteness import first_not_finite
from engine.run.memory import MemoryUse, Owned, Plan, measure_memory
from engine.run.optimizer import build_optimizer, norm_over_ranks
from engine.run.p2p.fabric import Fabric
from engine.run.recomputation import recompute_layers
from engine.run.recording import Recording
from engine.run.stage import Stage, compile_layers
from engine.shared_weights import Shared

__all__ = ["Progress", "Runner", "StepResult", "Trainer", "TrainerConfig", "connect"]

OPTIMIZER_ACTION = Action(NO_INDEX, Op.OPT, NO_INDEX)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class StepResult:
    """One rank's results of a step."""

    loss: float | None  # mean per token; on the rank of the last stage
    num_tokens: int  # targets that counted, over all microbatches
    learning_rate: float
    gradient_norm: float | None  # over all stages, before clipping; None where nothing is clipped
    spans: list[Span]  # empty where the step was run without
    early: frozenset[Action] = frozenset()  # receives that were there when the rank asked for them


class Runner(Protocol):
    """Runs a step's microbatches forward and backward on this rank: the executor, or others.

    It leaves the gradients of the step's mean loss per token in `.grad` of the trainer's modules.
    """

    @property
    def peak_held(self) -> int:
        """The most microbatches whose activations this rank has held at once, in any step."""

    @property
    def lowered(self) -> Program:
        """The program of all ranks, with transfers; known after the first step."""

    @property
    def messages(self) -> Messages | None:
        """What holds messages, and how long, for the prediction of memory; None: none is made."""

    def enter(self, phase: Phase) -> None:
        """Note what the rank comes to beside its actions."""

    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        """One step; returns its mean loss per token where the last stage is."""

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do work beside the microbatches as an action of the step that has just run."""

    def timed_by(self, clock: Clock) -> AbstractContextManager[None]:
        """Meanwhile this clock times the actions."""

    def collect_spans(self, step: int) -> list[Span]:
        """The spans of the step that has just run. Blocks until the device is done with it."""

    def held_tensors(self) -> Iterable[Tensor]:
        """What it keeps from step to step and may let go of within one."""

    def close(self) -> None:
        """Give back what it holds; it is not used again."""


Build = Callable[["Trainer", Flight], Runner]


class Trainer:
    """This rank's part of a pipeline.

    The first `config.world_size` ranks of the default process group build one each, with the
    configuration that `connect` returned, and call the same methods with the same numbers. With one
    rank nothing is communicated and neither a process group nor `connect` is needed.

    Raises UnknownScheduleError, ProgramError, ModelError, PartitionError or DataError before
    anything runs.
    """

    def __init__(
        self,
        config: TrainerConfig,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
        build: Build | None = None,
    ) -> None:
        """`build` makes what runs the microbatches, given all but that; None: the executor."""
        if config.world_size == 1 and is_open(config):
            config = connect(config, fabric)
        self.config = config
        self.rank = dist.get_rank() if config.world_size > 1 else 0
        self.device = fabric.device
        self.fabric = fabric
        self.lowered = lowered_of(config)
        placement = self.lowered.placement
        self.ranks = tuple(range(config.world_size))
        self.model = model_of(config, self.device)
        self.tokenizer = tokenizer_of(config)
        self._data = data_of(config, self.model, self.tokenizer, self.device)
        self.partition = partition_of(config, self.model, placement.num_stages)
        self.shared_weights = self.model.shared_weights(self.partition)
        self.messages = messages_of(config, self.model, self.partition)
        self.modules = {
            stage: self.model.build_stage(self.partition, stage, self.device)
            for stage in placement.stages_of(self.rank)
        }
        self._shared = Shared(self.shared_weights, self.modules, placement.ranks, self.rank)
        self._prepare_modules()
        self.runner: Runner = (build or _Executing)(self, flight)
        self._optimizer = build_optimizer(config.optimizer, list(self.parameters().values()))
        self._gradient_norm: Tensor | None = None
        self._own_squares: Tensor | None = None  # of this rank's gradients, before clipping

    @property
    def program(self) -> Program:
        """The computations of the step, as they are run."""
        return self.runner.lowered.compute_only()

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.config,
            self.model,
            self.tokenizer,
            self.modules,
            self._shared,
            self._optimizer,
            len(self.partition),
            self.rank,
            self.gather,
        )

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        """Train on the batch of step `step`; returns when its work is done on this rank.

        What is trained does not depend on `recording`.
        """
        loss, num_tokens = self._accumulate_gradients(step, recording)
        rate = self.config.optimizer.learning_rate_at(step)
        self.runner.enter(Phase.UPDATES)
        self._measure_norm()
        self.runner.perform(OPTIMIZER_ACTION, self._update, rate)
        spans = self.runner.collect_spans(step)
        norm = None if self._gradient_norm is None else float(self._gradient_norm)
        return StepResult(None if loss is None else loss.item(), num_tokens, rate, norm, spans)

    def compute_gradients(self, step: int) -> float | None:
        """The step without its optimizer: leaves the gradients in place, returns the loss."""
        loss, _ = self._accumulate_gradients(step, Recording.flight_only)
        self.runner.collect_spans(step)
        return None if loss is None else loss.item()

    def find_not_finite(self, *, has_weights: bool = False) -> str | None:
        """Name what was not finite on this rank in the last step; None if all was finite.

        Its gradients as they were before clipping; `has_weights`: its weights as well. Where
        gradients are clipped their norm is known already, else this reads each of them once. Not
        collective, and no part of a step: the caller decides when it may take its time.
        """
        was_clipped = self._own_squares is not None
        if was_clipped and not bool(torch.isfinite(cast(Tensor, self._own_squares))):
            return "gradient norm"
        return first_not_finite(
            self.parameters(), has_gradients=not was_clipped, has_weights=has_weights
        )

    def measure_memory(self, step: int) -> MemoryUse:
        """The memory of one more step of training, run under the device's memory accounting."""
        self._zero_gradients()
        with self.runner.timed_by(IssueClock(self.fabric.clock)):
            return measure_memory(
                self.device, lambda: self.step(step).spans, self._owned, self._find_plan()
            )

    def batch(self, step: int) -> StepBatch:
        """Inputs and targets of a step, on this rank's device."""
        return self._data.step(step).to(self.device)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their name in the unsplit model, each once.

        A head tied to the embeddings keeps its own name where the embeddings are on another rank.
        """
        owned: dict[nn.Parameter, str] = {}
        for module in self.modules.values():
            for name, parameter in module.own_parameters().items():
                owned.setdefault(parameter, name)
        return {name: parameter for parameter, name in owned.items()}

    def check_storable(self) -> None:
        """Collective. Raises SnapshotError on every rank if some weight could not be saved."""
        self._checkpoints.check_storable()

    def save(self, folder: Path, progress: Progress) -> Path:
        """Write a checkpoint into a folder of them; returns its own folder.

        Collective; blocks until it is whole. Raises SnapshotError on every rank.
        """
        return self._checkpoints.save(folder, progress)

    def resume(self, folder: Path, *, is_checked: bool = False) -> Progress:
        """Go on from a checkpoint, of whatever world size; returns how far it had come.

        `is_checked`: its checksums were compared before, which is otherwise done here. Collective;
        blocks. Raises SnapshotError on every rank alike when the checkpoint is not whole or of
        another model; then nothing has changed.
        """
        return self._checkpoints.resume(folder, is_checked=is_checked)

    @property
    def peak_held(self) -> int:
        """The most microbatches whose activations this rank has held at once, in any step."""
        return self.runner.peak_held

    def close(self) -> None:
        """Give back the channels and the loader; the trainer is not used again."""
        self._data.close()
        self.runner.close()

    def _accumulate_gradients(self, step: int, recording: Recording) -> tuple[Tensor | None, int]:
        batch = self.batch(step)
        self._zero_gradients()
        # Dropout is drawn anew for each step and rank, and the same when a run is resumed.
        is_cpu = self.device.type == "cpu"  # seeding a GPU too takes long where there is none
        seed = torch.default_generator.manual_seed if is_cpu else torch.manual_seed
        seed(_seed_of(self.config.model.seed, step, self.rank))
        loss = self.runner.run(step, batch, recording)
        self.runner.enter(Phase.SUMS)
        self._sum_shared_gradients()
        return loss, batch.num_tokens

    def _zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def _measure_norm(self) -> None:
        """Blocks until every rank is here, where gradients are clipped; else does nothing."""
        if self.config.optimizer.clip_norm == 0:
            return
        counted_elsewhere = self._shared.counted_elsewhere()
        gradients = [
            p.grad
            for p in self.parameters().values()
            if p.grad is not None and id(p) not in counted_elsewhere
        ]
        self._gradient_norm = norm_over_ranks(gradients, self.device, self._sum_over_all)

    def _sum_over_all(self, tensor: Tensor) -> None:
        self._own_squares = tensor.clone()
        if len(self.ranks) > 1:
            self.fabric.sum_over(tensor, self.ranks)

    def _update(self, rate: float) -> None:
        if self._optimizer is None:
            return
        if self._gradient_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                list(self.parameters().values()),
                self.config.optimizer.clip_norm,
                self._gradient_norm.squeeze(),
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _sum_shared_gradients(self) -> None:
        """Blocks until the other owners are here. All end with the same sum, bit for bit."""
        self._shared.sum_gradients(self.fabric.sum_over)

    def gather(self, ours: Any) -> list[Any]:
        """Every rank's object, in order of rank, on all of them. Collective; blocks."""
        if len(self.ranks) == 1:
            return [ours]
        return self.fabric.gather_objects(ours, self.ranks)

    def _owned(self) -> Owned:
        parameters = list(self.parameters().values())
        buffers = [b for module in self.modules.values() for b in module.buffers()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state, held = list(self._optimizer_state()), list(self.runner.held_tensors())
        return Owned(parameters, gradients, state, buffers, held)

    def _find_plan(self) -> Plan | None:
        messages = self.runner.messages
        return None if messages is None else Plan(self.runner.lowered, self.rank, messages)

    def _optimizer_state(self) -> Iterator[Tensor]:
        if self._optimizer is not None:
            for values in self._optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor))

    def _prepare_modules(self) -> None:
        recomputed = recomputed_stages(self.config, len(self.partition))
        for stage, module in self.modules.items():
            if recomputed[stage]:
                recompute_layers(module)
            if self.config.compile:
                compile_layers(module)


class _Executing(Executor):
    """The engine's own runner: an executor with channels of its own."""

    def __init__(self, trainer: Trainer, flight: Flight) -> None:
        config, fabric, self.lowered = trainer.config, trainer.fabric, trainer.lowered
        self._opened = fabric.open_channels(
            edges_of(self.lowered),
            self.lowered.placement.ranks,
            trainer.messages,
            config.data.num_microbatches,
            with_shapes=config.data.is_variable,
        )
        stages = {index: _stage_of(trainer, index) for index in trainer.modules}
        super().__init__(
            self.lowered,
            trainer.rank,
            stages,
            self._opened,
            fabric.clock,
            trainer.messages,
            flight,
        )
        self.messages = None if config.data.is_variable else _held_messages(trainer)

    def held_tensors(self) -> Iterable[Tensor]:
        return ()

    def close(self) -> None:
        for channel in self._opened.values():
            channel.close()


def _stage_of(trainer: Trainer, index: int) -> Stage:
    config, module = trainer.config, trainer.modules[index]
    row = trainer.lowered.actions[trainer.rank]
    sends = None if module.is_last else trainer.messages[index]
    receives = None if module.is_first else trainer.messages[index - 1]
    autocast = autocast_of(config.autocast, trainer.device)
    has_split = any(action.op is Op.I and action.stage == index for action in row)
    is_split = has_split and not config.compile  # what is compiled is left whole
    return Stage(module, sends, autocast, receives=receives, is_split=is_split)


def _held_messages(trainer: Trainer) -> Messages:
    """Not for shapes that vary: there the first microbatch does not tell what others cost."""
    forward_bytes = [message_bytes(m) for m in trainer.messages]
    backward_bytes = [message_bytes(gradient_message(m)) for m in trainer.messages]
    transport = trainer.fabric.transport
    return Messages(
        forward_bytes,
        backward_bytes,
        is_posted=transport in ("gloo", "nccl"),
        is_queued=transport == "gloo",
    )


def _seed_of(seed: int, step: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
