"""A pipeline learns: a byte-level model on real text, the same curve however it is run."""

import numpy as np
import pytest
from pipeline import config

from engine.model.data import Data, DataSpec
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, connect

NUM_STEPS = 140
OPTIMIZER = OptimizerSpec(
    learning_rate=5e-3, lr_schedule="cosine", lr_warmup_steps=10, lr_decay_steps=NUM_STEPS
)


def losses(fabric, is_member, settings, num_steps):
    settings = connect(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    curve = [trainer.step(step).loss for step in range(num_steps)]
    trainer.close()
    return curve


def curve(ranks, schedule, world_size, num_steps=NUM_STEPS):
    settings = config(
        schedule,
        world_size,
        2,
        dtype="float32",
        source="stdlib",
        seq_len=128,
        microbatch_size=4,
        optimizer=OPTIMIZER,
    )
    return ranks.run(world_size, losses, settings, num_steps)[-1]


@pytest.fixture(scope="module")
def one_device(ranks):
    return curve(ranks, "afab", 1)


def unigram_entropy():
    """Nats per byte of a model that knows how often each byte occurs, and nothing else."""
    sample = Data(DataSpec(seq_len=4096, num_microbatches=64), 256).step(0)
    counts = np.bincount(np.concatenate([x.numpy().ravel() for x in sample.inputs]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def test_the_loss_falls_well_below_the_unigram_entropy_of_the_data(one_device):
    assert one_device[0] == pytest.approx(np.log(256), rel=0.05)
    assert np.mean(one_device[-20:]) < unigram_entropy() - 0.4


@pytest.mark.parametrize("schedule", [pytest.param("afab", marks=pytest.mark.thorough), "1f1b"])
def test_the_curve_is_that_of_one_device(ranks, one_device, schedule, is_thorough):
    num_steps = NUM_STEPS if is_thorough else 30
    assert curve(ranks, schedule, 2, num_steps) == one_device[:num_steps]
