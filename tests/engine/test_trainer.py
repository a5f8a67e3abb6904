"""Exactness: a pipeline trains as the unsplit model does, whatever the schedule and the cut."""

import itertools

import pytest
from pipeline import assert_exact, config

SCHEDULES = ("afab", "1f1b")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
THOROUGH = pytest.mark.thorough
BETWEEN = pytest.param(2, marks=THOROUGH)  # what one and four show as well
CHIEFLY_1F1B = [pytest.param("afab", marks=THOROUGH), "1f1b"]
FEW_AND_MANY = {(1, 3), (3, 1), (3, 8)}
EVERY = itertools.product((1, 2, 3, 4), (1, 2, 3, 8))


@pytest.mark.parametrize(
    ("world_size", "num_microbatches"),
    [size if size in FEW_AND_MANY else pytest.param(*size, marks=THOROUGH) for size in EVERY],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_gradients_and_training_equal_the_unsplit_model(
    ranks, schedule, world_size, num_microbatches
):
    outcomes = assert_exact(ranks, config(schedule, world_size, num_microbatches))
    if schedule == "1f1b":
        for rank, outcome in enumerate(outcomes):
            assert outcome.peak_held <= world_size - rank
    else:
        assert [o.peak_held for o in outcomes] == [num_microbatches] * world_size


@pytest.mark.parametrize("partition", [(4, 0), (1, 0, 3), (0, 0, 0, 4), (2, 0, 0, 2)], ids=str)
@pytest.mark.parametrize("schedule", CHIEFLY_1F1B)
def test_uneven_and_empty_stages_are_exact(ranks, schedule, partition):
    assert_exact(ranks, config(schedule, len(partition), 3, partition=partition))


@pytest.mark.parametrize("schedule", CHIEFLY_1F1B)
def test_more_stages_than_layers_is_exact(ranks, schedule):
    assert_exact(ranks, config(schedule, 6, 4))


@pytest.mark.parametrize("world_size", [1, BETWEEN, 4])
@pytest.mark.parametrize("schedule", CHIEFLY_1F1B)
def test_tied_weights_train_as_one(ranks, schedule, world_size):
    assert_exact(ranks, config(schedule, world_size, 3, preset="llama-tiny-tied"), shared=TIED)
