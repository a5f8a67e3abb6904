"""Medians and their errors; when equal layers are told apart."""

import random
import statistics

import pytest

from engine.run.layer_times import are_told_apart, median_error


def with_tail(numbers: random.Random) -> float:
    """Time with noise and, now and then, an interruption."""
    return numbers.gauss(100, 3) + (numbers.expovariate(0.05) if numbers.random() < 0.1 else 0)


@pytest.mark.parametrize("size", [5, 9, 10, 40])
@pytest.mark.parametrize("draw", [lambda numbers: numbers.gauss(100, 5), with_tail])
def test_the_error_of_a_median_is_how_far_medians_scatter(size, draw):
    numbers = random.Random(size)
    samples = [[draw(numbers) for _ in range(size)] for _ in range(1500)]
    scatter = statistics.stdev(map(statistics.median, samples))
    told = statistics.mean(map(median_error, samples))
    assert 0.9 * scatter < told < 1.4 * scatter


def test_one_value_and_equal_values_have_no_error():
    assert median_error([3.0]) == 0
    assert median_error([3.0] * 10) == 0


def layers(numbers: random.Random, factors: list[float], num_rounds: int) -> list[list[float]]:
    """Times of layers in rounds, which drift together."""
    drifts = [1 + 0.2 * numbers.random() for _ in range(num_rounds)]
    return [[f * drift * with_tail(numbers) for drift in drifts] for f in factors]


def test_equal_layers_are_hardly_ever_told_apart():
    numbers = random.Random(1)
    results = [are_told_apart(layers(numbers, [1.0] * 8, 10)) for _ in range(500)]
    assert sum(results) <= 10


@pytest.mark.parametrize("factors", [[1.0, 1.0, 1.0, 1.15], [1.0, 1.05, 1.1, 1.15]])
def test_layers_that_differ_are_told_apart(factors):
    numbers = random.Random(2)
    results = [are_told_apart(layers(numbers, factors, 20)) for _ in range(100)]
    assert sum(results) >= 95


def test_a_difference_within_the_target_error_is_none():
    assert not are_told_apart([[100.0, 101.0, 100.5] * 20, [103.0, 104.0, 103.5] * 20])


def test_ties_are_no_difference():
    assert not are_told_apart([[1.0, 2.0] * 10, [2.0, 1.0] * 10])
