"""Odd uses of weights are exact or refused, whatever shards them and splits their backward.

Two oracles. The comparison with the author's module may refuse a case; one that it calls exact is
trained once more, and has the losses of a plain loop over the author's module.
"""

from __future__ import annotations

import dataclasses
import random
import re

import odd_weights
import pytest
import torch
from pipeline import CPU, config, optimizer_of
from torch.nn.functional import cross_entropy

from engine.connection import agree, broadcast
from engine.exactness import compare
from engine.model.data import Data
from engine.plan.collectives import DataParallel, Zero1, Zero2, Zero3
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer

NUM_STEPS = 4
KINDS = [
    *("viewed", "assigned", "scaled", "swapped", "called", "growing", "differentiating"),
    *("normalised", "hooked_when_accumulated", "hooked_gradients"),
]
POLICIES = [None, DataParallel(), Zero1(), Zero2(), Zero3()]
CASES = [
    (kind, policy, schedule, is_mixed)
    for kind in KINDS
    for policy in POLICIES
    for schedule in ("1f1b", "zb_h1", "zbv")
    for is_mixed in (False, True)
]
FEW = random.Random(0).sample(CASES, 24)
LEAST = {False: 1e-10, True: 5e-3}
"""The largest relative difference of a loss that is rounding, of which bfloat16 has more."""


def trained(fabric, is_member, settings):
    """Return the losses of some steps. Raises where the comparison does not call them exact."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric)
    group = fabric.host_group_of(trainer.everyone)
    compare(
        *(trainer, settings, CPU),
        gather=trainer.gather,
        decide=lambda work: work() if len(trainer.everyone) == 1 else broadcast(work, group),
    )
    trainer.close()
    trainer = Trainer(agreement, fabric)
    losses = [trainer.step(step).loss for step in range(NUM_STEPS)]
    trainer.close()
    return losses


def losses_of_a_loop(settings, is_mixed):
    """The author's module in a plain loop, with all replicas' microbatches."""
    torch.manual_seed(settings.model.seed)
    module = getattr(odd_weights, settings.model.name.partition(":")[2])()
    module.to(settings.model.torch_dtype).train()
    for inner in module.modules():
        if isinstance(inner, odd_weights.Viewed):  # views of what was there before the cast
            half = inner.top.shape[0]
            inner.top, inner.rest = inner.inner.weight[:half], inner.inner.weight[half:]
    num = settings.replicas * settings.data.num_microbatches
    data = Data(dataclasses.replace(settings.data, num_microbatches=num), 256)
    optimizer, losses = optimizer_of(settings.optimizer, module), []
    for step in range(NUM_STEPS):
        batch, total = data.step(step), 0.0
        optimizer.zero_grad()
        for ids, targets in zip(batch.inputs, batch.targets, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                logits = module(ids)
            logits = logits.float() if logits.dtype == torch.bfloat16 else logits
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / batch.num_tokens).backward()
            total += loss.item() / batch.num_tokens
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("kind", "policy", "schedule", "is_mixed"),
    [pytest.param(*c, marks=() if c in FEW else pytest.mark.thorough) for c in CASES],
    ids=str,
)
def test_an_odd_use_of_weights_is_exact_or_refused(
    ranks, monkeypatch, kind, policy, schedule, is_mixed
):
    replicas = 1 if policy is None else 2
    settings = config(
        *(schedule, 2, 4 // replicas),
        preset=f"odd_weights:{kind}",
        dtype="float32" if is_mixed else "float64",
        autocast="bfloat16" if is_mixed else "none",
        optimizer=OptimizerSpec("sgd", 0.2, momentum=0.9),
        seq_len=6,
        replicas=replicas,
        sharding=policy or DataParallel(),
    )
    monkeypatch.setattr("ranks.GRACE_S", 1)  # for the others, where one rank refuses
    try:
        told = ranks.run(settings.num_processes, trained, settings)
    except Exception as refusal:
        cannot_be_cast = kind == "viewed" and not is_mixed  # its views stay in float32
        expected = r"InexactError: \S|ModelError: \S" + "|same dtype" * cannot_be_cast
        assert re.search(expected, str(refusal)), refusal
        return
    (losses, *_) = (part for part in told if part[0] is not None)
    assert losses == pytest.approx(losses_of_a_loop(settings, is_mixed), rel=LEAST[is_mixed])
