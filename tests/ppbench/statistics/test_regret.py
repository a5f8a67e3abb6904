"""The regret of a first choice: who is set aside, when it is decided, and how rarely falsely."""

import math
import random

import pytest

from ppbench.statistics.regret import (
    MARGIN,
    Finding,
    interval_of,
    race,
    reach,
    regret_of,
)
from ppbench.statistics.sequential import Stop
from ppbench.statistics.verdicts import Noise


def launches(true_steps, noise, seed, *, drift=0.0, disturbed=0.0):
    """Made-up launches: normal noise, a drift by round, and some launches 10 % longer."""
    drawn = random.Random(seed)
    steps = [[] for _ in true_steps]

    def measured(going, count):
        for arm in going:
            while len(steps[arm]) < count:
                exponent = drawn.gauss(0, noise) + drift * len(steps[arm])
                longer = 1.1 if drawn.random() < disturbed else 1
                steps[arm].append(true_steps[arm] * math.exp(exponent) * longer)
        return steps

    return measured


def outcomes(true_steps, noise, num=200, most=6, **more):
    return [
        race(launches(true_steps, noise, seed, **more), len(true_steps), most)
        for seed in range(num)
    ]


def share(some, *findings):
    return sum(one.regret.finding in findings for one in some) / len(some)


def test_a_clear_winner_is_decided_in_two_or_three_rounds():
    for true_steps in ([100, 115], [100, 112, 115, 130]):
        some = outcomes(true_steps, 0.01)
        assert share(some, Finding.best, Finding.within) == 1
        assert sum(len(one.steps[0]) <= 3 for one in some) >= 0.95 * len(some)


def test_a_first_choice_that_is_clearly_slower_is_found_out():
    some = outcomes([115, 100, 112], 0.01)
    assert share(some, Finding.slower) >= 0.98
    assert sum(one.regret.low <= 0.15 <= one.regret.high for one in some) >= 0.95 * len(some)
    assert all(one.regret.rival == 1 for one in some if one.regret.finding is Finding.slower)


@pytest.mark.parametrize(
    ("noise", "more"),
    [(0.003, {}), (0.02, {}), (0.01, {"drift": 0.02}), (0.01, {"disturbed": 0.2})],
    ids=["quiet", "noisy", "drifting", "disturbed"],
)
def test_equal_ones_have_no_false_regret_in_more_than_5_percent(noise, more):
    some = outcomes([100] * 4, noise, **more)
    assert share(some, Finding.slower) <= 0.05
    if noise == 0.003:
        assert share(some, Finding.within, Finding.best) >= 0.95


def test_a_regret_at_the_margin_is_seldom_put_on_either_side():
    longer = 100 * (1 + MARGIN)
    some = outcomes([longer, 100, longer, longer], 0.01)
    assert share(some, Finding.slower) <= 0.05
    assert share(some, Finding.best, Finding.within) <= 0.05


def test_who_is_clearly_slower_is_set_aside_and_the_rest_goes_on():
    said = []
    steps = launches([100, 100.5, 140], 0.01, 3)
    done = race(steps, 3, 6, said.append)
    assert [(one.arm, one.num_launches) for one in said] == [(2, 2)]
    assert said[0].longer.low < 140 / 100 < said[0].longer.high
    assert len(done.steps[2]) == 2
    assert len(done.steps[0]) == len(done.steps[1]) > 2


def test_one_that_failed_is_set_aside_and_a_failed_first_choice_ends_it():
    said = []
    race(lambda *_: [[100, 101], [], [140, 141]], 3, 2, said.append)
    assert (said[0].arm, said[0].longer) == (1, None)
    failed = race(lambda *_: [[], [100, 101]], 2, 6, said.append)
    assert failed.regret is None
    assert failed.stop(6) is Stop.failed
    assert [one.arm for one in said] == [1, 2]


def test_launches_that_cannot_be_made_end_it_without_a_decision():
    calls = []

    def measured(going, count):
        calls.append(count)
        return [[100, 104], [101, 98]]

    done = race(measured, 2, 6)
    assert done.regret.finding is Finding.undecided
    assert calls == [2, 3]
    assert (done.stop(6), done.stop(2)) == (Stop.failed, Stop.most)


def test_one_launch_of_each_decides_nothing():
    done = race(launches([100, 200], 0.01, 1), 2, 1)
    assert done.regret.finding is Finding.undecided
    assert (done.regret.low, done.regret.high) == (0, math.inf)
    assert interval_of(done.steps, 0).high == math.inf


def test_a_regret_is_never_below_zero_and_has_the_best_as_its_rival():
    regret = regret_of([[100, 101, 100], [105, 104, 106], [103, 102, 103]], [0, 1, 2])
    assert (regret.estimate, regret.low) == (0, 0)
    assert regret.rival == 2


def test_noisy_launches_are_not_judged_by_the_spread_of_quiet_ones():
    steps = [[100, 120, 90], [95, 84, 101], [100, 100.1, 100], [100.1, 100, 100.1]]
    assert regret_of(steps, [0, 1]).finding is Finding.undecided


def test_a_regret_as_far_from_the_margin_as_is_said_is_decided_by_half_of_all_trials():
    far = dict(reach(Noise(0.01, 1000), 2, 6))
    assert list(far) == [2, 4, 6]
    assert far[2] > far[4] > far[6] > 0
    for num, by in far.items():
        some = outcomes([100 * (1 + MARGIN + by), 100], 0.01)
        decided = [one for one in some if one.regret.finding is not Finding.undecided]
        by_then = sum(len(one.steps[0]) <= num for one in decided) / len(some)
        assert by_then >= 0.5


def test_the_launches_of_all_arms_are_seen_before_any_is_set_aside():
    seen = []
    race(launches([100, 101, 150], 0.01, 1), 3, 6, on_first_rounds=seen.append)
    assert [len(own) for steps in seen for own in steps][:3] == [len(own) for own in seen[0]]
    assert len(seen) == 1
