"""Modules that bring their own batches and loss are exact however they are cut, or refused."""

from __future__ import annotations

import copy
import dataclasses

import own_models
import pytest
import torch
from pipeline import config, lone_trainer, optimizer_of, relative_difference, with_trainer
from torch import Tensor

from engine.configuration import data_of, model_of
from engine.connection import agree
from engine.exactness import InexactError, compare
from engine.model.stage_module import ModelError
from engine.model.task import Own
from engine.plan.collectives import DataParallel, Zero1
from engine.run.device import CPU
from engine.run.layer_costs import measure_model_costs
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, TrainerConfig

NUM_STEPS = 2
TRACED = {
    "traced_vit": ("blocks.0", "blocks.2", "head"),
    "encoder": ("layers.0", "layers.1", "layers.2", "restore"),
    "transformers_vit": ("vit.layers.1", "vit.layers.2", "vit.layers.3"),
}
SGD = OptimizerSpec("sgd", 0.05, momentum=0.9)


def settings_of(name: str, world_size: int, schedule: str, **changes: object) -> TrainerConfig:
    trace = {"split": "trace", "split_points": TRACED[name]} if name in TRACED else {}
    rest = {"microbatch_size": 2, "optimizer": SGD, **trace, **changes}
    return config(schedule, world_size, 4, preset=f"own_models:{name}", **rest)


def train(trainer: Trainer) -> tuple[list[float | None], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of two steps, the first one's gradients, and the weights at the end."""
    losses = [trainer.step(0).loss]
    gradients = trainer.gathered(lambda own: own.grad)
    gradients = {name: g.clone() for name, g in gradients.items()}
    losses.append(trainer.step(1).loss)
    return losses, gradients, trainer.gathered(lambda own: own.detach())


def unsplit(settings: TrainerConfig) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same of the author's module on whole batches, whose loss is the mean over them."""
    torch.manual_seed(0)
    module, _, loss_of = getattr(own_models, settings.model.name.partition(":")[2])()
    module.double().train()
    if isinstance(loss_of, torch.nn.Module):
        loss_of = copy.deepcopy(loss_of).double()
    data = data_of(settings, model_of(settings, CPU), None, CPU)
    optimizer, losses, gradients = optimizer_of(settings.optimizer, module), [], {}
    for step in range(NUM_STEPS):
        batch = data.step(step)
        total = sum(
            loss_of(getattr(output := module(x), "logits", output), y)
            for x, y in zip(batch.inputs, batch.targets, strict=True)
        ) / len(batch.inputs)
        optimizer.zero_grad()
        total.backward()
        losses.append(total.item())
        gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters()}
        optimizer.step()
    return losses, gradients, {n: p.detach() for n, p in module.named_parameters()}


def assert_exact(ours: list[tuple], theirs: tuple) -> None:
    """Every rank's losses, gradients and weights equal those of the author's module."""
    (losses,) = {tuple(part[0]) for part in ours if part[0][0] is not None}
    assert losses == pytest.approx(theirs[0], rel=1e-10)
    for kind in (1, 2):
        assert {name for part in ours for name in part[kind]} == theirs[kind].keys()
        for name, tensor in ((n, t) for part in ours for n, t in part[kind].items()):
            if float(theirs[kind][name].abs().max()) > 1e-12:  # else it is rounding of 0
                assert relative_difference(tensor, theirs[kind][name]) < 1e-10, name


NAMES = (
    *("vit", "traced_vit", "sequential_encoder", "encoder", "classified_llama"),
    "transformers_vit",
)


@pytest.mark.parametrize("name", NAMES)
def test_own_batches_and_loss_train_as_on_one_device(ranks, name, is_thorough):
    """On as many stages as one likes: traced pieces are candidates for stages, not their number."""
    theirs = unsplit(settings_of(name, 1, "1f1b"))
    ways = [(1, "afab"), (2, "interleaved_1f1b"), (3, "zb_h1"), (2, "1f1b")]
    for world_size, schedule in ways if is_thorough else ways[1:3]:
        settings = settings_of(name, world_size, schedule)
        assert_exact(ranks.run(world_size, with_trainer, settings, train), theirs)


@pytest.mark.parametrize("policy", [DataParallel(), Zero1()], ids=str)
@pytest.mark.parametrize("name", ["vit", "encoder"])
def test_replicas_share_a_factorys_batches(ranks, name, policy):
    theirs = unsplit(settings_of(name, 1, "1f1b"))
    settings = settings_of(name, 2, "1f1b", replicas=2, sharding=policy)
    data = dataclasses.replace(settings.data, num_microbatches=2)
    ours = ranks.run(4, with_trainer, dataclasses.replace(settings, data=data), train)
    for pipeline in (ours[:2], ours[2:]):
        assert_exact(pipeline, theirs)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_comparison_with_the_authors_module_uses_the_factorys_loss(monkeypatch, dtype):
    """A loss that differs from the author's is found; one part of it is weighted."""
    settings = settings_of("traced_vit", 1, "interleaved_1f1b", stages_per_rank=2, dtype=dtype)
    assert compare(lone_trainer(settings), settings, CPU, num_steps=2).difference < 1e-2
    if dtype == "float64":
        trainer = lone_trainer(settings)
        monkeypatch.setattr(Own, "num_counted", lambda _task, targets: targets.numel() + 1)
        with pytest.raises(InexactError, match="the loss in step 0"):
            compare(trainer, settings, CPU, num_steps=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_has_the_same_batch_whoever_asks(num_workers):
    """Whatever was drawn before, and in processes of the loader; another seed draws others."""
    settings = settings_of("vit", 1, "1f1b", num_workers=num_workers)
    task = model_of(settings, CPU).task
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    late = task.data(settings.data, None).step(3)
    assert torch.rand(1) == expected
    early = task.data(settings.data, None)
    first, *_, again = (early.step(step) for step in range(4))
    assert [x.shape for x in late.inputs] == [(2, 3, 16, 16)] * 4
    assert late.num_tokens == 8
    for ours, theirs in zip(late.inputs + late.targets, again.inputs + again.targets, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(first.inputs[0], again.inputs[0])
    other = task.data(dataclasses.replace(settings.data, seed=1), None).step(3)
    assert not torch.equal(other.inputs[0], again.inputs[0])


def test_costs_are_measured_on_the_factorys_batches():
    """The first layer's input wants no gradient, alone as on the first stage."""
    settings = settings_of("vit", 1, "1f1b")
    model = model_of(settings, CPU)
    costs = measure_model_costs(model, (2, 0), CPU, budget_s=0)
    assert [layer.message_bytes for layer in costs.layers[:5]] == [2 * 16 * 16 * 8] * 5
    (taken, *_) = model.messages([range(0), range(6)], 2, 0)
    assert not taken[0].has_gradient
    assert agree(settings, lone_trainer(settings).fabric).num_targets == 2  # what is emulated


REFUSED = {
    "two_values": r"\(module, batches, loss\).*tuple \(Sequential, function\)",
    "no_functions": r"it returned a tuple \(Sequential, function, float\)",
    "too_few_rows": r"targets of shape \[2\]; expected 1 in the first dimension of both",
    "three_tensors": r"batches\(0, 1\) returned a tuple; expected inputs and targets, two tensors",
    "failing_batches": r"batches\(0, 1\) failed: TypeError: .*takes 1 positional argument",
    "not_again": r"batches\(0, 1\) returns other values when it is called again",
    "loss_with_weights": "the loss has parameters, which no stage would train",
    "loss_of_each": r"the loss is a Tensor of shape \[2\]; expected a tensor of one number",
    "detached_loss": "no gradient comes from the loss",
    "failing_loss": r"the loss fails for an output of shape \[2, 10\] and targets of shape \[2\]: ",
    "several_results": "returns a tuple; expected one tensor",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(name):
    with pytest.raises(ModelError, match=REFUSED[name]) as caught:
        lone_trainer(settings_of(name, 1, "1f1b"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f'"own_models:{name}": ')


def test_lengths_of_text_do_not_apply():
    settings = settings_of("vit", 1, "1f1b", seq_len="variable")
    with pytest.raises(ModelError, match='brings its own batches; seq_len cannot be "variable"'):
        model_of(settings, CPU)
