"""Whether ranks train exactly: the author's module, unsplit, takes each of their steps as well.

    ranks    state | step 0: loss, norm, gradients, state | step 1 | ...
    rank 0   --->    the same step of the whole module, compared, and set to the ranks' state

The ranks run whatever is to be checked: any runtime, program, number of replicas and sharding
policy, with autocast or without. Every tensor of every rank is compared, even if several ranks hold
it. The first difference that is no rounding ends the comparison, by an error that names it. In an
evaluation, losses and unchanged weights are compared, and no rank may have a gradient.

A stage that draws random numbers begins each forward at a known state of its rank's generator. The
author's module is set to the same state where that stage's first layer is called. So it draws what
the ranks have drawn, in whatever order they computed their microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.configuration import TrainerConfig, data_of, model_of, tokenizer_of
from engine.connection import autocast_of
from engine.model.author import (
    TOLERANCE,
    Pair,
    author_module,
    distance,
    farthest,
    initial_weights,
    is_same,
    largest,
    pairs_of_gradients,
    train_unsplit,
)
from engine.model.data import StepBatch
from engine.model.stage_module import StageModule, first_line
from engine.model.storages import first_names
from engine.plan.action import Op
from engine.plan.program import Program
from engine.run.device import CPU, random_state, set_random_state
from engine.run.recording import Recording

NUM_STEPS = 4
_NO_MEMORY = "the unsplit module ran out of memory"
_MOST_OF_FREE = 0.8
Gather = Callable[[Any], Sequence[Any]]
"""Collective: gives on rank 0 what every rank gives, in order; elsewhere anything."""
Decide = Callable[[Callable[[], Any]], Any]
"""Collective: calls a function on rank 0; returns its result, or raises its error, everywhere."""


class InexactError(RuntimeError):
    """The ranks train differently from the author's module."""


class IncomparableError(RuntimeError):
    """This model cannot be compared; its training may be right."""


class NoRoomError(IncomparableError):
    """There is no room in memory for the comparison."""


class AuthorError(IncomparableError):
    """The author's module itself fails when it is called unsplit."""


class Trained(Protocol):
    """A rank's part of a training: a `Trainer`, or a runtime of ppbench."""

    @property
    def modules(self) -> Mapping[int, StageModule]: ...
    @property
    def lowered(self) -> Program: ...
    def step(self, step: int, recording: Recording) -> Any: ...
    def gathered(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]: ...


@dataclass
class Part:
    """What one rank holds after a step, or before the first: tensors by their unsplit names."""

    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    loss: float | None = None
    norm: float | None = None
    draws: dict[tuple[str | None, int], Tensor] = field(default_factory=dict)
    """The random state where a stage began a microbatch that draws random numbers: by the submodule
    of the unsplit module that the stage begins with, and the microbatch."""
    is_ordered: bool = True  # whether each stage has taken the microbatches in their order
    is_one_way: bool = True  # whether each stage has taken all microbatches
    conflict: str = ""  # what two stages of the rank hold with different values


@dataclass
class Exactness:
    """A comparison has found this: the largest relative difference, and what it did not cover."""

    difference: float = 0.0
    num_gradients: int = 0  # of the model, each once
    notes: list[str] = field(default_factory=list)  # what was not compared, and why
    is_on_text: bool = True  # rather than on a factory's own batches


def try_author(config: TrainerConfig, device: torch.device, free_bytes: float) -> None:
    """Train the author's module on one microbatch, where all of a comparison has room.

    Tensors of the model's size that exist at once: weights, gradients and AdamW's two moments, of
    the author's module and of each replica, and what the ranks send of each step. Raises
    AuthorError, NoRoomError.
    """
    try:
        model = model_of(config, CPU)  # a trace runs the author's code
        size = model.num_parameters * config.model.torch_dtype.itemsize
        needed = size * (4 + 8 * config.replicas)
        if has_room := needed <= _MOST_OF_FREE * free_bytes:
            batch = data_of(config, model, tokenizer_of(config), CPU).step(0).to(device)
            first = StepBatch(batch.inputs[:1], batch.targets[:1], batch.num_tokens)
            module, criterion = author_module(config.model, device)
            autocast = autocast_of(config.autocast, device)
            module.train(config.trains)
            with torch.set_grad_enabled(config.trains):
                train_unsplit(module, first, autocast, criterion)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NoRoomError(_NO_MEMORY) from error
    except Exception as error:  # a user's module may raise anything
        raise AuthorError(f"{type(error).__name__}: {first_line(error)}") from error
    if not has_room:
        gib = [f"{num_bytes / 2**30:.1f}" for num_bytes in (needed, free_bytes)]
        raise NoRoomError(f"it needs about {gib[0]} GiB of memory, and {gib[1]} are free")


def compare(
    trained: Trained,
    config: TrainerConfig,
    device: torch.device,
    *,
    gather: Gather = lambda ours: [ours],
    decide: Decide = lambda work: work(),
    num_steps: int = NUM_STEPS,
) -> Exactness:
    """Train some steps, and the same ones of the author's module on rank 0. Collective.

    Raises InexactError or IncomparableError on all ranks alike.
    """
    parts = gather(_part_of(trained))
    author: _Author | None = None  # on rank 0

    def take(number: int) -> Exactness:
        """Take a step on rank 0; at first, make the author's module."""
        nonlocal author
        try:
            if author is None:
                author = _Author(config, parts, device)
            else:
                author.step(number, parts)
        except (InexactError, IncomparableError):
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise NoRoomError(_NO_MEMORY) from error
        except Exception as error:  # a user's module may raise anything
            step = f"in step {number}, which the ranks have taken" if author else "where it is made"
            raise InexactError(
                f"the author's module fails {step}: {type(error).__name__}: {first_line(error)}"
            ) from error
        return author.exactness

    exactness: Exactness = decide(functools.partial(take, -1))
    for number in range(num_steps):
        parts = gather(_part_after(trained, number, device))
        exactness = decide(functools.partial(take, number))
    return exactness


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True).contiguous()


def _part_of(trained: Trained) -> Part:
    """A rank's weights and buffers, each whole, also where the rank keeps a shard of it alone."""
    whole = trained.gathered(lambda own: own)
    part = Part({})
    for module in trained.modules.values():
        for name, tensor in module.own_state().items():
            is_here = type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage().nbytes()
            held = _copy(tensor if is_here else whole.get(name))
            if held is not None and not is_same(held, part.state.setdefault(name, held)):
                part.conflict = part.conflict or name
    return part


def _part_after(trained: Trained, number: int, device: torch.device) -> Part:
    """Take a step on a rank; return what it holds then, and where it has drawn random numbers."""
    draws: dict[tuple[int, int], Tensor] = {}  # by stage, and the number of its forward
    counts: Counter[int] = Counter()
    states: list[Tensor] = []  # of the current forward: at its beginning, and at the entrance

    def begin(*_: object) -> None:
        states[:] = [random_state(device)]

    def enter(*_: object) -> None:
        if len(states) == 1:  # not where a recomputation enters it again
            states.append(random_state(device))

    def end(stage: int, *_: object) -> None:
        if not torch.equal(states[0], random_state(device)):
            draws[stage, counts[stage]] = states[-1]
        counts[stage] += 1

    with contextlib.ExitStack() as hooks:
        for stage, module in trained.modules.items():
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(functools.partial(end, stage)).remove)
            if module.units and not module.is_first:
                hooks.callback(module.units[0].register_forward_pre_hook(enter).remove)
        result = trained.step(number, Recording.flight_only)
    order: dict[int, list[int]] = {}  # the microbatches of each stage, as its forwards come
    for action in itertools.chain.from_iterable(trained.lowered.actions):
        if action.op is Op.F:
            order.setdefault(action.stage, []).append(action.microbatch)
    part = _part_of(trained)
    part.is_one_way = trained.lowered.placement.directions == 1
    part.is_ordered = part.is_one_way and all(row == sorted(row) for row in order.values())
    part.gradients = {n: _copy(g) for n, g in trained.gathered(lambda own: own.grad).items()}
    part.loss, part.norm = result.loss, result.gradient_norm
    part.draws = {
        (trained.modules[stage].entrance, order[stage][count]): state
        for (stage, count), state in draws.items()
    }
    return part


def _pair_of(what: str, told: float | None, expected: float) -> Pair:
    ours, theirs = (
        None if number is None else torch.tensor(number, dtype=torch.float64)
        for number in (told, expected)
    )
    return what, ours, theirs, abs(expected)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, and the buffers that a checkpoint has, by all their names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    every = {**module.state_dict(keep_vars=True), **named}
    return {name: tensor for name, tensor in every.items() if isinstance(tensor, Tensor)}


class _Author:
    """Rank 0's side: the author's module, which is set to the ranks' weights before each step."""

    def __init__(self, config: TrainerConfig, parts: Sequence[Part], device: torch.device) -> None:
        """Make the module and compare initial weights. Raises InexactError."""
        self.exactness = Exactness()
        self._config, self._device = config, device
        model = model_of(config, CPU)
        self._data = data_of(config, model, tokenizer_of(config), CPU)
        self.exactness.is_on_text = model.task.vocab_size is not None
        self._kind = "bfloat16" if config.autocast == "bfloat16" else config.model.dtype
        self._drawn: set[tuple[int, bytes]] = set()
        module, self._criterion = author_module(config.model, device)
        self._module = module
        module.train(config.trains)
        initial = initial_weights(config.model, module, device)
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            self.exactness.notes.append("the router's auxiliary loss, which is not trained")
        self._tensors = _tensors_of(module)
        self._canonical = first_names(self._tensors.items())
        spec = config.optimizer
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(module.parameters(), weight_decay=spec.weight_decay)
            if spec.name == "adamw"
            else torch.optim.SGD(module.parameters(), momentum=spec.momentum)
        )
        self._before = self._load(parts, initial)

    def step(self, number: int, parts: Sequence[Part]) -> None:
        """Take a step that the ranks have taken. Raises InexactError for a difference."""
        config, module, where = self._config, self._module, f" in step {number}"
        for group in self._optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate_at(number)
        batch = self._data.step(number).to(self._device)
        before = random_state(self._device)
        trains = config.trains
        with torch.set_grad_enabled(trains), self._drawing_as(parts, where) as has_drawn:
            autocast = autocast_of(config.autocast, self._device)
            loss = train_unsplit(module, batch, autocast, self._criterion)
        self._tensors = _tensors_of(module)  # a forward may put others in their place
        if not has_drawn and not torch.equal(before, random_state(self._device)):
            raise InexactError(
                f"the author's module draws random numbers{where}, as dropout does, and no rank "
                "draws any"
            )
        told: list[float | None] = [part.loss for part in parts if part.loss is not None]
        numbers = [_pair_of(f"the loss{where}", one, loss) for one in told or [None]]
        if config.optimizer.clip_norm:
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_norm))
            what = f"the gradient norm{where}"
            numbers += [_pair_of(what, part.norm, norm) for part in parts]
        gradients = ((f"{p}{where}", n, g) for p, n, g in self._each(parts, "gradients"))
        apart = self._check(numbers, pairs_of_gradients(gradients, self._tensors, self._kind))
        self.exactness.difference = max(self.exactness.difference, apart)
        # The ranks' gradients, which differ by rounding only, are taken for the update: AdamW
        # divides by their size, so the rounding of one near 0 would become as large as a step.
        names = set()
        for _, name, gradient in self._each(parts, "gradients"):
            if trains:
                names.add(self._canonical[name])
            if gradient is not None:
                parameter = self._tensors[name]
                parameter.grad = gradient.to(parameter.device, parameter.dtype).clone()
        self.exactness.num_gradients = len(names)
        self._optimizer.step()
        self._check(self._updated(parts, where))
        self._before = self._load(parts, {})

    def _check(self, *every: Iterable[Pair]) -> float:
        """Return the largest difference. Raises InexactError, naming the worst of each kind."""
        found = [farthest(pairs) for pairs in every]
        tolerance = TOLERANCE[self._kind]
        if wrong := [text for apart, text in found if not apart <= tolerance]:
            raise InexactError(f"{'; '.join(wrong)}; at most {tolerance:g} is rounding")
        return max(apart for apart, _ in found)

    def _each(self, parts: Sequence[Part], kind: str) -> Iterator[tuple[str, str, Any]]:
        """Everything of a kind that the ranks hold: where it is, its name, and what it is."""
        size = self._config.world_size
        for process, part in enumerate(parts):
            replica = f" of replica {process // size}" if self._config.replicas > 1 else ""
            for name, value in getattr(part, kind).items():
                yield f"{name} on rank {process % size}{replica}", name, value

    def _load(self, parts: Sequence[Part], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set the author's module to the ranks' weights, which must agree, and be the initial ones.

        The ranks must hold every weight of the author's module, and no other. Equality is exact.
        Replicas may differ in buffers, and the first one's are taken. The copies of a stage in
        pipelines of two directions may differ so, too.
        """
        is_one_way = all(part.is_one_way for part in parts)
        for part in parts:
            if part.conflict:
                raise InexactError(f"{part.conflict} has another value on each stage of a rank")
        loaded: dict[str, tuple[str, Tensor]] = {}
        seen: dict[tuple[str, str], tuple[str, Tensor]] = {}
        for held, name, tensor in self._each(parts, "state"):
            if name not in self._tensors:
                raise InexactError(f"{held}: the author's module has no such weight")
            canonical = self._canonical[name]
            expected = initial.get(name, initial.get(canonical))
            if expected is not None and not is_same(tensor, expected):
                _, text = farthest([(f"{held} at the beginning", tensor, expected, 1.0)])
                raise InexactError(text)
            loaded.setdefault(canonical, (held, tensor))
            is_weight = isinstance(self._tensors[name], nn.Parameter)
            replica = "" if is_weight else held.partition(" of replica ")[2] if is_one_way else held
            place, other = seen.setdefault((canonical, replica), (held, tensor))
            if not is_same(tensor, other):
                raise InexactError(
                    f"{held} and {place} are one weight, and have different values: "
                    f"{largest(tensor):g} and {largest(other):g} are the largest"
                )
        if missing := [n for n, canonical in self._canonical.items() if canonical not in loaded]:
            raise InexactError(f"{missing[0]}: the author's module has it, and no rank does")
        with torch.no_grad():
            for name, (_, tensor) in loaded.items():
                self._tensors[name].copy_(tensor)
        return {name: tensor for name, (_, tensor) in loaded.items()}

    @contextlib.contextmanager
    def _drawing_as(self, parts: Sequence[Part], where: str) -> Iterator[bool]:
        """Set the random state, meanwhile, where a stage of the ranks begins in a forward."""
        draws: dict[str, dict[int, Tensor]] = {}
        size, num_microbatches = self._config.world_size, self._config.data.num_microbatches
        for process, part in enumerate(parts):
            for (entrance, microbatch), state in part.draws.items():
                if entrance is None:
                    raise IncomparableError("a stage draws random numbers outside its layers")
                if (drawn := (process, state.numpy().tobytes())) in self._drawn:
                    raise InexactError(
                        f"rank {process % size} draws the random numbers of an earlier forward "
                        f"again{where} (the stage that begins with {entrance or 'the model'})"
                    )
                self._drawn.add(drawn)
                number = process // size * num_microbatches + microbatch
                draws.setdefault(entrance, {})[number] = state
        calls: Counter[str] = Counter()

        def enter(entrance: str, *_: object) -> None:
            if (state := draws[entrance].get(calls[entrance])) is not None:
                set_random_state(state, self._device)
            calls[entrance] += 1

        with contextlib.ExitStack() as hooks:
            for entrance in draws:
                begin = functools.partial(enter, entrance)
                submodule = self._module.get_submodule(entrance)
                hooks.callback(submodule.register_forward_pre_hook(begin).remove)
            yield bool(draws)
        for entrance in draws:
            if calls[entrance] != self._config.replicas * num_microbatches:
                raise IncomparableError(
                    f"the model draws random numbers, and {entrance}, where a stage begins, is "
                    f"called {calls[entrance]} times in a step"
                )

    def _updated(self, parts: Sequence[Part], where: str) -> Iterator[Pair]:
        """Pair weights and buffers after the optimizer; rounding is relative to the change.

        A buffer that the order of microbatches changes, or that each replica has of its own, is
        not compared, and a note says so.
        """
        is_ordered = self._config.replicas == 1 and all(part.is_ordered for part in parts)
        notes = self.exactness.notes
        for held, name, tensor in self._each(parts, "state"):
            theirs = self._tensors[name].detach().cpu()
            if not (isinstance(self._tensors[name], nn.Parameter) or is_ordered):
                note = f"{name}, which depends on the order of microbatches"
                if note not in notes and not is_same(tensor, theirs):
                    notes.append(note)
                continue
            scale = distance(theirs, self._before[self._canonical[name]])  # how far it has moved
            if theirs.is_floating_point() or theirs.is_complex():
                eps = torch.finfo(theirs.dtype).eps
                scale += 8 * eps * largest(theirs) / TOLERANCE[self._kind]
            yield f"{held} after the update{where}", tensor, theirs, scale
