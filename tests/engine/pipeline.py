"""The training that tests run on each rank, and the oracle: an unsplit model, torch's optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.configuration import model_of, tokenizer_of
from engine.model.author import train_unsplit as train_step_unsplit
from engine.model.data import Data, DataSpec
from engine.model.spec import ModelSpec
from engine.plan.program import Program
from engine.run.clock import HostClock
from engine.run.memory import MemoryUse
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.trainer import Build as BuildRunner
from engine.trainer import StepResult, Trainer, TrainerConfig, agree

NUM_STEPS = 2
SEQ_LEN = 16
TOLERANCE = 1e-10
CPU = torch.device("cpu")


@dataclass
class Outcome:
    """The result of training on a rank, or of the oracle."""

    loss: float | None
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    trained: dict[str, Tensor]
    peak_held: int = 0
    results: tuple[StepResult, ...] = ()
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


def train(
    fabric: Fabric, is_member: bool, settings: TrainerConfig, runner: BuildRunner | None = None
) -> Outcome | None:
    """Two steps of training; by the executor, or another runner. The gradients are step 0's."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, build=runner)
    initial = {
        n: t.detach().clone() for m in trainer.modules.values() for n, t in m.own_state().items()
    }
    is_clipped = bool(settings.optimizer.clip_norm)  # when a step is over, so are its gradients
    results = [] if is_clipped else [trainer.step(0)]
    loss = trainer.compute_gradients(0) if is_clipped else results[0].loss
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in trainer.parameters().items()
    }
    results += [trainer.step(step) for step in range(len(results), NUM_STEPS)]
    trained = {name: p.detach().clone() for name, p in trainer.parameters().items()}
    trainer.close()
    lowered = trainer.runner.lowered
    return Outcome(loss, initial, gradients, trained, trainer.peak_held, tuple(results), lowered)


def with_trainer(
    fabric: Fabric,
    is_member: bool,
    settings: TrainerConfig,
    work: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """The result of `work` with a rank's trainer; of other ranks, None."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric)
    result = work(trainer, *arguments)
    trainer.close()
    return result


def lone_trainer(settings: TrainerConfig) -> Trainer:
    """One in this process."""
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    return Trainer(agree(settings, fabric), fabric)


def memory_of(trainer: Trainer) -> MemoryUse:
    """The memory of the second step."""
    trainer.step(0)
    return trainer.measure_memory(1)


def unsplit_transformers(settings: TrainerConfig, initial: dict[str, Tensor]) -> nn.Module:
    """transformers' own model, with these weights and nothing left at random."""
    whole = model_of(settings, CPU).config
    model = AutoModelForCausalLM.from_config(whole).to(settings.model.torch_dtype)
    missing, unexpected = model.load_state_dict(initial, strict=False)
    assert not unexpected
    assert not set(missing) - set(model.all_tied_weights_keys)
    return model.train()


Build = Callable[[TrainerConfig, dict[str, Tensor]], nn.Module]
_trained_unsplit: dict[tuple[TrainerConfig, Build], Outcome] = {}


def unsplit_outcome(
    settings: TrainerConfig, initial: dict[str, Tensor], build: Build = unsplit_transformers
) -> Outcome:
    """The result of `train_unsplit`, computed once for all ways to cut and order the same work."""
    model = dataclasses.replace(settings.model, partition="uniform")
    same = {
        name: getattr(TrainerConfig, name)
        for name in (
            *("schedule", "world_size", "stages_per_rank", "policy", "look_ahead"),
            "program",
        )
    }
    key = dataclasses.replace(settings, model=model, **same), build
    known = _trained_unsplit.get(key)
    if known is None or not _are_equal(known.initial, initial):
        known = _trained_unsplit[key] = train_unsplit(settings, initial, build)
    return known


def _are_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(t.equal(theirs[name]) for name, t in ours.items())


def train_unsplit(
    settings: TrainerConfig, initial: dict[str, Tensor], build: Build = unsplit_transformers
) -> Outcome:
    """The same with the unsplit model and torch's optimizer, nothing of ours but the batches."""
    model = build(settings, initial)
    data = Data(settings.data, 256, tokenizer_of(settings))
    loss = accumulate(model, data, 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    spec, optimizer = settings.optimizer, optimizer_of(settings.optimizer, model)
    for step in range(NUM_STEPS):
        if step > 0:  # whose gradients are there
            accumulate(model, data, step)
        if spec.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
        optimizer.step()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Outcome(loss, initial, gradients, trained)


def optimizer_of(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    if spec.name == "adamw":
        decay = spec.weight_decay
        return torch.optim.AdamW(model.parameters(), spec.learning_rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), spec.learning_rate, spec.momentum)


def accumulate(model: nn.Module, data: Data, step: int) -> float:
    """Leave a step's gradients in the unsplit model; its loss."""
    return train_step_unsplit(model, data.step(step))


def merged(
    parts: list[dict[str, Tensor]], shared: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """The dictionaries of all ranks as one. A shared weight must be equal wherever it is.

    `shared`: name of a shared weight on its other owner -> its name in the unsplit model.
    """
    whole: dict[str, Tensor] = {}
    for part in parts:
        for own_name, value in part.items():
            name = (shared or {}).get(own_name, own_name)
            if name in whole:
                assert name in (shared or {}).values(), f"{name} is on two ranks"
                assert torch.equal(value, whole[name]), f"{name} differs between its owners"
            whole[name] = value
    return whole


def by_memory(
    fabric: Fabric, is_member: bool, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Train with messages as ranks of one host pass them."""
    return function(fabric, is_member, *arguments)


def over_gloo(
    fabric: Fabric, is_member: bool, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Train with messages over gloo, as ranks on different hosts do."""
    usual, fabric.shares_memory = fabric.shares_memory, False
    try:
        return function(fabric, is_member, *arguments)
    finally:
        fabric.shares_memory = usual


def train_over_gloo(fabric: Fabric, is_member: bool, settings: TrainerConfig) -> Outcome | None:
    outcome: Outcome | None = over_gloo(fabric, is_member, train, settings)
    return outcome


def assert_exact(
    ranks,
    settings: TrainerConfig,
    *,
    shared: dict[str, str] | None = None,
    build: Build = unsplit_transformers,
    tolerance: float = TOLERANCE,
    run: Callable[..., Outcome | None] = train,
) -> list[Outcome]:
    """Loss, every gradient and the parameters after two steps equal the unsplit model's."""
    outcomes = ranks.run(settings.world_size, run, settings)
    initial = merged([o.initial for o in outcomes], shared)
    expected = unsplit_outcome(settings, initial, build)
    gradients = merged([o.gradients for o in outcomes], shared)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.abs().max() > 0, f"{name} has a gradient of zeros"
        assert relative_difference(gradient, expected.gradients[name]) < tolerance, name
    (loss,) = (o.loss for o in outcomes if o.loss is not None)
    assert abs(loss - expected.loss) < tolerance * expected.loss
    trained = merged([o.trained for o in outcomes], shared)
    for name, parameter in trained.items():
        assert relative_difference(parameter, expected.trained[name]) < tolerance, name
        assert not parameter.equal(initial[name]), f"{name} was not trained"
    return outcomes


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())
