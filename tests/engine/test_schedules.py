"""Exactness of every schedule: split backward, several stages per rank, both placements."""

import itertools

import pytest
from pipeline import assert_exact, config, train_over_gloo

from engine.plan.lower import Policy
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, build_program

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
SPLIT = ("zb_h1", "interleaved_zb", "zbv", "dualpipev")
THOROUGH = pytest.mark.thorough
A_LINE_AND_A_V = [
    name if name in ("zb_h1", "dualpipev") else pytest.param(name, marks=THOROUGH) for name in SPLIT
]
EVERY_KIND = ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipev")
A_FEW = [name if name in EVERY_KIND else pytest.param(name, marks=THOROUGH) for name in SCHEDULES]
"""By default a schedule of each kind, where nothing but its kind matters."""

TWO = pytest.param(2, marks=THOROUGH)  # what four ranks show as well
FOUR = pytest.param(4, marks=THOROUGH)  # what two ranks show as well, where both tie


@pytest.mark.parametrize("world_size", [TWO, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_gradients_and_training_equal_the_unsplit_model(ranks, schedule, world_size):
    settings = config(schedule, world_size, 8)
    outcomes = assert_exact(ranks, settings)
    program = build_program(schedule, world_size, 8)
    assert [outcome.peak_held for outcome in outcomes] == peak_activations(program)


FEW_AND_MANY = {(3, 1), (3, 8)}
EVERY = itertools.product((1, 2, 3, 4), (1, 2, 3, 8))


@pytest.mark.parametrize(
    ("world_size", "num_microbatches"),
    [size if size in FEW_AND_MANY else pytest.param(*size, marks=THOROUGH) for size in EVERY],
)
@pytest.mark.parametrize("schedule", [pytest.param("afab", marks=THOROUGH), "1f1b"])
def test_any_number_of_ranks_and_microbatches_is_exact(
    ranks, schedule, world_size, num_microbatches
):
    assert_exact(ranks, config(schedule, world_size, num_microbatches))


@pytest.mark.parametrize("schedule", A_FEW)
def test_over_gloo_they_equal_it_as_well(ranks, schedule):
    assert_exact(ranks, config(schedule, 2, 4), run=train_over_gloo)


@pytest.mark.parametrize(
    "schedule",
    [name if name == "dualpipev" else pytest.param(name, marks=THOROUGH) for name in SCHEDULES],
)
def test_over_gloo_ranks_between_others_equal_it_as_well(ranks, schedule):
    assert_exact(ranks, config(schedule, 4, 8), run=train_over_gloo)


FEW = ("interleaved_1f1b", "zb_h2", "zbv", "v_half", "v_min")
SPECIAL = [
    *((name, 1, 4, {}) for name in EVERY_KIND),  # without any message
    *((name, 4, 2, {"stages_per_rank": 1 if name == "zb_h2" else 2}) for name in FEW),
    ("interleaved_zb", 2, 4, {"stages_per_rank": 3}),
    ("1f1b", 4, 3, {"partition": (2, 0, 0, 2)}),
    ("zb_h1", 2, 4, {"recompute": (False, True)}),
    ("dualpipev", 2, 4, {"recompute": (True, False, False, True)}),
    ("interleaved_zb", 2, 4, {"policy": Policy.JUST_IN_TIME}),
    ("interleaved_zb", 2, 4, {"look_ahead": 4}),
]


@pytest.mark.parametrize(("schedule", "world_size", "num_microbatches", "changes"), SPECIAL)
def test_special_shapes_and_settings_are_exact(
    ranks, schedule, world_size, num_microbatches, changes
):
    assert_exact(ranks, config(schedule, world_size, num_microbatches, **changes))


@pytest.mark.parametrize("world_size", [1, 2, FOUR])
@pytest.mark.parametrize("schedule", A_LINE_AND_A_V)
def test_tied_weights_train_as_one_wherever_their_stages_are(ranks, schedule, world_size):
    """In a V both stages are on rank 0; in a loop they are on the first and the last rank."""
    settings = config(schedule, world_size, 2 * world_size, preset="llama-tiny-tied")
    assert_exact(ranks, settings, shared=TIED)


@pytest.mark.parametrize("schedule", A_LINE_AND_A_V)
def test_empty_stages_are_exact(ranks, schedule):
    v = 1 if schedule == "zb_h1" else 2
    partition = (0, 4, 0, 0) if v == 1 else (0, 1, 0, 2, 0, 0, 1, 0)
    assert_exact(ranks, config(schedule, 4, 8, partition=partition))


def test_a_program_file_is_exact(ranks, tmp_path):
    """Uneven: rank 0 has the first and the last stage, rank 1 the one between."""
    file = tmp_path / "program.csv"
    file.write_text("0F0,2F0,2I0,0F1,2F1,2W0,2B1,0B0,,0I1,0W1\n0UNSHARD,,1F0,1F1,1I0,1B1,1W0\n")
    assert_exact(ranks, config(f"csv:{file}", 2, 2))
