"""A pipeline learns: a byte-level model on real text, on two ranks."""

import numpy as np
import pytest
from pipeline import config, with_trainer

from engine.model.data import Data, DataSpec
from engine.run.optimizer import OptimizerSpec

NUM_STEPS = 140
OPTIMIZER = OptimizerSpec(
    learning_rate=5e-3, lr_schedule="cosine", lr_warmup_steps=10, lr_decay_steps=NUM_STEPS
)


def unigram_entropy():
    """Nats per byte of a model that knows how often each byte occurs, and nothing else."""
    sample = Data(DataSpec(seq_len=4096, num_microbatches=64), 256).step(0)
    counts = np.bincount(np.concatenate([x.numpy().ravel() for x in sample.inputs]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def losses(trainer):
    return [trainer.step(step).loss for step in range(NUM_STEPS)]


def test_the_loss_falls_well_below_the_unigram_entropy_of_the_data(ranks):
    batch = {"source": "stdlib", "seq_len": 128, "microbatch_size": 4}
    settings = config("1f1b", 2, 2, dtype="float32", optimizer=OPTIMIZER, **batch)
    curve = ranks.run(2, with_trainer, settings, losses)[-1]
    assert curve[0] == pytest.approx(np.log(256), rel=0.05)
    assert np.mean(curve[-20:]) < unigram_entropy() - 0.4
