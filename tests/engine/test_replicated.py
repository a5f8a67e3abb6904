"""Replicas of a pipeline train as one device does on the whole batch, whatever they shard."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pipeline import (
    TOLERANCE,
    Outcome,
    _accumulate,
    config,
    merged,
    relative_difference,
    unsplit_transformers,
)

from engine.model.data import Data
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
)
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, connect

NUM_STEPS = 3
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
CLIP = OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)


def train(fabric, is_member, settings):
    settings = connect(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    initial = cloned(trainer.gathered(lambda held: held.detach()))
    loss = trainer.compute_gradients(0)
    gradients = cloned(trainer.gathered(lambda held: held.grad))
    results = tuple(trainer.step(step) for step in range(NUM_STEPS))
    trained = cloned(trainer.gathered(lambda held: held.detach()))
    trainer.close()
    return Outcome(loss, initial, gradients, trained, results=results)


def cloned(tensors):
    return {name: None if t is None else t.detach().clone() for name, t in tensors.items()}


def unsplit(settings, initial):
    whole = dataclasses.replace(
        settings.data, num_microbatches=settings.replicas * settings.data.num_microbatches
    )
    model = unsplit_transformers(settings, initial)
    data = Data(whole, 256)
    loss = _accumulate(model, data, 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), settings.optimizer.learning_rate)
    norms = []
    for step in range(NUM_STEPS):
        _accumulate(model, data, step)
        limit = settings.optimizer.clip_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    return loss, gradients, trained, norms


def assert_replicas_are_exact(ranks, settings, shared=None):
    outcomes = ranks.run(settings.num_processes, train, settings)
    pipelines = [
        outcomes[at : at + settings.world_size]
        for at in range(0, len(outcomes), settings.world_size)
    ]
    initial = merged([o.initial for o in pipelines[0]], shared)
    loss, gradients, trained, norms = unsplit(settings, initial)
    for pipeline in pipelines:
        (ours,) = (o.loss for o in pipeline if o.loss is not None)
        assert abs(ours - loss) < TOLERANCE * loss
        for found, expected in (("gradients", gradients), ("trained", trained)):
            whole = merged([getattr(o, found) for o in pipeline], shared)
            assert whole.keys() == expected.keys()
            for name, tensor in whole.items():
                assert relative_difference(tensor, expected[name]) < TOLERANCE, (found, name)
        if settings.optimizer.clip_norm:
            for outcome in pipeline:
                ours = [result.gradient_norm for result in outcome.results]
                assert ours == pytest.approx(norms, rel=TOLERANCE)
    return outcomes


@pytest.mark.parametrize(
    "policy",
    [
        NoCollectives(),
        DataParallel(),
        Zero1(),
        Zero2(),
        Zero2(False),
        Zero3(),
        Zero3(1, 0),
        TorchWindow(),
    ],
    ids=str,
)
def test_x(ranks, policy):
    assert_replicas_are_exact(
        ranks, config("1f1b", 2, 2, replicas=2, sharding=policy, optimizer=CLIP)
    )
