"""Made-up launches and rounds scatter as their names say."""

import numpy as np
import pytest

from benchmarks.made_up_launches import MODELS, TURNS, kinds


def drawn(name, num=200_000):
    return MODELS[name](np.random.default_rng(0), num)


def test_launches_have_the_moments_that_they_say():
    assert drawn("normal").std() == pytest.approx(0.008, rel=0.02)
    assert drawn("exponential").std() == pytest.approx(0.008, rel=0.02)
    assert drawn("exponential").min() >= 0
    quartile = 0.7649 * 0.008 / np.sqrt(3)
    assert np.quantile(drawn("t3"), 0.75) == pytest.approx(quartile, rel=0.03)
    neighbours = drawn("correlated")
    assert np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1] == pytest.approx(0.6, abs=0.02)
    slow = drawn("20 % disturbed") > 0.06
    assert slow.mean() == pytest.approx(0.2, rel=0.05)
    assert drawn("bimodal").mean() == pytest.approx(0.3 * np.log(1.03), rel=0.02)


@pytest.mark.parametrize("name", TURNS)
def test_turns_have_the_difference_and_the_noise_that_they_say(name):
    turns, draw = TURNS[name], np.random.default_rng(0)
    launches = [turns.launch(draw, 0.3) for _ in range(400)]
    logs = np.array([[each.base, each.head] for each in launches])
    differences = np.log(logs[:, 1]) - np.log(logs[:, 0])
    assert np.median(differences) == pytest.approx(0.3, abs=0.01)
    assert turns.start <= np.median(differences, axis=1).std() * 1.1
    assert np.quantile(np.abs(differences - 0.3), 0.2) > 0.2 * turns.turn


def test_every_kind_of_comparison_is_judged():
    for _name, simulate in kinds():
        looked = simulate(np.random.default_rng(1), 0.05)
        assert looked.num_launches > 0
