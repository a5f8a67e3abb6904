import pytest

from engine.model.partition import PartitionError, partition_layers


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
    stages = partition_layers("uniform", num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_an_explicit_list_is_taken_as_it_is():
    assert partition_layers((1, 0, 3), 4, 3) == [range(1), range(1, 1), range(1, 4)]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((2, 2, 2), "names 3 stages; there are 2"),
        ((2, 1), "sums to 3 layers; the model has 4"),
        ((5, -1), "sums to 4"),
        ("balanced", 'unknown partition "balanced"'),
    ],
)
def test_a_partition_that_does_not_fit_says_why(partition, message):
    with pytest.raises(PartitionError, match=message):
        partition_layers(partition, 4, 2)
