import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.model.partition import (
    PartitionError,
    balance,
    partition_layers,
    times_to_balance,
    totals_of,
)
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.run.layer_costs import measure_model_costs


def counts(*arguments):
    return [len(layers) for layers in partition_layers(*arguments)]


def test_uniform_gives_equal_shares_and_the_rest_to_the_middle():
    assert counts("uniform", 8, 4) == [2, 2, 2, 2]
    assert counts("uniform", 8, 3) == [3, 3, 2]
    assert counts("uniform", 6, 4) == [1, 2, 2, 1]
    assert counts("uniform", 2, 4) == [0, 1, 1, 0]


@pytest.mark.parametrize("num_layers", range(12))
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_stages_own_every_layer_once_and_in_order(num_layers, num_stages):
    for stages in (
        partition_layers("uniform", num_layers, num_stages),
        balance((2, *[1] * num_layers, 3), num_stages),
    ):
        assert len(stages) == num_stages
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    uniform = partition_layers("uniform", num_layers, num_stages)
    assert max(map(len, uniform)) - min(map(len, uniform)) <= 1


def every_partition(num_layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        borders = (0, *cuts, num_layers)
        yield [range(a, b) for a, b in itertools.pairwise(borders)]


costs = st.integers(0, 50)


@settings(max_examples=150)
@given(st.lists(costs, max_size=7), costs, costs, st.integers(1, 4))
@example([2, 6, 1], 4, 7, 4)  # the head costs most, whatever the others do
def test_balancing_is_as_good_as_trying_every_partition(layers, before, after, num_stages):
    parts = (before, *layers, after)

    def score(partition):
        totals = totals_of(parts, partition)
        return max(totals), sum(total * total for total in totals)

    best = min(score(p) for p in every_partition(len(layers), num_stages))
    assert score(balance(parts, num_stages)) == best


def test_parameters_count_the_embeddings_and_the_head():
    model = open_model(ModelSpec("llama-160m"), (1, 8), torch.device("cpu"))
    embeddings, norm = 32_000 * 768, 768
    assert (model.part_sizes[0], model.part_sizes[-1]) == (embeddings, embeddings + norm)
    assert sum(model.part_sizes[1:-1]) + 2 * embeddings + norm == model.num_parameters
    assert [len(stage) for stage in balance(model.part_sizes, 3)] == [3, 6, 3]


def test_a_tied_head_counts_on_both_stages_that_hold_it():
    model = open_model(ModelSpec("llama-tiny-tied"), (1, 8), torch.device("cpu"))
    assert model.part_sizes[0] == 256 * 64
    assert model.part_sizes[-1] == 256 * 64 + 64


@pytest.mark.parametrize("preset", ["llama-tiny", "models:tied_sequential"])
def test_every_part_of_a_model_takes_time(preset):
    model = open_model(ModelSpec(preset), (1, 32), torch.device("cpu"))
    measured = times_to_balance(
        measure_model_costs(model, (1, 32), torch.device("cpu"), budget_s=0)
    )
    assert len(measured) == model.num_layers + 2
    assert min(measured[1:]) > 0


def test_an_explicit_list_is_taken_as_it_is():
    assert partition_layers((1, 0, 3), 4, 3) == [range(1), range(1, 1), range(1, 4)]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((2, 2, 2), "names 3 stages; there are 2"),
        ((2, 1), "sums to 3 layers; the model has 4"),
        ((5, -1), "sums to 4"),
        ("balanced", 'unknown partition "balanced"; expected one of uniform, parameters, measured'),
    ],
)
def test_a_partition_that_does_not_fit_says_why(partition, message):
    with pytest.raises(PartitionError, match=message):
        partition_layers(partition, 4, 2)
