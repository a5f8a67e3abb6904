"""Models that are easily trained wrong are exact on one, two and three ranks, or refused.

The oracle is the author's own module, called as its author would: `factory()(ids)` after
`torch.manual_seed`, one microbatch after the other, and torch's own optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import awkward_models
import numpy as np
import pytest
import torch
from pipeline import config, relative_difference
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.connection import connect
from engine.model.data import Data
from engine.model.stage_module import ModelError
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, TrainerConfig, _seed_of

NUM_STEPS = 2
SCHEDULES = {1: "afab", 2: "1f1b", 3: "zb_h1"}
SGD = OptimizerSpec("sgd", 0.05, momentum=0.9)
ADAMW = OptimizerSpec("adamw", 1e-3, weight_decay=0.1)
"""Leaves alone what has no gradient, and decays what has one of zeros."""


@dataclass
class Trained:
    """What two steps of training leave behind."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the first step
    state: dict[str, Tensor] = field(default_factory=dict)


def settings_of(name: str, world_size: int, **changes: object) -> TrainerConfig:
    changes = {"optimizer": SGD, "seq_len": 6, "microbatch_size": 2, **changes}
    schedule = changes.pop("schedule", SCHEDULES[world_size])
    return config(schedule, world_size, 4, preset=f"awkward_models:{name}", **changes)


def train(fabric, is_member: bool, settings: TrainerConfig) -> Trained | str | None:
    """What is trained on this rank, by the unsplit names; or why it is refused."""
    try:
        settings = connect(settings, fabric)
    except ModelError as error:
        return str(error)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    names = {name: weight.name for weight in trainer.shared_weights for _, name in weight.owners}
    trained = Trained()
    for step in range(NUM_STEPS):
        trained.losses.append(trainer.step(step).loss)
        if step == 0:
            trained.gradients = {
                names.get(name, name): None if p.grad is None else p.grad.clone()
                for name, p in trainer.parameters().items()
            }
    for module in trainer.modules.values():
        own = {names.get(name, name): t.detach().clone() for name, t in module.own_state().items()}
        trained.state |= own
    trainer.close()
    return trained


def unsplit(
    settings: TrainerConfig, around: Callable[[nn.Module, int], Iterator[None]] | None = None
) -> tuple[Trained, nn.Module]:
    """The author's module, trained as its author would."""
    seed = settings.model.seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # as a factory draws
    module = getattr(awkward_models, settings.model.name.partition(":")[2])()
    module.to(settings.model.torch_dtype) if not _has_complex(module) else module.double()
    module.train()
    trained, optimizer = Trained(), optimizer_of(settings.optimizer, module)
    data = Data(settings.data, awkward_models.VOCABULARY)
    for step in range(NUM_STEPS):
        module.zero_grad()
        torch.manual_seed(_seed_of(seed, step, 0))
        with contextlib.nullcontext() if around is None else around(module, step):
            trained.losses.append(accumulate(module, data.step(step)))
        if step == 0:
            trained.gradients = {
                n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
            }
        optimizer.step()
    trained.state = {n: t.detach() for n, t in module.state_dict().items()}
    return trained, module


def _has_complex(module: nn.Module) -> bool:
    """`to` would make real numbers of them."""
    return any(tensor.is_complex() for tensor in module.buffers())


def optimizer_of(spec: OptimizerSpec, module: nn.Module) -> torch.optim.Optimizer:
    if spec.name == "adamw":
        decay = spec.weight_decay
        return torch.optim.AdamW(module.parameters(), spec.learning_rate, weight_decay=decay)
    return torch.optim.SGD(module.parameters(), spec.learning_rate, spec.momentum)


def accumulate(module: nn.Module, batch) -> float:
    total = 0.0
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        output = module(inputs.clone())
        logits = output if isinstance(output, Tensor) else output.logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / batch.num_tokens
        loss.backward()
        total += loss.item()
    return total


def assert_equal(ours: list[Trained], theirs: Trained, tolerance: float) -> None:
    (losses,) = (o.losses for o in ours if o.losses[0] is not None)
    assert losses == pytest.approx(theirs.losses, rel=tolerance)
    gradients = {name: g for o in ours for name, g in o.gradients.items()}
    assert gradients.keys() == theirs.gradients.keys()
    for name, gradient in gradients.items():
        assert_close(name, gradient, theirs.gradients[name], tolerance)
    for part in ours:
        for name, tensor in part.state.items():
            assert_close(name, tensor, theirs.state[name], tolerance)
    assert {name for o in ours for name in o.state} >= theirs.gradients.keys()


def assert_close(name: str, ours: Tensor | None, theirs: Tensor | None, tolerance: float) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, f"{name} has a gradient on one side only"
        return
    assert ours.shape == theirs.shape, name
    if not theirs.numel() or torch.equal(ours, theirs.to(ours.dtype)):
        return
    if float(theirs.abs().max()) < 1e-12:  # nothing but rounding, such as a bias before a norm
        assert float(ours.abs().max()) < 1e-12, name
        return
    assert relative_difference(ours, theirs) < tolerance, name


EXACT: dict[str, dict[str, object]] = {
    "twice": {},
    "thrice": {},
    "subclassed_in_name": {},
    "hooked_children": {},
    "hooked_weights": {},
    "tied_over_three": {},
    "weight_normed": {},
    "spectrally_normed": {},
    "orthogonal": {},
    "parametrized": {},
    "in_place": {},
    "in_place_behind_a_view": {},
    "in_place_on_ids": {},
    "statistics": {},
    "frozen": {"optimizer": ADAMW},
    "averaging": {},
    "structured": {},
    "tuple_of_one": {},
    "custom_function": {},
    "rotary": {},
    "stopped": {"optimizer": ADAMW},
    "unused": {"optimizer": ADAMW},
    "half_inside": {},
    "sends_half": {},
    "padded": {},
    "renormed": {},
    "copied": {},
    "drawn": {},
    "reads_weights": {},
    "recurrent": {},
    "llama": {},
    "shared_layer": {},
    "shared_last_layers": {},
    "shared_projection": {},
    "tied_and_used_again": {},
    "hooked_llama": {},
    "normed_llama": {},
    "frozen_llama": {"optimizer": ADAMW},
}


@pytest.mark.parametrize("name", EXACT)
def test_an_awkward_model_is_exact_wherever_it_is_cut(ranks, name):
    for world_size in SCHEDULES:
        settings = settings_of(name, world_size, **EXACT[name])
        ours = ranks.run(world_size, train, settings)
        assert_equal(ours, unsplit(settings)[0], 1e-10)
