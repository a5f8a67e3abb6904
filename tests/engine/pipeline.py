"""The training that tests run on each rank, and the oracle: the author's module on one device.

The oracle is called as its author would call it, one microbatch after the other, in a plain loop
with torch's own optimizer; its batches alone are ours.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engine.configuration import model_of, tokenizer_of
from engine.model.data import IGNORED, DataSpec, TextLoader
from engine.model.factory import find_factory, seed_from
from engine.model.spec import ModelSpec
from engine.plan.collectives import DataParallel
from engine.plan.program import Program
from engine.run.clock import HostClock
from engine.run.memory import MemoryUse
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.trainer import Build, StepResult, Trainer, TrainerConfig, agree

NUM_STEPS = 2
SEQ_LEN = 16
TOLERANCE = 1e-10
VOCABULARY = 256
CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


@dataclass
class Outcome:
    """What some steps have led to, on a rank or of the oracle, by the names of the whole model."""

    initial: Tensors = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Those of the first step, clipped."""
    state: Tensors = field(default_factory=dict)
    """Parameters and buffers at the end."""
    results: tuple[StepResult, ...] = ()
    peak_held: int = 0
    lowered: Program | None = None


def config(
    schedule: str,
    world_size: int,
    num_microbatches: int,
    *,
    preset: str = "llama-tiny",
    partition: str | tuple[int, ...] = "uniform",
    microbatch_size: int = 1,
    optimizer: OptimizerSpec | None = None,
    seq_len: int | str = SEQ_LEN,
    dtype: str = "float64",
    **rest,
) -> TrainerConfig:
    """`rest` are fields of any of the parts. Data are drawn: a corpus is shuffled on each rank."""
    rest = {"source": "synthetic", **rest}
    of = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (ModelSpec, DataSpec)}
    model = {k: v for k, v in rest.items() if k in of[ModelSpec] and k != "seed"}
    data = {k: v for k, v in rest.items() if k in of[DataSpec]}
    top = {k: v for k, v in rest.items() if k not in model and k not in data}
    return TrainerConfig(
        model=ModelSpec(preset, dtype, partition, **model),
        data=DataSpec(
            seq_len=seq_len,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            **data,
        ),
        schedule=schedule,
        world_size=world_size,
        optimizer=optimizer or OptimizerSpec(learning_rate=1e-3),
        **top,
    )


def state_of(trainer: Trainer) -> Tensors:
    """A copy of this rank's parameters and buffers."""
    state = trainer.gathered(lambda held: held.detach())
    for module in trainer.modules.values():
        theirs = module.own_parameters()
        state |= {n: t for n, t in module.own_state().items() if n not in theirs}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def train(trainer: Trainer) -> Outcome:
    """Some steps of training on this rank."""
    weights = trainer.model.shared_weights(trainer.partition)
    names = {name: weight.name for weight in weights for _, name in weight.owners}

    def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
        """A shared weight has the name that it has in the whole model, on all its owners."""
        return {names.get(name, name): tensor for name, tensor in tensors.items()}

    outcome = Outcome(initial=renamed(state_of(trainer)))
    for step in range(NUM_STEPS):
        outcome.results += (trainer.step(step),)
        if step == 0:
            found = trainer.gathered(lambda held: held.grad).items()
            outcome.gradients = renamed({n: None if g is None else g.clone() for n, g in found})
    outcome.losses = [result.loss for result in outcome.results]
    outcome.norms = [result.gradient_norm for result in outcome.results]
    outcome.state = renamed(state_of(trainer))
    outcome.peak_held, outcome.lowered = trainer.peak_held, trainer.lowered
    return outcome


def with_trainer(
    fabric: Fabric,
    is_member: bool,
    settings: TrainerConfig,
    work: Callable[..., Any] = train,
    *arguments: Any,
    build: Build | None = None,
) -> Any:
    """The result of `work` with a rank's trainer; of other ranks, None."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, build=build)
    result = work(trainer, *arguments)
    trainer.close()
    return result


def over_gloo(
    fabric: Fabric, is_member: bool, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Train with messages over gloo, as ranks on different hosts do."""
    usual, fabric.shares_memory = fabric.shares_memory, False
    try:
        return function(fabric, is_member, *arguments)
    finally:
        fabric.shares_memory = usual


def lone_trainer(settings: TrainerConfig) -> Trainer:
    """One in this process."""
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    return Trainer(agree(settings, fabric), fabric)


def memory_of(trainer: Trainer) -> MemoryUse:
    """The memory of the second step."""
    trainer.step(0)
    return trainer.measure_memory(1)


# the oracle

Around = Callable[[nn.Module, int], AbstractContextManager[object]]
"""What a step of the oracle runs in, given the module and the step."""
_known: dict[TrainerConfig, Outcome] = {}


def unsplit(settings: TrainerConfig, initial: Tensors, around: Around | None = None) -> Outcome:
    """The author's module after the same steps, computed once for all ways to cut the same work."""
    default = {
        name: getattr(TrainerConfig, name)
        for name in (
            *("schedule", "world_size", "stages_per_rank", "policy", "look_ahead", "program"),
            *("replicas", "recompute"),
        )
    }
    key = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, partition="uniform"),
        data=dataclasses.replace(
            settings.data, num_microbatches=settings.data.num_microbatches * settings.replicas
        ),
        sharding=DataParallel(),
        **default,
    )
    known = _known.get(key)
    if known is None or around or not _are_equal(known.initial, initial):
        known = _known[key] = _train_unsplit(key, initial, around)
    return known


def _are_equal(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(t.equal(theirs[name]) for name, t in ours.items())


def _author_module(settings: TrainerConfig, initial: Tensors) -> tuple[nn.Module, Any]:
    """What a factory returns, and the loss that it brings; or transformers' class, as it is read.

    What is drawn for a class of transformers are the ranks' weights.
    """
    seed, dtype = settings.model.seed, settings.model.torch_dtype
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # as a factory draws
    loss_of = None
    if settings.model.is_factory:
        module = find_factory(settings.model.name)()
        if isinstance(module, tuple):
            module, _, loss_of = module
            loss_of = (
                copy.deepcopy(loss_of).to(dtype) if isinstance(loss_of, nn.Module) else loss_of
            )
    elif list(Path(settings.model.name).glob("*.safetensors")):
        module = AutoModelForCausalLM.from_pretrained(settings.model.name, dtype=dtype)
        read = module.state_dict()
        assert all(tensor.equal(read[name]) for name, tensor in initial.items() if name in read)
    else:
        module = AutoModelForCausalLM.from_config(model_of(settings, CPU).config)
    if dtype == torch.float64:  # of complex tensors `to` would take the real part
        module.double()._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
    else:
        module.to(dtype)
    if not settings.model.is_factory:
        missing, unexpected = module.load_state_dict(initial, strict=False)
        assert not unexpected
        assert not set(missing) - set(module.all_tied_weights_keys)
    return module.train(), loss_of


def _train_unsplit(settings: TrainerConfig, initial: Tensors, around: Around | None) -> Outcome:
    module, loss_of = _author_module(settings, initial)
    if loss_of is None:
        data: Any = TextLoader(settings.data, VOCABULARY, tokenizer_of(settings))
    else:
        data = model_of(settings, CPU).task.data(settings.data, None)
    optimizer = optimizer_of(settings.optimizer, module)
    outcome = Outcome(initial=initial)
    for step in range(NUM_STEPS):
        torch.manual_seed(seed_from(settings.model.seed, step, 0))
        optimizer.zero_grad()
        with contextlib.nullcontext() if around is None else around(module, step):
            loss = _accumulate(module, data.step(step), loss_of, settings.autocast)
        outcome.losses.append(loss)
        most = settings.optimizer.clip_norm or float("inf")
        outcome.norms.append(nn.utils.clip_grad_norm_(module.parameters(), most).item())
        if step == 0:
            outcome.gradients = {
                n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
            }
        optimizer.step()
    outcome.state = {n: t.detach() for n, t in module.state_dict().items()}
    return outcome


def _accumulate(module: nn.Module, batch: Any, loss_of: Any, autocast: str) -> float:
    """Add a step's gradients, one microbatch after the other; returns its mean loss."""
    is_mixed, total = autocast != "none", 0.0
    takes_ids = getattr(module, "main_input_name", "") == "input_ids"
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            ids = x.clone()  # it may write to it
            output = module(input_ids=ids, use_cache=False) if takes_ids else module(ids)
        if isinstance(output, dict):
            output = output["logits"]
        output = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        if loss_of is None:
            output = output.float() if output.dtype == torch.bfloat16 else output
            flat = output.flatten(0, 1), y.flatten()
            loss = cross_entropy(*flat, reduction="sum", ignore_index=IGNORED) / batch.num_tokens
        else:
            loss = loss_of(output, y) / len(batch.inputs)
        loss.backward()
        total += loss.item()
    return total


def optimizer_of(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    if spec.name == "adamw":
        decay = spec.weight_decay
        return torch.optim.AdamW(model.parameters(), spec.learning_rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), spec.learning_rate, spec.momentum)


# the comparison


def assert_exact(
    ranks: Any,
    settings: TrainerConfig,
    *ways: Callable[..., Any],
    tolerance: float = TOLERANCE,
    around: Around | None = None,
) -> list[Outcome]:
    """Ranks train as the oracle does; `ways` are such as `over_gloo`. Returns the outcomes."""
    outcomes = ranks.run(settings.num_processes, *(ways or (with_trainer,)), settings)
    assert_as_unsplit(outcomes, settings, tolerance, around)
    return outcomes


def assert_as_unsplit(
    outcomes: list[Outcome],
    settings: TrainerConfig,
    tolerance: float = TOLERANCE,
    around: Around | None = None,
    *,
    losses_alone: bool = False,
) -> None:
    """Losses, norms, all gradients and what is learned are the oracle's, on each replica."""
    size = settings.world_size
    initial = merged([one.initial for one in outcomes[:size]])
    expected = unsplit(settings, initial, around)
    for first in range(0, len(outcomes), size):
        pipeline = outcomes[first : first + size]
        (losses,) = (one.losses for one in pipeline if one.losses[0] is not None)
        assert losses == pytest.approx(expected.losses, rel=tolerance)
        if losses_alone:
            continue
        gradients = merged([one.gradients for one in pipeline])
        state = merged([one.state for one in pipeline])
        assert gradients.keys() == expected.gradients.keys()
        assert state.keys() >= gradients.keys()
        for ours, theirs in ((gradients, expected.gradients), (state, expected.state)):
            for name, tensor in ours.items():
                assert_close(name, tensor, theirs[name], tolerance)
        if settings.optimizer.clip_norm:
            for one in pipeline:
                assert one.norms == pytest.approx(expected.norms, rel=tolerance)
        assert any(not tensor.equal(initial[name]) for name, tensor in state.items())


def merged(parts: list[dict[str, Any]], shared: dict[str, str] | None = None) -> dict[str, Any]:
    """The dictionaries of all ranks as one. A shared weight must be equal wherever it is.

    `shared`: name of a shared weight on its other owner -> its name in the unsplit model.
    """
    whole: dict[str, Any] = {}
    for own, tensor in ((n, t) for part in parts for n, t in part.items()):
        name = (shared or {}).get(own, own)
        if whole.get(name) is not None:
            assert tensor is None or torch.equal(tensor, whole[name]), f"{name} differs"
        whole[name] = tensor
    return whole


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


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())
