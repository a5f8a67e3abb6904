"""Options of training besides the schedule, each compared with the unsplit model."""

import dataclasses
import functools
import math

import pytest
import torch
from pipeline import (
    assert_exact,
    by_memory,
    config,
    lone_trainer,
    merged,
    over_gloo,
    relative_difference,
    train,
    train_over_gloo,
    with_trainer,
)
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from engine.model.data import Data
from engine.model.stage_module import ModelError
from engine.plan.spans import Lane
from engine.run.optimizer import OptimizerSpec

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
CLIP = OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)
VARIABLE = {"seq_len": "variable", "max_seq_len": 120, "microbatch_size": 2}
TWO = pytest.param(2, marks=pytest.mark.thorough)  # what four ranks show as well


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-tiny-tied"])
@pytest.mark.parametrize("world_size", [1, TWO, 4])
def test_clipping_by_the_norm_of_all_stages_is_exact(ranks, world_size, preset):
    settings = config("1f1b", world_size, 3, preset=preset, optimizer=CLIP)
    shared = TIED if "tied" in preset else None
    outcomes = assert_exact(ranks, settings, shared=shared)
    gradients = merged([o.gradients for o in outcomes], shared)
    expected = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    for outcome in outcomes:
        assert outcome.results[0].gradient_norm == pytest.approx(expected, rel=1e-12)
    assert expected > CLIP.clip_norm


@pytest.mark.parametrize(
    ("world_size", "schedule", "run"),
    [
        pytest.param(1, "afab", train, marks=pytest.mark.thorough),
        pytest.param(1, "1f1b", train, marks=pytest.mark.thorough),
        pytest.param(2, "afab", train, marks=pytest.mark.thorough),
        pytest.param(2, "1f1b", train_over_gloo, marks=pytest.mark.thorough),
        pytest.param(4, "afab", train_over_gloo, marks=pytest.mark.thorough),
        (4, "1f1b", train),
        (4, "1f1b", train_over_gloo),
    ],
)
def test_variable_lengths_are_exact(ranks, world_size, schedule, run):
    outcomes = assert_exact(ranks, config(schedule, world_size, 4, **VARIABLE), run=run)
    assert len({result.num_tokens for result in outcomes[0].results}) > 1


def bytes_moved(trainer):
    """The bytes of each message in two steps, sent and received."""
    spans = [span for step in range(2) for span in trainer.step(step).spans]
    sent = [span.num_bytes for span in spans if span.lane is Lane.SEND]
    received = [span.num_bytes for span in spans if span.lane is Lane.RECV]
    return sent, received


@pytest.mark.parametrize("way", [by_memory, over_gloo])
def test_messages_that_vary_are_as_long_as_their_microbatch(ranks, way):
    settings = config("1f1b", 2, 4, **VARIABLE)
    lengths = [x.shape[1] for step in range(2) for x in Data(settings.data, 256).step(step).inputs]
    expected = sorted(8 * 64 * 2 * length for length in lengths)
    for sent, received in ranks.run(2, way, with_trainer, settings, bytes_moved):
        assert sorted(sent) == sorted(received) == expected


def test_a_stage_that_is_recomputed_holds_less_than_one_that_is_not():
    held = {}
    for recompute in (False, True, (False, True)):
        settings = config("looped_bfs", 1, 4, seq_len=128, recompute=recompute)
        trainer = lone_trainer(dataclasses.replace(settings, stages_per_rank=2))
        trainer.step(0)
        held[recompute] = trainer.measure_memory(1).peak_bytes
    assert held[True] < 0.6 * held[False]
    assert held[True] < 0.9 * held[False, True] < 0.9 * 0.95 * held[False]


def test_recomputation_needs_a_value_for_each_stage():
    with pytest.raises(ModelError, match="3 values for 1 stages") as caught:
        lone_trainer(config("1f1b", 1, 2, recompute=(True, False, True)))
    assert caught.value.key == "train.recompute"


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
@pytest.mark.parametrize("world_size", [TWO, 3])
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
