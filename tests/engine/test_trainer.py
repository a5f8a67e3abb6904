"""Exactness: a pipeline trains as the unsplit model does, whatever the schedule and the cut."""

import pytest
from pipeline import Outcome, config, merged, relative_difference, train, train_unsplit
from ranks import Ranks

from engine.trainer import TrainerConfig

TOLERANCE = 1e-10
SCHEDULES = ("afab", "1f1b")


def assert_exact(ranks: Ranks, settings: TrainerConfig) -> list[Outcome]:
    tied = settings.model.preset.endswith("tied")
    outcomes = ranks.run(settings.world_size, train, settings)
    initial = merged([o.initial for o in outcomes], tied=tied)
    expected = train_unsplit(settings, initial)
    gradients = merged([o.gradients for o in outcomes], tied=tied)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.abs().max() > 0, f"{name} has a gradient of zeros"
        assert relative_difference(gradient, expected.gradients[name]) < TOLERANCE, name
    (loss,) = (o.loss for o in outcomes if o.loss is not None)
    assert abs(loss - expected.loss) < TOLERANCE * expected.loss
    trained = merged([o.trained for o in outcomes], tied=tied)
    for name, parameter in trained.items():
        assert relative_difference(parameter, expected.trained[name]) < TOLERANCE, name
        assert not parameter.equal(initial[name]), f"{name} was not trained"
    return outcomes


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


@pytest.mark.parametrize(
    "partition", [(3, 1), (0, 4), (4, 0), (1, 0, 3), (0, 4, 0), (0, 0, 0, 4), (2, 0, 0, 2)], ids=str
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_and_empty_stages_are_exact(ranks, schedule, partition):
    assert_exact(ranks, config(schedule, len(partition), 3, partition=partition))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_stages_than_layers_is_exact(ranks, schedule):
    assert_exact(ranks, config(schedule, 6, 4))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_train_as_one(ranks, schedule, world_size):
    assert_exact(ranks, config(schedule, world_size, 3, preset="llama-tiny-tied"))


def test_a_microbatch_of_several_sequences_is_exact(ranks):
    assert_exact(ranks, config("1f1b", 2, 3, microbatch_size=2))


def test_sgd_is_exact(ranks):
    assert_exact(ranks, config("1f1b", 2, 3, optimizer="sgd"))
