"""Models of noise by their moments; demands are about figures that are measured."""

import numpy as np
import pytest

from benchmarks import judging, tracking
from benchmarks.made_up_launches import (
    ALL_MODELS,
    BIMODAL,
    Demand,
    Settings,
    made_up_steps,
)

TINY = Settings(seed=8, series=2, searches=2, steps=20, json=None)


def drawn(name, shape=(20_000, 10)):
    return ALL_MODELS[name](np.random.default_rng(0), shape)


def test_normal_and_exponential_launches_deviate_by_0_8_percent():
    assert drawn("normal").std() == pytest.approx(0.008, rel=0.02)
    exponential = drawn("exponential")
    assert exponential.std() == pytest.approx(0.008, rel=0.02)
    assert exponential.min() >= 0


def test_t3_has_the_quartiles_of_t3_scaled_to_a_deviation_of_0_8_percent():
    quartile = 0.7649 * 0.008 / np.sqrt(3)
    assert np.quantile(drawn("t3"), 0.75) == pytest.approx(quartile, rel=0.03)


@pytest.mark.parametrize(("name", "share"), [("10 % disturbed", 0.1), ("20 % disturbed", 0.2)])
def test_disturbed_launches_take_10_to_35_percent_longer(name, share):
    values = drawn(name)
    slow = values > 0.06
    assert slow.mean() == pytest.approx(share, rel=0.05)
    assert np.expm1(values[slow]).mean() == pytest.approx(0.225, rel=0.05)
    assert values[~slow].std() == pytest.approx(0.008, rel=0.02)


def test_bimodal_launches_have_the_moments_of_their_two_levels():
    values = drawn("bimodal 3% in 30%")
    level = np.log(1.03)
    assert values.mean() == pytest.approx(0.3 * level, rel=0.02)
    assert values.var() == pytest.approx(0.008**2 + 0.3 * 0.7 * level**2, rel=0.02)
    assert len(BIMODAL) == 15


def test_neighbours_are_correlated_and_a_day_drifts():
    values = drawn("correlated")
    assert np.corrcoef(values[:, 0], values[:, 1])[0, 1] == pytest.approx(0.6, abs=0.02)
    assert values.std() == pytest.approx(0.008, rel=0.02)
    day = drawn("drift")
    assert day.var() == pytest.approx(0.008**2 + 0.01**2 / 2, rel=0.03)
    assert np.corrcoef(day[:, 0], day[:, 1])[0, 1] > 0.2


def test_a_step_is_as_long_as_its_launch_says():
    steps = made_up_steps(
        np.random.default_rng(0), (50,), 4000, lambda _, shape: np.full(shape, 0.1)
    )
    assert np.log(np.median(steps, axis=-1)).mean() == pytest.approx(0.1, abs=1e-3)


def test_a_demand_is_a_bound_in_either_direction():
    assert Demand("rate", at_most=0.01).is_held(0.01)
    assert not Demand("rate", at_most=0.01).is_held(0.011)
    assert Demand("rate", at_least=0.9).is_held(0.95)
    assert str(Demand("launches, number", at_most=8)) == "launches, number <= 8.00"
    assert str(Demand("rate", at_least=0.9)) == "rate >= 90.00%"


@pytest.mark.parametrize("part", ["history", "histories"])
def test_each_part_measures_the_figures_of_its_demands(part):
    figures = dict(tracking.PARTS[part](TINY))
    assert all(np.isfinite(value) for value in figures.values())
    is_long = part == "histories"
    demanded = {
        demand.figure
        for demand in tracking.DEMANDS
        if demand.figure.startswith("history") and ("disturbed" in demand.figure) == is_long
    }
    assert demanded
    assert demanded <= set(figures)


@pytest.mark.parametrize("name", judging.TURNS)
def test_turns_have_the_difference_and_the_noise_that_they_say(name):
    turns, draw = judging.TURNS[name], np.random.default_rng(0)
    launches = [turns.launch(draw, 0.3) for _ in range(400)]
    logs = np.array([[each.base, each.head] for each in launches])
    differences = np.log(logs[:, 1]) - np.log(logs[:, 0])
    assert np.median(differences) == pytest.approx(0.3, abs=0.01)
    between = np.median(differences, axis=1).std()
    assert turns.start <= between * 1.1
    quiet = np.quantile(np.abs(differences - 0.3), 0.2)
    assert quiet > 0.2 * turns.turn
