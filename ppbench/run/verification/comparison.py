"""Compares the ranks' tensors with the author's module: names, weights, gradients, losses.

Every tensor of every rank is compared, even if several ranks hold it: a mistake may leave out one
of them when the others are summed or updated. The comparison ends at the first difference, in the
order names, weights, then for each step loss, gradients, update.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ppbench.run.verification.exchange import Training, VerificationError
from ppbench.run.verification.module import (
    IGNORED,
    Place,
    build_optimizer,
    is_same,
    train_step,
)

TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 5e-2}
"""The largest difference that is rounding, relative to the largest element of the same tensor.

In float64 rounding is 1e-12, or a millionth if the model computes some parts in float32. The values
of float32 and bfloat16 were observed for sums over many layers and tokens."""
_LEAST_SCALE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1}
"""The least scale of a gradient, relative to the largest element of any gradient: before a
BatchNorm, say, the gradient of a bias is 0, and its computed value is rounding of others."""

_CUDA_STATE_BYTES = 16


@dataclass(frozen=True)
class Held:
    """A tensor on a rank, by its name there."""

    rank: int
    stage: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} (stage {self.stage})"


Part = Mapping[str, Any]
"""The tensors that a rank has written in a phase: `stages`, by number, with `state` and `gradients`
by name, `trains` by name before the steps, and `draws` after one."""


@dataclass
class Author:
    """The author's module and the names of its tensors; a tensor may have several."""

    module: nn.Module
    dtype: str
    tensors: dict[str, Tensor] = field(init=False)
    canonical: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        state = self.module.state_dict(keep_vars=True)
        every = {**state, **dict(self.module.named_parameters(remove_duplicate=False))}
        self.tensors = {name: t for name, t in every.items() if isinstance(t, Tensor)}
        first: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(id(tensor), name)
        self.canonical = {name: first[id(tensor)] for name, tensor in self.tensors.items()}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]


@dataclass
class Worst:
    """The largest difference so far, and how many gradients have been compared."""

    difference: float = 0.0
    num_gradients: int = 0
    notes: list[str] = field(default_factory=list)

    def take(self, difference: float) -> None:
        self.difference = max(self.difference, difference)


def entries(parts: Sequence[Part], kind: str) -> Iterator[tuple[Held, Any]]:
    """Yield everything of a kind that the ranks have written in a phase."""
    for rank, part in enumerate(parts):
        for stage, written in sorted(part["stages"].items()):
            for name, value in written[kind].items():
                yield Held(rank, stage, name), value


def check_names(author: Author, parts: Sequence[Part]) -> None:
    """Check that the ranks hold every weight of the author's module, and no other."""
    owned = set()
    for held, _ in entries(parts, "state"):
        if held.name not in author.tensors:
            raise VerificationError(f"{held}: the author's module has no such weight")
        owned.add(author.canonical[held.name])
    for name, canonical in author.canonical.items():
        if canonical not in owned:
            raise VerificationError(f"{name}: the author's module has it, and no rank does")
    for held, trains in entries(parts, "trains"):
        expected = author.tensors[held.name].requires_grad
        if trains != expected:
            raise VerificationError(
                f"{held}: requires_grad is {trains}, in the author's module {expected}"
            )


def check_initial(author: Author, parts: Sequence[Part], initial: Mapping[str, Tensor]) -> None:
    """Check the initial weights: those of the checkpoint or factory, or drawn as documented.

    Ranks that hold the same weight must agree. Equality is exact: nothing has been computed yet.
    """
    first: dict[str, tuple[Held, Tensor]] = {}
    for held, tensor in entries(parts, "state"):
        canonical = author.canonical[held.name]
        expected = initial.get(held.name, initial.get(canonical))
        if expected is not None and not is_same(tensor, expected):
            raise VerificationError(f"{held} begins with {_both(tensor, expected)}")
        other, theirs = first.setdefault(canonical, (held, tensor))
        if not is_same(tensor, theirs):
            raise VerificationError(
                f"{held} and {other} are one weight in the author's module, and begin with "
                f"different values: {_largest(tensor):g} and {_largest(theirs):g} are the largest"
            )


def load(author: Author, parts: Sequence[Part]) -> None:
    """Copy the ranks' weights into the author's module."""
    with torch.no_grad():
        for held, tensor in entries(parts, "state"):
            author.tensors[held.name].copy_(tensor)


class Comparison:
    """Trains the author's module and compares each step with the ranks'."""

    def __init__(
        self, author: Author, training: Training, worst: Worst, pieces: Callable[[], list[str]]
    ) -> None:
        """Take `pieces`, which names the submodules that the pieces of a chain begin with."""
        self._author, self._training, self._worst = author, training, worst
        self._pieces = pieces
        self._optimizer = build_optimizer(
            training.optimizer,
            author.module,
            training.learning_rate,
            training.weight_decay,
            training.momentum,
        )

    def step(self, number: int, batch: Mapping[str, list[Tensor]], parts: Sequence[Part]) -> None:
        """Train and compare a step. Raises VerificationError for a difference."""
        device = next(self._author.module.parameters()).device
        inputs = [ids.to(device) for ids in batch["inputs"]]
        targets = [ids.to(device) for ids in batch["targets"]]
        before = {name: t.detach().clone() for name, t in self._author.tensors.items()}
        places = places_of(parts, self._training, len(inputs))
        if any(place.entrance.startswith("#") for some in places for place in some):
            # The ranks number the pieces of a chain, which have names here.
            names = {f"#{index}": name for index, name in enumerate(self._pieces())}
            places = [
                [Place(names.get(place.entrance, place.entrance), place.state) for place in some]
                for some in places
            ]
        step = train_step(self._author.module, inputs, targets, places)
        if step.unplaced:
            name = min(step.unplaced)
            raise Incomparable(
                f"the model draws random numbers, and {name}, where a stage begins, is called "
                "more than once or not at all"
            )
        draws = any(drawn["has_drawn"] for part in parts for drawn in part["draws"])
        if step.has_drawn and not draws:
            raise VerificationError(
                f"in step {number} the author's module draws random numbers, as dropout does, and "
                "no rank draws any"
            )
        for rank, part in enumerate(parts):
            # Random numbers begin with the step's seed and go on from forward to forward.
            first_seed, forwards = seed_of(self._training.seed, number, rank), part["draws"]
            if not any(forward["has_drawn"] for forward in forwards):
                continue
            if forwards[0]["begin"].numel() == _CUDA_STATE_BYTES:  # the seed and the count
                expected = torch.tensor([first_seed, 0]).view(torch.uint8)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(first_seed)
                    expected = torch.get_rng_state()
            for index, forward in enumerate(forwards):
                if not torch.equal(forward["begin"], expected):
                    since = "the forward before it" if index else "the seed of the step"
                    raise VerificationError(
                        f"rank {rank} in step {number}: the random numbers of its forward {index} "
                        f"(stage {forward['stage']}) do not follow {since}"
                    )
                expected = forward["end"]
        norm, clip_norm = None, self._training.clip_norm
        if clip_norm:
            norm = float(nn.utils.clip_grad_norm_(self._author.module.parameters(), clip_norm))
        where = f"in step {number}"
        worst = self._check_gradients(parts, where)
        self._check_number("loss", step.loss, self._training.losses[number], where, worst)
        if norm is not None:
            self._check_number("gradient norm", norm, self._training.norms[number], where, worst)
        if worst:
            raise VerificationError(worst)
        # The ranks' gradients, which differ by rounding only, are taken for the update: AdamW
        # divides by their size, so the rounding of one near 0 would become as large as a step.
        for held, gradient in entries(parts, "gradients"):
            parameter = self._author.tensors[held.name]
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype).clone()
        self._optimizer.step()
        unordered = {s for s, order in self._training.forwards.items() if order != sorted(order)}
        for held, tensor in entries(parts, "state"):
            theirs = self._author.tensors[held.name]
            expected = theirs.detach()
            if not isinstance(theirs, nn.Parameter) and held.stage in unordered:
                note = f"{held.name} depends on the order of microbatches and is not compared"
                if note not in self._worst.notes:
                    self._worst.notes.append(note)
                continue
            change = _largest(_widened(expected) - _widened(before[held.name]))
            is_whole = not (expected.is_floating_point() or expected.is_complex())
            epsilon = 0.0 if is_whole else torch.finfo(expected.dtype).eps
            rounding = 8 * epsilon * _largest(expected)
            difference = _largest(_widened(tensor.to(expected.device)) - _widened(expected))
            if not difference <= self._author.tolerance * change + rounding and not is_same(
                tensor, expected
            ):
                raise VerificationError(
                    f"{held} after the update {where} differs by {difference:g} from the author's "
                    f"module's, which the step has changed by {change:g}: "
                    f"{_both(tensor, expected)}"
                )

    def _check_number(
        self, what: str, expected: float, number: float | None, where: str, worst: str
    ) -> None:
        scale = max(abs(expected), torch.finfo(torch.float64).tiny)
        difference = float("inf") if number is None else abs(number - expected) / scale
        if number is not None and math.isnan(number) and math.isnan(expected):
            difference = 0.0
        if not difference <= self._author.tolerance:
            also = f"; {worst}" if worst else ""
            raise VerificationError(
                f"{what} {where} is {number!r}; the author's module has {expected!r}{also}"
            )
        self._worst.take(difference)

    def _check_gradients(self, parts: Sequence[Part], where: str) -> str:
        """Describe the gradient that differs most; empty if none does."""
        author = self._author
        expected = {name: t.grad for name, t in author.tensors.items()}
        largest = max((_largest(g) for g in expected.values() if g is not None), default=0.0)
        most, text, num_wrong = 0.0, "", 0
        for held, gradient in entries(parts, "gradients"):
            theirs = author.tensors[author.canonical[held.name]].grad
            difference = _difference(gradient, theirs, largest * _LEAST_SCALE[author.dtype])
            self._worst.num_gradients += 1
            if difference <= author.tolerance:
                self._worst.take(difference)
                continue
            num_wrong += 1
            if difference > most:
                most, text = difference, f"gradient of {held} {where}"
                if gradient is None or theirs is None:
                    sides = ("the rank", "the author's module")
                    has, lacks = sides[:: 1 if theirs is None else -1]
                    text += f": {has} has one, {lacks} has none"
                elif gradient.shape != theirs.shape:
                    text += f" has shape {list(gradient.shape)}, not {list(theirs.shape)}"
                else:
                    text += f" is {difference:.1e} away: {_both(gradient, theirs)}"
        rest = f" ({num_wrong - 1} more gradients differ)" if num_wrong > 1 else ""
        return f"{text}{rest}; at most {author.tolerance:g} is rounding" if text else ""


class Incomparable(Exception):  # noqa: N818  # it is not an error of the run
    """The reason why this model cannot be compared."""


def places_of(
    parts: Sequence[Part], training: Training, num_microbatches: int
) -> list[list[Place]]:
    """Return, per microbatch, where each stage that draws begins; empty if none draws."""
    places: list[list[tuple[int, Place]]] = [[] for _ in range(num_microbatches)]
    drawn = [draw for part in parts for draw in part["draws"]]
    if not any(draw["has_drawn"] for draw in drawn):
        return [[] for _ in places]
    num_seen: dict[int, int] = {}
    for draw in drawn:
        stage = int(draw["stage"])
        if stage > 0 and not draw["entrance"]:
            if draw["has_drawn"]:
                reason = f"stage {stage} draws random numbers outside its layers"
                raise Incomparable(reason)
            continue
        index = num_seen.get(stage, 0)
        num_seen[stage] = index + 1
        order = training.forwards[stage]
        if index < len(order):
            places[order[index]].append((stage, Place(draw["entrance"], draw["at_entrance"])))
    return [[place for _, place in sorted(some, key=lambda pair: pair[0])] for some in places]


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank in a step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:7], "little")


def check_batches(batches: Iterable[Mapping[str, list[Tensor]]]) -> None:
    """Check that every target is the next token, where that is in the sequence."""
    for number, batch in enumerate(batches):
        for microbatch, (ids, targets) in enumerate(
            zip(batch["inputs"], batch["targets"], strict=True)
        ):
            counts = targets[:, 1:] != IGNORED
            if not torch.equal(ids[:, 1:][counts], targets[:, :-1][counts]):
                raise VerificationError(
                    f"in step {number} the targets of microbatch {microbatch} are not the tokens "
                    "that follow its inputs"
                )


def _difference(ours: Tensor | None, theirs: Tensor | None, least: float) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    if is_same(ours, theirs):
        return 0.0
    scale = max(_largest(theirs), least, torch.finfo(torch.float64).tiny)
    difference = _largest(ours.to(theirs.device, theirs.dtype) - theirs) / scale
    return difference if difference == difference else float("inf")  # noqa: PLR0124  # NaN


def _both(ours: Tensor, theirs: Tensor) -> str:
    """Describe the element that differs most, on both sides."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)}, the author's module {list(theirs.shape)}"
    difference = (_widened(ours.to(theirs.device)) - _widened(theirs)).abs().flatten()
    index = int(difference.nan_to_num(torch.inf).argmax())
    ours_there, theirs_there = (t.detach().flatten()[index].item() for t in (ours, theirs))
    return f"{ours_there:.9g} at element {index}, the author's module {theirs_there:.9g}"


def _widened(tensor: Tensor) -> Tensor:
    """Convert to double precision, keeping the imaginary part of a complex tensor."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    held = tensor.detach()
    if held.dtype == torch.bool:
        held = held.byte()  # torch computes no magnitude of bool
    return float(held.abs().max()) if held.numel() else 0.0
