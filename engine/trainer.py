"""One configuration, ready to step: model, data, program, channels and optimizer put together.

step = zero gradients, run the program, sum the gradients over replicas and of shared weights, clip,
       optimizer
     = run the program, in an evaluation

What runs the program is the executor, unless another runner is handed in: then everything around it
is the same all the same, which is what makes runners comparable.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from engine.configuration import (
    TrainerConfig,
    data_of,
    edges_of,
    model_of,
    recomputed_stages,
    tokenizer_of,
)
from engine.connection import Agreement, Place, agree, autocast_of, owners_of
from engine.flight import NO_FLIGHT, Flight, Phase
from engine.model.data import StepBatch
from engine.model.factory import seed_from
from engine.model.stage_module import Model, StageModule, gradient_message, message_bytes
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.memory import Messages
from engine.plan.messages import Edge
from engine.plan.program import Program
from engine.plan.sharded_bytes import NOTHING_SHARED
from engine.plan.spans import Span
from engine.run import device as devices
from engine.run.clock import HostClock
from engine.run.collective_lane import CollectiveLane, Collectives, HostLane, StreamLane
from engine.run.executor import Executor, StageRunner
from engine.run.issue_limit import IssueLimit
from engine.run.memory import MemoryPlan, MemoryUse, Owned, measure_memory
from engine.run.optimizer import build_optimizer, norm_over_ranks
from engine.run.p2p.fabric import Fabric, Ranks
from engine.run.progress import DeviceProgress
from engine.run.recomputation import recompute_layers
from engine.run.recording import Recording
from engine.run.rehearsal import rehearse
from engine.run.runner import Runner, StepMarks
from engine.run.shards import ParameterPiece, ReplicaGroup, Sharded, Shards, check_views
from engine.run.stage import Stage, compile_layers
from engine.shared_weights import SharedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Runner", "StepResult", "Trainer", "TrainerConfig", "agree"]

OPTIMIZER_ACTION = Action(NO_INDEX, Op.OPT, NO_INDEX)


@dataclass(frozen=True)
class StepResult:
    """One rank's results of a step; what is said of the step is of all replicas."""

    loss: float | None  # mean per token; on the rank of the last stage
    num_tokens: int  # targets that counted, over all microbatches
    learning_rate: float
    gradient_norm: float | None  # over all stages, before clipping; None where nothing is clipped
    spans: list[Span]  # empty where the step was run without
    early: frozenset[Action] = frozenset()  # receives that were there when the rank asked for them


@dataclass(frozen=True)
class IssuedStep:
    """A step that the host has issued; an accelerator may not have begun it."""

    loss: Tensor | None
    num_tokens: int
    learning_rate: float
    gradient_norm: Tensor | None
    marks: StepMarks


Build = Callable[["Trainer", Flight], Runner]
Share = Callable[["Trainer", SharedWeights, Flight], Shards]


class Stages(Protocol):
    """Makes a rank's stages and what they train on: `ModelStages`, or such as only take time."""

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """The stages by number, with their weights; none where they only take time."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """That of the data, if it is text of tokens."""

    def batch(self, step: int) -> StepBatch:
        """What this rank needs of a step's batch."""

    def runner(self, trainer: Trainer, flight: Flight) -> Runner:
        """Make what runs the microbatches, of a trainer that is complete but for that."""

    def close(self) -> None:
        """Give back what it holds."""


class Trainer:
    """This rank's part of a pipeline, or of one of its replicas.

    Stages without modules have no gradients, no optimizer and no loss; all else is the same.

    The first `config.num_processes` processes of the default group build one each, with what
    `agree` returned, and call the same methods with the same numbers. One alone communicates
    nothing and needs no process group.

    Raises ModelError or DataError before anything runs.
    """

    def __init__(
        self,
        agreement: Agreement,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
        build: Build | None = None,
        share: Share | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Connect the rank's stages with those of the others: collective where there are several.

        `build` makes what runs the microbatches, given all but that; None: the stages do. `share`
        makes, before that, what replicas share of the modules; None: `shards_of`. `stages` are the
        rank's; None: those of the model are made here.
        """
        config = self.config = agreement.config
        self.agreement = agreement
        place = Place.of(config)
        self.process, self.replica, self.rank = place.process, place.replica, place.rank
        self.everyone, self.pipeline = place.everyone, place.pipeline
        self.counterparts = place.counterparts
        self.fabric, self.device = fabric, fabric.device
        self.partition, self.messages = agreement.partition, agreement.messages
        self.stages = ModelStages(agreement, fabric) if stages is None else stages
        self.modules, self.tokenizer = self.stages.modules, self.stages.tokenizer
        weights = self.model.shared_weights(self.partition) if self.modules else ()
        placement = agreement.lowered.placement
        self.shared = SharedWeights(weights, self.modules, placement, self.rank)
        self._ends = owners_of(placement.copies_of(placement.depth - 1), placement.ranks)
        self.shards: Shards | None = None
        if self.modules and config.replicas > 1 and config.trains:
            self.shards = (share or shards_of)(self, self.shared, flight)
        recomputed = recomputed_stages(config, placement.num_stages)
        for stage, module in self.modules.items():
            if not config.trains:
                module.eval()
            if recomputed[stage]:
                recompute_layers(module)
            if config.compile:
                compile_layers(module)
        self._progress: DeviceProgress | None = None  # the host is no further than the CPU
        if flight is not NO_FLIGHT and devices.is_accelerator(self.device):
            self._progress = DeviceProgress(flight, self.device)
            self._progress.watch()
        if build is not None and config.replicas == 1 and _rehearses(self):
            # Another runner's backward may be split by torch itself: stages are rehearsed whole.
            _rehearse(self, {s: _stage_of(self, s, is_whole=True) for s in self.modules})
        self.runner = (build or self.stages.runner)(self, self._progress or flight)
        trained = list(self.trained().values()) if config.trains else []
        self.optimizer = build_optimizer(config.optimizer, trained)
        self._gradient_norm: Tensor | None = None
        self._own_squares: Tensor | None = None  # of this rank's gradients, before clipping

    @functools.cached_property
    def model(self) -> Model:
        """The whole model, without weights. An emulated rank need not open it."""
        return model_of(self.config, self.device)

    @property
    def lowered(self) -> Program:
        """The program of the step with its transfers, as it is run; read after the first step."""
        return self.runner.lowered

    @property
    def program(self) -> Program:
        """The computations of the step, as they are run."""
        return self.lowered.compute_only()

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        """Train on the batch of step `step`; returns when its work is done on this rank.

        What is trained does not depend on `recording`.
        """
        (result,) = self.steps([step], recording)
        return result

    def steps(
        self, numbers: Iterable[int], recording: Recording = Recording.spans
    ) -> list[StepResult]:
        """Train on these batches, one right after the other; returns when the last is done here.

        An accelerator is waited for once, after the last of them.
        """
        return self.read([self.issue(number, recording) for number in numbers])

    def issue(self, step: int, recording: Recording = Recording.spans) -> IssuedStep:
        """Run a step as far as the host has a part in it. Does not wait for an accelerator."""
        loss, num_tokens = self._accumulate_gradients(step, recording)
        rate = self.config.optimizer.learning_rate_at(step)
        if self.modules and self.config.trains:
            self.runner.enter(Phase.UPDATES)
            self._measure_norm()
            self.runner.perform(OPTIMIZER_ACTION, self._update, rate)
        marks = self.runner.end_step(step)
        return IssuedStep(loss, num_tokens, rate, self._gradient_norm, marks)

    def read(self, issued: Iterable[IssuedStep]) -> list[StepResult]:
        """Return the results of all steps since the last reading. Blocks until they are done."""
        self._wait()
        results = []
        for step in issued:
            spans, early = step.marks.read(self.fabric.clock)
            loss = None if step.loss is None else step.loss.item()
            norm = None if step.gradient_norm is None else float(step.gradient_norm)
            rest = step.num_tokens, step.learning_rate, norm, spans, early
            results.append(StepResult(loss, *rest))
        return results

    def _wait(self) -> None:
        """Block until the device has done what was issued; the flight record then tells so."""
        self.fabric.clock.end()
        if self._progress is not None:
            self._progress.catch_up()

    def find_not_finite(self, *, has_weights: bool = False) -> str | None:
        """Name what was not finite on this rank in the last step; None if all was finite.

        Its gradients as they were before clipping; `has_weights`: its weights as well. Where
        gradients are clipped their norm is known already, else this reads each of them once. Not
        collective, and no part of a step: the caller decides when it may take its time.
        """
        squares, trained = self._own_squares, self.trained()
        if squares is not None and not bool(torch.isfinite(squares)):
            return "gradient norm"
        looked_at: dict[str, dict[str, Tensor]] = {}
        if squares is None:
            gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
            looked_at["gradient"] = gradients
        if has_weights:
            looked_at["weight"] = dict(trained)
        for what, tensors in looked_at.items():
            if not _are_finite(tensors.values()):
                names = (name for name, tensor in tensors.items() if not _are_finite([tensor]))
                return f"{what} of {next(names)}"
        return None

    def measure_memory(self, step: int) -> MemoryUse | None:
        """The memory of one more step of training, run under the device's memory accounting.

        None where the stages only take time; no step is run then.
        """
        if not self.modules:
            return None
        self._zero_gradients()
        messages = self.runner.messages
        shared = NOTHING_SHARED if self.shards is None else self.shards.bytes_shared()
        plan = None
        if messages is not None and shared is not None:
            plan = MemoryPlan(self.lowered, self.rank, messages, shared)

        def owned() -> Owned:
            parameters = [*self.parameters().values(), *self.trained().values()]
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [] if self.optimizer is None else list(self.optimizer.state.values())
            state = [v for values in states for v in values.values() if isinstance(v, Tensor)]
            buffers = [b for module in self.modules.values() for b in module.buffers()]
            return Owned(parameters, gradients, state, buffers, list(self.runner.held_tensors()))

        # Memory is allocated when the host issues work: its clock tells which action that was for.
        self.fabric.clock.begin()  # of the channels
        with self.runner.timed_by(HostClock()):
            return measure_memory(self.device, lambda: self.step(step).spans, owned, plan)

    def batch(self, step: int) -> StepBatch:
        """What this rank needs of a step's batch."""
        return self.stages.batch(step)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their name in the unsplit model, each once.

        A head tied to the embeddings keeps its own name where the embeddings are on another rank.
        Where they are sharded, they have no memory between steps, and pieces of them are trained.
        """
        owned: dict[nn.Parameter, str] = {}
        for module in self.modules.values():
            for name, parameter in module.own_parameters().items():
                owned.setdefault(parameter, name)
        return {name: parameter for parameter, name in owned.items()}

    def gathered(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
        """Whole tensors by the names of `parameters`, such as all gradients or moments.

        `of` is asked about what is trained: a parameter or a piece of it. None where it has nothing
        of a parameter on any replica. Collective; blocks.
        """
        parameters = self.parameters()
        found = None if self.shards is None else self.shards.gathered(self.modules, of)
        return {name: of(p) if found is None else found[p] for name, p in parameters.items()}

    @property
    def peak_held(self) -> int:
        """The most microbatches whose activations this rank has held at once, in any step."""
        return self.runner.peak_held

    def close(self) -> None:
        """Give back the channels and the loader; the trainer is not used again."""
        self.stages.close()
        self.runner.close()
        if self._progress is not None:
            self._progress.close()
        if self.shards is not None:
            self.shards.close()

    def _accumulate_gradients(self, step: int, recording: Recording) -> tuple[Tensor | None, int]:
        batch = self.batch(step)
        if self.modules:
            self._zero_gradients()
            # Dropout is drawn anew for each step and rank, and the same when a run is resumed.
            is_cpu = self.device.type == "cpu"  # seeding a GPU too takes long where there is none
            seed = torch.default_generator.manual_seed if is_cpu else torch.manual_seed
            seed(seed_from(self.config.model.seed, step, self.process))
        loss = self.runner.run(step, batch, recording)
        if loss is not None and len(self._ends) > 1:  # each has seen some of the microbatches
            self._sum_over_ranks(loss, self._ends)
            loss = loss if self.rank == self.lowered.placement.ranks[-1] else None
        if self.modules:
            self.runner.enter(Phase.SUMS)
            if self.shards is not None:
                self.shards.sum_gradients()
            if loss is not None and len(self.counterparts) > 1:  # on the same rank of all replicas
                self.fabric.sum_over(loss, self.counterparts)
            if self.config.trains:
                # Blocks until the other owners are here. All end with the same sum, bit for bit.
                self.shared.sum_gradients(self._sum_over_ranks, self.pieces_of)
        return loss, batch.num_tokens

    def sum_copies(self, stage: int) -> None:
        """Sum the gradients of a stage with those of its copy. Blocks until the other is here."""
        self.shared.sum_copies(stage, self._sum_over_ranks, self.pieces_of)

    def _sum_over_ranks(self, tensor: Tensor, ranks: Ranks) -> None:
        self.fabric.sum_over(tensor, tuple(self.pipeline[rank] for rank in ranks))

    def _zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None
        if self.shards is not None:
            self.shards.begin_step()

    def _measure_norm(self) -> None:
        """Blocks until every rank is here, where gradients are clipped; else does nothing."""
        if self.config.optimizer.clip_norm == 0:
            return
        counted_elsewhere = self.shared.counted_elsewhere(self.pieces_of)
        gradients = [
            p.grad
            for p in self.trained().values()
            if p.grad is not None and id(p) not in counted_elsewhere
        ]
        self._gradient_norm = norm_over_ranks(gradients, self.device, self._sum_over_all)

    def _sum_over_all(self, tensor: Tensor) -> None:
        self._own_squares = tensor.clone()
        has_pieces = self.shards is not None and self.shards.sharded.optimizer
        processes = self.everyone if has_pieces else self.pipeline
        if len(processes) > 1:
            self.fabric.sum_over(tensor, processes)

    def _update(self, rate: float) -> None:
        if self.optimizer is not None:
            if self._gradient_norm is not None:
                largest, norm = self.config.optimizer.clip_norm, self._gradient_norm.squeeze()
                torch.nn.utils.clip_grads_with_norm_(list(self.trained().values()), largest, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        if self.shards is not None:
            self.shards.gather_updated()

    def pieces_of(self, parameter: nn.Parameter) -> list[ParameterPiece]:
        if self.shards is None:
            return [ParameterPiece.all_of(parameter)]
        return self.shards.pieces(parameter)

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer trains on this rank: parameters or pieces of them, by their names."""
        parameters = self.parameters().items()
        return {name: piece.own for name, p in parameters for piece in self.pieces_of(p)}

    def gather(self, ours: Any) -> list[Any]:
        """The object of each rank of all replicas, in order, on all of them. Collective; blocks."""
        if len(self.everyone) == 1:
            return [ours]
        return self.fabric.gather_objects(ours, self.everyone)


class ModelStages:
    """Makes a rank's stages of the model, and draws the batches that they train on."""

    def __init__(self, agreement: Agreement, fabric: Fabric) -> None:
        """Make the modules with their weights, and open the data.

        Raises ModelError or DataError, perhaps on one rank alone.
        """
        config, self._device = agreement.config, fabric.device
        self._place = Place.of(config)
        self._config = config
        model = model_of(config, self._device)
        self.tokenizer = tokenizer_of(config)
        self._data = data_of(config, model, self.tokenizer, self._device)
        partition = agreement.partition
        self.modules = {
            stage: model.build_stage(partition, stage % len(partition), self._device)
            for stage in agreement.lowered.placement.stages_of(self._place.rank)
        }

    def batch(self, step: int) -> StepBatch:
        """This replica's inputs and targets of a step, on the rank's device, where it needs them.

        The tokens that count are those of all replicas.
        """
        whole, size = self._data.step(step), self._config.data.num_microbatches
        own = slice(self._place.replica * size, (self._place.replica + 1) * size)
        nothing = (torch.empty(0),) * self._config.num_messages
        stages = self.modules.values()
        inputs = whole.inputs[own] if any(stage.is_first for stage in stages) else ()
        targets = whole.targets[own] if any(stage.is_last for stage in stages) else ()
        if slices := self._config.slices:
            inputs, targets = (
                tuple(part for one in each for part in one.split(slices, dim=1))
                for each in (inputs, targets)
            )
        return StepBatch(inputs or nothing, targets or nothing, whole.num_tokens).to(self._device)

    def runner(self, trainer: Trainer, flight: Flight) -> PipelineRunner:
        """Runs the stages as the program says."""
        stages = {index: _stage_of(trainer, index) for index in trainer.modules}
        if _rehearses(trainer):
            _rehearse(trainer, stages)
        limit = None
        if devices.is_accelerator(trainer.device):
            limit = IssueLimit(trainer.device, trainer.config.issue_ahead)
        parts = trainer.agreement, trainer.fabric, stages, flight, trainer.shards, limit
        sum_copies = trainer.sum_copies if trainer.config.replicas == 1 else None
        return PipelineRunner(*parts, sum_copies=sum_copies)

    def close(self) -> None:
        """End the loader's processes."""
        self._data.close()


class PipelineRunner(Executor):
    """The engine's own runner: an executor with channels of its own, which it opens and closes."""

    def __init__(
        self,
        agreement: Agreement,
        fabric: Fabric,
        stages: Mapping[int, StageRunner],
        flight: Flight = NO_FLIGHT,
        collectives: Collectives | None = None,
        issue_limit: IssueLimit | None = None,
        delays_ns: Mapping[Edge, int] | None = None,
        sum_copies: Callable[[int], None] | None = None,
    ) -> None:
        """Open the channels; collective over the ranks of the replica.

        `delays_ns`: by how much longer the messages of an edge shall take, for emulation.
        """
        config, place, program = agreement.config, Place.of(agreement.config), agreement.lowered
        messages = agreement.messages
        channels = fabric.open_channels(
            edges_of(program),
            tuple(place.pipeline[rank] for rank in program.placement.ranks),
            messages,
            config.num_messages,
            with_shapes=config.shapes_vary,
            delays_ns=delays_ns,
        )
        known = program, place.rank, stages, channels, fabric.clock, messages, flight
        super().__init__(*known, collectives, place.replica, issue_limit, sum_copies)
        if not (config.data.is_variable or config.slices):  # else the first tells not of others
            self.messages = Messages(
                [message_bytes(m) for m in messages],
                [message_bytes(gradient_message(m)) for m in messages],
                is_posted=fabric.transport not in ("memory", "gloo via host memory"),
                is_queued=fabric.transport == "gloo",
            )

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        if self._collectives is not None:
            self._collectives.close()


def _rehearses(trainer: Trainer) -> bool:
    asked = trainer.config.rehearses
    return devices.is_accelerator(trainer.device) if asked is None else asked


def _rehearse(trainer: Trainer, stages: Mapping[int, Stage]) -> None:
    """Run each stage's computations once, before a message is on its way; see `rehearsal`.

    Sharded parameters are gathered for it: every replica rehearses the same stages.
    """
    data, row = trainer.config.data, trainer.agreement.lowered.actions[trainer.rank]
    example = trainer.model.task.example(data.microbatch_size, trainer.config.longest)
    inputs, targets = (tensor.to(trainer.device) for tensor in example)
    for index, stage in stages.items():
        takes = None if stage.is_first else trainer.messages[index - 1]
        sends = None if stage.is_last else trainer.messages[index]
        ops = {action.op for action in row if action.stage == index}
        with _whole(trainer, index):
            rehearse(stage, takes, sends, (inputs, targets), ops)


@contextlib.contextmanager
def _whole(trainer: Trainer, stage: int) -> Iterator[None]:
    """Meanwhile the stage's parameters have their values, where they are sharded between steps."""
    shards = trainer.shards
    if shards is None or not shards.sharded.parameters:
        yield
        return
    shards.begin(Action(stage, Op.UNSHARD, NO_INDEX))
    shards.wait_for(stage)
    yield
    shards.begin(Action(stage, Op.RESHARD, NO_INDEX))
    shards.finish_step()


def shards_of(trainer: Trainer, shared: SharedWeights, flight: Flight) -> Shards:
    """The engine's own: buckets of parameters on a lane beside the executor."""
    config, fabric, device = trainer.config, trainer.fabric, trainer.device
    group = ReplicaGroup(fabric.group_of(trainer.counterparts), trainer.replica, config.replicas)
    lane: CollectiveLane = (
        StreamLane(device, fabric.clock, fabric.lane_stream())
        if group.is_on_stream
        else HostLane(trainer.rank, trainer.replica, flight)
    )
    parameters = {s: m.own_parameters().values() for s, m in trainer.modules.items()}
    if Sharded.by(config.sharding).optimizer:
        for module in trainer.modules.values():
            check_views(module)
    return Shards(parameters, shared.parameters(), config.sharding, group, lane)


def _stage_of(trainer: Trainer, index: int, *, is_whole: bool = False) -> Stage:
    config, module = trainer.config, trainer.modules[index]
    row = trainer.agreement.lowered.actions[trainer.rank]
    sends = None if module.is_last else trainer.messages[index]
    receives = None if module.is_first else trainer.messages[index - 1]
    autocast = autocast_of(config.autocast, trainer.device)
    has_split = any(action.op is Op.I and action.stage == index for action in row)
    is_split = has_split and not config.compile and not is_whole  # what is compiled is left whole
    return Stage(
        module,
        sends,
        autocast,
        loss=trainer.model.task.loss,
        receives=receives,
        is_split=is_split,
        keeps_shapes=not config.shapes_vary,
        has_backward=config.trains,
        slices=config.slices,
    )


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite, at the cost of reading each once.

    A sum is not finite if one of its elements is not, and adding up is as fast as reading. A sum of
    finite elements may overflow: then each element is looked at. Waits for the device.
    """
    some = [tensor.detach() for tensor in tensors]
    small = (torch.float16, torch.bfloat16)
    sums = [t.sum(dtype=torch.float32 if t.dtype in small else None) for t in some]
    if not sums or all(torch.stack([torch.isfinite(total) for total in sums]).tolist()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in some)
