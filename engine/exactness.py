"""Whether ranks train exactly: the author's module, unsplit, takes each of their steps as well.

    ranks    state | step 0: loss, norm, gradients, state | step 1 | ...
    rank 0   --->    the same step of the whole module, compared, and set to the ranks' state

The ranks run whatever is to be checked: any runtime, program, number of replicas and sharding
policy, with autocast or without. Every tensor of every rank is compared, even if several ranks hold
it. The first difference that is no rounding ends the comparison, by an error that names it.

A stage that draws random numbers begins each forward at a known state of its rank's generator. The
author's module is set to the same state where that stage's first layer is called. So it draws what
the ranks have drawn, in whatever order they computed their microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.configuration import TrainerConfig, data_of, model_of, tokenizer_of
from engine.connection import autocast_of
from engine.model.author import (
    LEAST_SCALE,
    TOLERANCE,
    difference,
    initial_weights,
    is_same,
    largest,
    train_unsplit,
)
from engine.model.stage_module import StageModule, first_line
from engine.plan.action import Op
from engine.plan.program import Program
from engine.run.device import random_state, set_random_state
from engine.run.recording import Recording

NUM_STEPS = 4
CPU = torch.device("cpu")
Gather = Callable[[Any], Sequence[Any]]
"""Collective: what every rank gives, on rank 0, in order; elsewhere anything."""
Decide = Callable[[Callable[[], Any]], Any]
"""Collective: calls a function on rank 0; returns its result, or raises its error, everywhere."""


class InexactError(RuntimeError):
    """The ranks train differently from the author's module."""


class IncomparableError(RuntimeError):
    """This model cannot be compared; its training may be right."""


class Trained(Protocol):
    """A rank's part of a training: a `Trainer`, or a runtime of ppbench."""

    @property
    def modules(self) -> Mapping[int, StageModule]: ...
    @property
    def lowered(self) -> Program: ...
    def step(self, step: int, recording: Recording) -> Any: ...
    def gathered(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]: ...


@dataclass(frozen=True)
class Draw:
    """A stage's forward that has drawn random numbers."""

    stage: int
    number: int  # among the stage's forwards of the step
    entrance: str | None  # the submodule of the unsplit module that the stage begins with
    state: Tensor  # of the generator there


@dataclass
class Part:
    """What one rank holds after a step, or before the first: tensors by their unsplit names."""

    state: dict[str, Tensor]
    trains: dict[str, bool]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    loss: float | None = None
    norm: float | None = None
    draws: list[Draw] = field(default_factory=list)


@dataclass
class Exactness:
    """What has been compared."""

    difference: float = 0.0  # the largest, relative
    num_gradients: int = 0  # of the model, each once
    notes: list[str] = field(default_factory=list)  # what was not compared, and why


def compare(
    trained: Trained,
    config: TrainerConfig,
    make_author: Callable[[], nn.Module],
    device: torch.device,
    *,
    gather: Gather = lambda ours: [ours],
    decide: Decide = lambda work: work(),
    num_steps: int = NUM_STEPS,
) -> Exactness:
    """Train some steps, and the same ones of the author's module on rank 0. Collective.

    `config` is the one agreed on. Raises, on all ranks alike, InexactError, IncomparableError, and
    what the author's code raises.
    """
    parts = gather(_part_of(trained))
    begun: list[_Comparison] = []  # on rank 0

    def take(number: int) -> Exactness:
        """Take a step on rank 0; -1: make the author's module."""
        try:
            if number < 0:
                begun.append(_Comparison(config, make_author(), parts, device))
            else:
                begun[0].step(number, parts, trained.lowered)
        except (InexactError, IncomparableError):
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise IncomparableError("the unsplit module ran out of memory") from error
        except Exception as error:  # a user's module may raise anything
            raise InexactError(
                f"the author's module fails in step {number}, which the ranks have taken: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        return begun[0].exactness

    exactness: Exactness = decide(functools.partial(take, -1))
    for number in range(num_steps):
        with _drawing(trained.modules, device) as draws:
            result = trained.step(number, Recording.flight_only)
        gradients = {n: _copy(g) for n, g in trained.gathered(lambda own: own.grad).items()}
        part = _part_of(trained)
        parts = gather(
            Part(part.state, part.trains, gradients, result.loss, result.gradient_norm, draws)
        )
        exactness = decide(functools.partial(take, number))
    return exactness


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True).contiguous()


def _part_of(trained: Trained) -> Part:
    """A rank's weights and buffers, each whole, also where the rank keeps a shard of it alone."""
    whole = trained.gathered(lambda own: own)
    state: dict[str, Tensor | None] = {}
    trains: dict[str, bool] = {}
    for module in trained.modules.values():
        trains |= {name: p.requires_grad for name, p in module.own_parameters().items()}
        for name, tensor in module.own_state().items():
            is_here = type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage().nbytes()
            state[name] = _copy(tensor if is_here else whole.get(name))
    return Part({n: t for n, t in state.items() if t is not None}, trains)


@contextlib.contextmanager
def _drawing(modules: Mapping[int, StageModule], device: torch.device) -> Iterator[list[Draw]]:
    """Meanwhile the forwards of stages that draw random numbers are noted, in their order."""
    draws: list[Draw] = []
    numbers = dict.fromkeys(modules, 0)
    states: list[Tensor] = []  # of the current forward: at its beginning, and at the entrance

    def begin(*_: object) -> None:
        states[:] = [random_state(device)]

    def enter(*_: object) -> None:
        if len(states) == 1:  # not where a recomputation enters it again
            states.append(random_state(device))

    def end(stage: int, *_: object) -> None:
        if not torch.equal(states[0], random_state(device)):
            draws.append(Draw(stage, numbers[stage], modules[stage].entrance, states[-1]))
        numbers[stage] += 1

    with contextlib.ExitStack() as hooks:
        for stage, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(functools.partial(end, stage)).remove)
            if module.units and not module.is_first:
                hooks.callback(module.units[0].register_forward_pre_hook(enter).remove)
        yield draws


@contextlib.contextmanager
def _drawn_as(draw: Draw, module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set the random state where the stage of a draw begins in the author's module."""
    if draw.entrance is None:
        raise IncomparableError(f"stage {draw.stage} draws random numbers outside its layers")
    if not draw.entrance:
        set_random_state(draw.state, device)
        yield
        return
    calls = []

    def enter(*_: object) -> None:
        calls.append(draw)
        set_random_state(draw.state, device)

    handle = module.get_submodule(draw.entrance).register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise IncomparableError(
            f"the model draws random numbers, and {draw.entrance}, where a stage begins, is called "
            f"{len(calls)} times in a forward"
        )


class _Comparison:
    """Rank 0's side: the author's module, which is set to the ranks' weights before each step."""

    def __init__(
        self, config: TrainerConfig, module: nn.Module, parts: Sequence[Part], device: torch.device
    ) -> None:
        """Compare names and initial weights. Raises InexactError."""
        self.exactness = Exactness()
        self._config, self._module, self._device = config, module, device
        settings = getattr(module, "config", None)
        if getattr(settings, "output_router_logits", False):
            self.exactness.notes.append("the router's auxiliary loss, which is not trained")
        self._kind = "bfloat16" if config.autocast == "bfloat16" else config.model.dtype
        self._drawn: set[bytes] = set()
        named = dict(module.named_parameters(remove_duplicate=False))
        every = {**module.state_dict(keep_vars=True), **named}
        self._tensors = {name: t for name, t in every.items() if isinstance(t, Tensor)}
        first: dict[int, str] = {}
        self._canonical = {n: first.setdefault(id(t), n) for n, t in self._tensors.items()}
        spec = config.optimizer
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(module.parameters(), weight_decay=spec.weight_decay)
            if spec.name == "adamw"
            else torch.optim.SGD(module.parameters(), momentum=spec.momentum)
        )
        self._check_names(parts)
        self._before: dict[str, Tensor] = {}
        self._load(parts, initial_weights(config.model, module, device))
        model = model_of(config, CPU)
        self._data = data_of(config, model, tokenizer_of(config), CPU)

    def step(self, number: int, parts: Sequence[Part], lowered: Program) -> None:
        """Take a step that the ranks have taken. Raises InexactError for a difference."""
        config, module, where = self._config, self._module, f"in step {number}"
        for group in self._optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate_at(number)
        batch = self._data.step(number).to(self._device)
        draws = self._placed(parts, lowered, where)
        before = random_state(self._device)
        autocast = autocast_of(config.autocast, self._device)
        loss = train_unsplit(module, batch, autocast, draws)
        if not draws and not torch.equal(before, random_state(self._device)):
            raise InexactError(
                f"{where} the author's module draws random numbers, as dropout does, and no rank "
                "draws any"
            )
        clip_norm = config.optimizer.clip_norm
        norm = None
        if clip_norm:
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), clip_norm))
        worst = self._check_gradients(parts, where)
        losses = [part.loss for part in parts if part.loss is not None]
        for told in losses or (None,):
            self._check_number(f"loss {where}", told, loss, worst)
        for part in parts if norm is not None else ():
            self._check_number(f"gradient norm {where}", part.norm, norm or 0.0, worst)
        if worst:
            raise InexactError(worst)
        # The ranks' gradients, which differ by rounding only, are taken for the update: AdamW
        # divides by their size, so the rounding of one near 0 would become as large as a step.
        for _, name, gradient in self._each(parts, "gradients"):
            parameter = self._tensors[name]
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype).clone()
        self._optimizer.step()
        self._check_update(parts, lowered, where)
        self._load(parts, {})

    def _each(self, parts: Sequence[Part], kind: str) -> Iterator[tuple[str, str, Any]]:
        """Everything of a kind that the ranks hold: where it is, its name, and what it is."""
        size = self._config.world_size
        for process, part in enumerate(parts):
            replica = f" of replica {process // size}" if self._config.replicas > 1 else ""
            for name, value in getattr(part, kind).items():
                yield f"{name} on rank {process % size}{replica}", name, value

    def _check_names(self, parts: Sequence[Part]) -> None:
        """Check that the ranks hold every weight of the author's module, and no other."""
        owned = set()
        for held, name, _ in self._each(parts, "state"):
            if name not in self._tensors:
                raise InexactError(f"{held}: the author's module has no such weight")
            owned.add(self._canonical[name])
        for name, canonical in self._canonical.items():
            if canonical not in owned:
                raise InexactError(f"{name}: the author's module has it, and no rank does")
        for held, name, trains in self._each(parts, "trains"):
            expected = self._tensors[name].requires_grad
            if trains != expected:
                raise InexactError(
                    f"{held}: requires_grad is {trains}, in the author's module {expected}"
                )

    def _load(self, parts: Sequence[Part], initial: Mapping[str, Tensor]) -> None:
        """Set the author's module to the ranks' weights, which must agree, and be the initial ones.

        Equality is exact. Replicas may differ in buffers, of which the first one's are taken.
        """
        self._before, holder = {}, dict[str, str]()
        for held, name, tensor in self._each(parts, "state"):
            canonical = self._canonical[name]
            expected = initial.get(name, initial.get(canonical))
            if expected is not None and not is_same(tensor, expected):
                raise InexactError(f"{held} begins with {_both(tensor, expected)}")
            other = self._before.setdefault(canonical, tensor)
            holder.setdefault(canonical, held)
            is_weight = isinstance(self._tensors[name], nn.Parameter)
            if (is_weight or self._config.replicas == 1) and not is_same(tensor, other):
                raise InexactError(
                    f"{held} and {holder[canonical]} are one weight, and have different values: "
                    f"{largest(tensor):g} and {largest(other):g} are the largest"
                )
        with torch.no_grad():
            for name, tensor in self._before.items():
                self._tensors[name].copy_(tensor)

    def _placed(
        self, parts: Sequence[Part], lowered: Program, where: str
    ) -> dict[int, list[AbstractContextManager[None]]]:
        """For each microbatch of the step, what sets the random state where stages begin."""
        order = _forwards(lowered)
        placed: dict[int, list[tuple[int, AbstractContextManager[None]]]] = {}
        for process, part in enumerate(parts):
            first = process // self._config.world_size * self._config.data.num_microbatches
            for draw in part.draws:
                if (state := draw.state.numpy().tobytes() + bytes([process])) in self._drawn:
                    raise InexactError(
                        f"{where} rank {process % self._config.world_size} draws the random "
                        f"numbers of an earlier forward again (stage {draw.stage})"
                    )
                self._drawn.add(state)
                microbatch = first + order[draw.stage][draw.number]
                placing = draw.stage, _drawn_as(draw, self._module, self._device)
                placed.setdefault(microbatch, []).append(placing)
        by_stage = {m: sorted(some, key=lambda pair: pair[0]) for m, some in placed.items()}
        return {m: [placing for _, placing in some] for m, some in by_stage.items()}

    def _check_number(self, what: str, number: float | None, expected: float, worst: str) -> None:
        scale = max(abs(expected), torch.finfo(torch.float64).tiny)
        apart = float("inf") if number is None else abs(number - expected) / scale
        if number is not None and math.isnan(number) and math.isnan(expected):
            apart = 0.0
        if not apart <= TOLERANCE[self._kind]:
            also = f"; {worst}" if worst else ""
            raise InexactError(f"{what} is {number!r}; the author's module has {expected!r}{also}")
        self.exactness.difference = max(self.exactness.difference, apart)

    def _check_gradients(self, parts: Sequence[Part], where: str) -> str:
        """Describe the gradient that differs most; empty if none does."""
        tolerance, names = TOLERANCE[self._kind], set()
        gradients = [t.grad for t in self._tensors.values() if t.grad is not None]
        least = max(map(largest, gradients), default=0.0) * LEAST_SCALE[self._kind]
        most, text, num_wrong = 0.0, "", 0
        for held, name, gradient in self._each(parts, "gradients"):
            theirs = self._tensors[name].grad
            apart = difference(gradient, theirs, least)
            names.add(self._canonical[name])
            if apart <= tolerance:
                self.exactness.difference = max(self.exactness.difference, apart)
                continue
            num_wrong += 1
            if apart > most:
                most, text = apart, f"gradient of {held} {where}"
                if gradient is None or theirs is None:
                    sides = ("the rank", "the author's module")
                    has, lacks = sides[:: 1 if theirs is None else -1]
                    text += f": {has} has one, {lacks} has none"
                else:
                    text += f" is {apart:.1e} away: {_both(gradient, theirs)}"
        self.exactness.num_gradients = len(names)
        rest = f" ({num_wrong - 1} more gradients differ)" if num_wrong > 1 else ""
        return f"{text}{rest}; at most {tolerance:g} is rounding" if text else ""

    def _check_update(self, parts: Sequence[Part], lowered: Program, where: str) -> None:
        """Compare all weights and buffers after the optimizer; rounding is relative to the change.

        A buffer that the order of microbatches changes, or that each replica has of its own, is
        not compared, and a note says so.
        """
        forwards = _forwards(lowered).values()
        is_ordered = self._config.replicas == 1 and all(row == sorted(row) for row in forwards)
        for held, name, tensor in self._each(parts, "state"):
            theirs = self._tensors[name].detach()
            if is_same(tensor, theirs):
                continue
            if not (isinstance(self._tensors[name], nn.Parameter) or is_ordered):
                note = f"{name}, which depends on the order of microbatches"
                if note not in self.exactness.notes:
                    self.exactness.notes.append(note)
                continue
            before = self._before[self._canonical[name]]
            change = largest(_widened(theirs.cpu()) - _widened(before))
            is_whole = not (theirs.is_floating_point() or theirs.is_complex())
            rounding = 0.0 if is_whole else 8 * torch.finfo(theirs.dtype).eps * largest(theirs)
            apart = largest(_widened(tensor) - _widened(theirs.cpu()))
            if not apart <= TOLERANCE[self._kind] * change + rounding:
                raise InexactError(
                    f"{held} after the update {where} differs by {apart:g} from the author's "
                    f"module's, which the step has changed by {change:g}: {_both(tensor, theirs)}"
                )


def _forwards(lowered: Program) -> dict[int, list[int]]:
    """The microbatches of each stage, in the order of its forwards."""
    order: dict[int, list[int]] = {}
    for row in lowered.actions:
        for action in row:
            if action.op is Op.F:
                order.setdefault(action.stage, []).append(action.microbatch)
    return order


def _both(ours: Tensor, theirs: Tensor) -> str:
    """Describe the element that differs most, on both sides."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)}, the author's module {list(theirs.shape)}"
    apart = (_widened(ours.cpu()) - _widened(theirs.cpu())).abs().flatten()
    index = int(apart.nan_to_num(torch.inf).argmax())
    ours_there, theirs_there = (t.detach().flatten()[index].item() for t in (ours, theirs))
    return f"{ours_there:.9g} at element {index}, the author's module {theirs_there:.9g}"


def _widened(tensor: Tensor) -> Tensor:
    """Convert to double precision, keeping the imaginary part of a complex tensor."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
