"""The batches that a factory brings: the same for all who ask, and those that costs are of."""

import dataclasses

import pytest
import torch
from pipeline import CPU, config, lone_trainer

from engine.configuration import model_of
from engine.connection import agree
from engine.run.layer_costs import measure_model_costs


def settings_of(**changes):
    return config("1f1b", 1, 4, preset="own_models:vit", microbatch_size=2, **changes)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_has_the_same_batch_whoever_asks(num_workers):
    """Whatever was drawn before, and in processes of the loader; another seed draws others."""
    settings = settings_of(num_workers=num_workers)
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
    model = model_of(settings_of(), CPU)
    costs = measure_model_costs(model, (2, 0), CPU, budget_s=0)
    assert [layer.message_bytes for layer in costs.layers[:5]] == [2 * 16 * 16 * 8] * 5
    (taken, *_) = model.messages([range(0), range(6)], 2, 0)
    assert not taken[0].has_gradient
    assert agree(settings_of(), lone_trainer(settings_of()).fabric).num_targets == 2  # emulated
