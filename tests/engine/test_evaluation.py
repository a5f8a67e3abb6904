"""Ranks evaluate as the author's module does on one device: its losses, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from pipeline import (
    SEQ_LEN,
    VOCABULARY,
    _accumulate,
    _author_module,
    config,
    memory_of,
    merged,
    over_gloo,
    state_of,
    with_trainer,
)
from test_exact import trained_if_exact
from torch import nn

from engine.configuration import tokenizer_of
from engine.model.data import TextLoader
from engine.plan.collectives import Zero3
from engine.plan.schedules.registry import EVALUATE

NUM_BATCHES = 20
TRACED = {"split": "trace", "split_points": ("layers.1", "layers.3")}


def with_dropout() -> nn.Sequential:
    """What is random in training, or changes buffers there, does nothing in an evaluation."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
    norm = nn.BatchNorm1d(SEQ_LEN)
    return nn.Sequential(nn.Embedding(256, 8), *blocks, norm, nn.Linear(8, 256))


def evaluate(trainer):
    """Losses of batches; the state before them, and after."""
    before = state_of(trainer)
    losses = [trainer.step(number).loss for number in range(NUM_BATCHES)]
    after = state_of(trainer)
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in trainer.parameters().values())
    assert trainer.optimizer is None
    assert trainer.peak_held == 1
    return losses, before


def unsplit_losses(settings, initial):
    num_microbatches = settings.data.num_microbatches * settings.replicas
    data = dataclasses.replace(settings.data, num_microbatches=num_microbatches)
    module, loss_of = _author_module(settings, initial)
    loader = TextLoader(data, VOCABULARY, tokenizer_of(settings))
    batches = (loader.step(number) for number in range(NUM_BATCHES))
    return [_accumulate(module.eval(), batch, loss_of, "none") for batch in batches]


@pytest.mark.parametrize(
    ("shape", "ways", "changes"),
    [
        (("1f1b", 2, 4), (), {"rehearses": True}),
        (("1f1b", 4, 3), (over_gloo,), {}),
        (("looped_bfs", 2, 3), (), {}),
        (("zbv", 2, 4), (over_gloo,), {}),
        (("chimera", 2, 4), (), {"replicas": 2}),
        (("dualpipe", 4, 6), (), {}),  # fewer than it trains with
        (("interleaved_1f1b", 3, 7), (), {}),
        (("1f1b", 2, 2), (), {"preset": "llama-tiny-tied", "replicas": 2, "sharding": Zero3()}),
        (("dualpipev", 2, 4), (), {"preset": "models:sequential"}),
        (("1f1b", 2, 4), (), {"preset": "traced_models:Tutorial", **TRACED}),
        (("1f1b", 2, 4), (), {"preset": "test_evaluation:with_dropout"}),
        (("1f1b", 2, 2), (), {"seq_len": "variable", "max_seq_len": 120}),
    ],
)
def test_twenty_batches_have_the_loss_of_the_unsplit_model(ranks, shape, ways, changes):
    settings = config(*shape, mode=EVALUATE, **changes)
    found = ranks.run(settings.num_processes, *ways, with_trainer, settings, evaluate)
    initial = merged([state for _, state in found[: settings.world_size]])
    losses = [losses for losses, _ in found if losses[0] is not None]
    assert len(losses) == settings.replicas
    for own in losses:
        assert own == pytest.approx(unsplit_losses(settings, initial), rel=1e-10)


@pytest.mark.parametrize("preset", ["llama-tiny", "traced_models:with_dropout"])
def test_the_comparison_with_the_author_s_module_compares_losses(ranks, preset):
    """A module is traced without the dropout of a training."""
    is_traced = preset != "llama-tiny"
    rest = {"split": "trace", "split_points": ("third",)} if is_traced else {}
    settings = config("1f1b", 2, 2, preset=preset, mode=EVALUATE, **rest)
    for outcome in ranks.run(2, trained_if_exact, settings):
        assert not isinstance(outcome, str), outcome


@pytest.mark.parametrize("name", ["1f1b", "looped_bfs", "zbv"])
def test_memory_does_not_grow_with_microbatches_and_is_predicted(ranks, name):
    peaks = []
    for m in (4, 16):
        settings = config(name, 2, m, mode=EVALUATE, microbatch_size=4)
        uses = ranks.run(2, with_trainer, settings, memory_of)
        assert all(abs(use.predicted_peak_bytes / use.peak_bytes - 1) <= 0.02 for use in uses)
        peaks.append([use.at_peak.activation_bytes for use in uses])
    num_ids = 2 * 12 * 4 * SEQ_LEN * 8  # inputs and targets of the batch
    assert all(many - few <= num_ids for few, many in zip(*peaks, strict=True))
