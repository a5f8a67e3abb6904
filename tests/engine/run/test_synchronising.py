"""Lines that wait for the device are found by module and line, and nothing else is."""

import functools
import inspect

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.check import architectures
from engine.model.data import DataSpec
from engine.model.partition import partition_layers
from engine.model.probe import tiny_of
from engine.model.spec import ModelSpec
from engine.model.stage_module import ModelError
from engine.run.clock import HostClock
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.run.synchronising import (
    SynchronisationError,
    SynchronisationWatch,
    synchronisations_of,
)
from engine.trainer import Trainer, TrainerConfig, connect

SHAPE = (2, 24)


def lines_of(work, *arguments):
    watch = SynchronisationWatch()
    with watch.watching():
        work(*arguments)
    return watch.found


def reads(x):
    mask = x > 0
    return {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool(mask.any()),
        "if": lambda: 1 if mask.any() else 2,
        "int": lambda: int(x.sum()),
        "float": lambda: float(x.sum()),
        "tolist": lambda: x.tolist(),  # noqa: PLW0108  # its line is found
        "numpy": lambda: x.numpy(),  # noqa: PLW0108  # its line is found
        "cpu": lambda: x.cpu(),  # noqa: PLW0108  # its line is found
        "to": lambda: x.to("cpu"),
        "to device": lambda: x.to(device="cpu"),
        "nonzero": lambda: x.nonzero(),  # noqa: PLW0108  # its line is found
        "where": lambda: torch.where(mask),
        "mask": lambda: x[mask],
        "write by a mask": lambda: x.index_put((mask,), torch.ones(len(x))),
        "masked_select": lambda: x.masked_select(mask),
        "unique": lambda: x.unique(),  # noqa: PLW0108  # its line is found
        "one_hot": lambda: nn.functional.one_hot(x.long().abs()),
        "repeat": lambda: x.repeat_interleave(torch.ones(len(x), dtype=torch.int64)),
        "made of a value": lambda: torch.tensor(2.0, device=x.device),
        "range": lambda: range(x.long().abs().sum()),
    }


@pytest.mark.parametrize("name", reads(torch.ones(3)))
def test_a_line_that_reads_a_value_is_found(name):
    read = reads(torch.ones(3))[name]
    found = lines_of(read)
    assert len(found) == 1
    number = inspect.getsourcelines(read)[1]
    assert found[0].line.startswith(f"test_synchronising.py:{number}: ")


def writes(x):
    return {
        "masked_fill": lambda: x.masked_fill(x > 0, 0.0),
        "one value by a mask": lambda: x.clone().__setitem__(x > 0, 0.0),
        "chosen by where": lambda: torch.where(x > 0, x, 0.0),
        "shape": lambda: x.shape[0] + x.numel() + len(x),
        "to its own": lambda: x.to(x.device, torch.float64),
        "one_hot of so many": lambda: nn.functional.one_hot(x.long(), 4),
        "repeat to a size": lambda: x.repeat_interleave(
            torch.ones(len(x), dtype=torch.int64), output_size=len(x)
        ),
        "topk": lambda: x.topk(1),
        "gather": lambda: x[torch.zeros(2, dtype=torch.int64)],
        "norm": lambda: torch.linalg.vector_norm(x),
    }


@pytest.mark.parametrize("name", writes(torch.ones(3)))
def test_a_line_that_reads_none_is_not(name):
    assert not lines_of(writes(torch.ones(3))[name])


class Router(nn.Module):
    def forward(self, x):
        return x * 2 if bool((x > 0).any()) else x


def test_the_module_is_named_and_the_error_has_its_line():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Router()))
    watch = SynchronisationWatch(model)
    with watch.watching():
        model(torch.ones(1, 2))
    with pytest.raises(SynchronisationError) as caught:
        watch.check()
    assert str(caught.value).startswith("1.0 (Router): test_synchronising.py:")
    assert "return x * 2 if bool((x > 0).any()) else x: waits for the device" in str(caught.value)


def test_a_read_in_the_backward_is_found():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    x = torch.ones(2, requires_grad=True)
    (found,) = lines_of(lambda: Function.apply(x).sum().backward())
    assert "gradient.sum().item()" in found.line


def of_architecture(name):
    try:
        tiny = tiny_of(CONFIG_MAPPING[name]())
    except ModelError:
        return None
    partition = partition_layers("uniform", tiny.model.num_layers, 2)
    return synchronisations_of(tiny.model, partition, SHAPE)


SOME = ("llama", "qwen3", "gpt_neox", "mixtral")


@pytest.mark.parametrize("name", SOME)
def test_stages_of_an_architecture_never_wait_for_their_device(name):
    assert of_architecture(name) == []


def test_masks_of_sliding_windows_wait_for_the_device_once_in_each_forward():
    (found,) = of_architecture("gemma2")
    assert found.module == "model.model (Gemma2Model)"
    assert found.line.startswith("transformers/masking_utils.py:")
    assert "packed_sequence_mask" in found.line


def test_the_routing_to_experts_waits_where_it_asks_which_are_hit():
    found = of_architecture("longcat_flash")
    assert {one.does for one in found} == {"nonzero", "item, bool, int or float"}
    assert all("(LongcatFlashExperts)" in one.module for one in found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", architectures())
def test_what_waits_is_transformers_code_and_is_named(name):
    for found in of_architecture(name) or ():
        assert found.line.startswith("transformers/")
        assert found.module


def trainer_of(**changes):
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    spec = {"schedule": "1f1b", "world_size": 1, **changes}
    data = DataSpec(seq_len=16, num_microbatches=3)
    config = TrainerConfig(ModelSpec("llama-tiny", "float32"), data, **spec)
    return Trainer(connect(config, fabric), fabric)


OUTSIDE = (
    "norm = None if self._gradient_norm is None",  # the spans have been collected
    "return StepResult(None if loss is None",
    "return iter(self._loader(step))",  # the batch is drawn on the host
)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerSpec("adamw", clip_norm=1.0)},
        {"optimizer": OptimizerSpec("sgd", momentum=0.9), "recompute": True},
        {"schedule": "zb_h1"},
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    ],
    ids=str,
)
def test_the_engines_step_waits_only_before_and_after_it(changes):
    trainer = trainer_of(**changes)
    for step in range(2):
        found = lines_of(functools.partial(trainer.step, step, Recording.spans))
        assert [one for one in found if not any(end in one.line for end in OUTSIDE)] == []
    trainer.close()
