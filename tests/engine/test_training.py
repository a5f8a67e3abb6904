"""Options of training besides the schedule, each compared with the unsplit model."""

import dataclasses
import functools

import pytest
import torch
from pipeline import config, lone_trainer, relative_difference, with_trainer
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from engine.run.optimizer import OptimizerSpec


def test_a_stage_that_is_recomputed_holds_less_than_one_that_is_not():
    held = {}
    for recompute in (False, True, (False, True)):
        settings = config("looped_bfs", 1, 4, seq_len=128, recompute=recompute)
        trainer = lone_trainer(dataclasses.replace(settings, stages_per_rank=2))
        trainer.step(0)
        held[recompute] = trainer.measure_memory(1).peak_bytes
    assert held[True] < 0.6 * held[False]
    assert held[True] < 0.9 * held[False, True] < 0.9 * 0.95 * held[False]


def outcome_of(settings, steps=5):
    trainer = lone_trainer(settings)
    losses = [trainer.step(step).loss for step in range(steps)]
    return losses, trainer


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}], ids=str)
def test_low_precision_trains_and_autocast_keeps_float32_parameters(precision):
    losses, trainer = outcome_of(config("1f1b", 1, 4, **{"dtype": "float32", **precision}))
    dtype = torch.bfloat16 if "dtype" in precision else torch.float32
    assert {p.dtype for p in trainer.parameters().values()} == {dtype}
    expected, _ = outcome_of(config("1f1b", 1, 4, dtype="float32"))
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses != expected


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}], ids=str)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_low_precision_is_the_same_however_it_is_split(ranks, world_size, precision):
    settings = config("1f1b", world_size, 3, **{"dtype": "float32", **precision})
    outcomes = ranks.run(world_size, with_trainer, settings, losses_of)
    expected, _ = outcome_of(dataclasses.replace(settings, world_size=1), 3)
    assert outcomes[-1] == expected


def losses_of(trainer):
    return [trainer.step(step).loss for step in range(3)]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_compiled_layers_compute_the_same(monkeypatch, backend):
    """Torch's default takes the same graphs, and ten seconds of a C++ compiler."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()  # what other tests have compiled
    counters.clear()
    losses, _ = outcome_of(config("1f1b", 1, 2, dtype="float32", compile=True), 2)
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0
    expected, _ = outcome_of(config("1f1b", 1, 2, dtype="float32"), 2)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_learning_rate_is_that_of_transformers_schedules(warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = {
        "cosine": get_cosine_schedule_with_warmup(optimizer, warmup, 20),
        "constant": get_constant_schedule_with_warmup(optimizer, warmup),
    }
    for name, schedule in theirs.items():
        spec = OptimizerSpec(
            "sgd", 0.3, lr_schedule=name, lr_warmup_steps=warmup, lr_decay_steps=20
        )
        expected = [0.3 * schedule.lr_lambdas[0](step) for step in range(21)]
        assert [spec.learning_rate_at(step) for step in range(21)] == pytest.approx(expected)


def test_the_rate_of_each_step_is_used():
    spec = OptimizerSpec("sgd", 0.1, lr_schedule="cosine", lr_warmup_steps=2, lr_decay_steps=4)
    trainer = lone_trainer(config("1f1b", 1, 2, optimizer=spec))
    for step in range(4):
        before = {name: p.detach().clone() for name, p in trainer.parameters().items()}
        rate = trainer.step(step).learning_rate
        assert rate == pytest.approx(spec.learning_rate_at(step))
        for name, parameter in trainer.parameters().items():
            assert relative_difference(before[name] - rate * parameter.grad, parameter) < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, 'unknown optimizer "adam"; known: adamw, sgd'),
        ({"lr_schedule": "linear"}, 'unknown lr_schedule "linear"; known: constant, cosine'),
        ({"lr_schedule": "cosine", "lr_warmup_steps": 5}, "lr_decay_steps is 0; cosine needs"),
    ],
)
def test_an_optimizer_that_cannot_be_says_why(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSpec(**settings)
