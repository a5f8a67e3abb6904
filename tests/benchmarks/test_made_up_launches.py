"""Models of noise by their moments; demands are about figures that are measured."""

import numpy as np
import pytest

from benchmarks import robustness, tracking
from benchmarks.made_up_launches import (
    ALL_MODELS,
    BIMODAL,
    SEARCHED,
    Demand,
    Settings,
    made_up_steps,
    noises,
)

TINY = Settings(
    seed=8, comparisons=2, series=2, searches=2, sequences=2, steps=20, launches=5, json=None
)


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


def test_the_measured_noise_is_that_of_undisturbed_launches():
    known = noises(TINY, 60, SEARCHED["20 % disturbed"])
    assert np.median([noise.deviation for noise in known]) == pytest.approx(0.0086, rel=0.1)


def test_a_demand_is_a_bound_in_either_direction():
    assert Demand("rate", at_most=0.01).is_held(0.01)
    assert not Demand("rate", at_most=0.01).is_held(0.011)
    assert Demand("rate", at_least=0.9).is_held(0.95)
    assert str(Demand("launches, number", at_most=8)) == "launches, number <= 8.00"
    assert str(Demand("rate", at_least=0.9)) == "rate >= 90.00%"


@pytest.mark.parametrize("part", ["models", "histories", "sequences"])
def test_each_part_measures_the_figures_of_its_demands(part):
    figures = dict(tracking.PARTS[part](TINY))
    assert all(np.isfinite(value) for value in figures.values())
    starts = {
        "histories": lambda name: name.startswith("history"),
        "sequences": lambda name: name.startswith(("looks", "20 of 20")),
        "models": lambda name: not name.startswith(("history", "looks", "20 of 20")),
    }
    demanded = {demand.figure for demand in robustness.DEMANDS if starts[part](demand.figure)}
    assert demanded
    assert demanded <= set(figures)


def test_paired_steps_of_one_launch_a_side_claim_nothing():
    settings = Settings(8, 0, 0, 0, 100, 20, 5, None)
    figures = dict(robustness._paired(settings))
    assert figures["paired steps of one launch a side, no effect: 20 of 20"] > 0.5
    assert figures["20 of 20 paired steps of one launch a side, no effect: claims"] == 0
