"""Change points of series made by hand, ranges and alarms by simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from samples import sampled

from ppbench.judge.differences import group
from ppbench.statistics.change_points import (
    RATIOS,
    cut_chances,
    find_changes,
    misfit,
)


def change_points(series, floor=0.01, **more):
    return list(find_changes(series, floor, **more).steps)


def made(seed, num_commits=60, num_launches=1, deviation=0.0087):
    return np.random.default_rng(seed).lognormal(0, deviation, (num_commits, num_launches))


def stepped(seed, at=40, factor=1.05, **more):
    series = made(seed, **more)
    series[at:] *= factor
    return series.tolist()


def test_a_step_without_noise_is_found_exactly():
    (point,) = change_points([[100.0]] * 7 + [[110.0]] * 5)
    assert (point.good, point.first, point.last, point.num_commits) == (6, 7, 7, 1)
    assert (point.size.estimate, point.size.low, point.size.high) == pytest.approx([0.1] * 3)
    assert point.p == 0


@pytest.mark.parametrize(
    "series",
    [
        [],
        [[1.0]],
        [[]] * 5,
        [[1.0, 2.0]],
        [[1.0], [2.0]],
        [[5.0]] * 30,
        [[], [5.0, 5.0], [], [5.0], []],
        [[0.1]] * 59 + [[0.1, 0.1, 0.1]],
    ],
)
def test_where_nothing_changed_or_too_little_is_known_there_is_none(series):
    assert change_points(series) == []


def test_a_change_smaller_than_the_floor_is_none():
    series = [[1000.0]] * 10 + [[1009.0]] * 10
    assert change_points(series) == []
    (point,) = change_points(series, floor=0.005)
    assert point.size.estimate == pytest.approx(0.009)


def test_commits_that_were_not_measured_may_have_made_the_change():
    series = [[1.0], [1.0], [], [1.0], [], [], [1.2], [1.2], [], [1.2]]
    (point,) = change_points(series)
    assert (point.good, point.first, point.last, point.num_commits) == (3, 6, 6, 3)


def test_commits_without_a_figure_may_be_left_out_if_the_others_are_numbered():
    series = [[1.0], [1.0], [], [1.0], [], [], [1.2], [1.2], [], [1.2]]
    measured = {number: figures for number, figures in enumerate(series) if figures}
    (point,) = change_points(list(measured.values()), numbers=list(measured))
    assert (point.good, point.first, point.last, point.num_commits) == (2, 3, 3, 3)


def test_a_change_at_the_newest_commit_shows_with_two_launches_of_it():
    series = made(3, 41).tolist()
    newest = [1.05 * value for value in made(4, 1, 2)[0]]
    assert change_points([*series, newest[:1]]) == []
    (point,) = change_points([*series, newest])
    assert (point.good, point.first, point.last) == (40, 41, 41)
    (point,) = change_points([*series, newest[:1], newest[1:]])
    assert point.first == 41


def test_a_change_that_was_soon_undone_is_two():
    series = made(5, 300)
    series[100:104] *= 1.06
    assert [point.first for point in change_points(series.tolist())] == [100, 104]


def test_changes_that_follow_one_another_are_all_found():
    series = made(6, 120)
    for at, factor in ((30, 1.04), (50, 0.95), (90, 1.06)):
        series[at:] *= factor
    points = change_points(series.tolist())
    assert all(
        point.good < at <= point.last for point, at in zip(points, (30, 50, 90), strict=True)
    )


@pytest.mark.parametrize("at", [20, 59])
def test_one_disturbed_launch_is_no_change(at):
    series = made(7)
    series[at] *= 1.15
    assert change_points(series.tolist()) == []


def test_two_launches_that_agree_by_chance_are_no_change():
    series = made(8, 200)
    series[120:122] = series.mean() * 1.012
    assert change_points(series.tolist()) == []


def shared(seed, num_commits=60, num_launches=5, deviation=0.008):
    """All launches of a commit share as much luck as each has of its own."""
    luck = np.random.default_rng([seed, 1]).lognormal(0, deviation, (num_commits, 1))
    return made(seed, num_commits, num_launches) * luck


def test_luck_that_launches_of_a_commit_share_hardly_ever_alarms():
    series = [shared(seed, num_launches=3).tolist() for seed in range(100)]
    assert np.mean([bool(change_points(figures)) for figures in series]) <= 0.04


def test_a_change_shows_with_its_second_commit_where_luck_is_shared():
    series = [shared(seed, 42) for seed in range(50)]
    for figures in series:
        figures[40:] *= 1.05
    assert np.mean([bool(change_points(figures[:41].tolist())) for figures in series]) < 0.1
    results = [change_points(figures.tolist()) for figures in series]
    held = [any(point.good < 40 <= point.last for point in points) for points in results]
    assert np.mean(held) > 0.95


def test_where_luck_is_shared_sizes_and_levels_are_those_of_commits_means():
    series = shared(2)
    series[40:] *= 1.05
    (point,) = change_points(series.tolist())
    means = np.log(series).mean(axis=1)
    oracle = scipy.stats.ttest_ind(means[point.first :], means[: point.first])
    low, high = np.exp(oracle.confidence_interval(0.95))
    assert (point.size.low, point.size.high) == pytest.approx((low - 1, high - 1))
    first, last = find_changes(series.tolist()).levels
    assert (first.num_launches, last.num_launches) == (5 * point.first, 5 * (60 - point.first))
    oracle = scipy.stats.ttest_1samp(means[: point.first], 0).confidence_interval(0.95)
    assert first.interval == pytest.approx(np.exp(oracle))


def test_fractions_change_in_points_and_may_be_none():
    series = [[0.0], [-0.001], [0.001], [0.0], [0.03], [0.031], [0.029], [0.03]]
    (point,) = change_points(series, in_points=True)
    assert point.first == 4
    assert point.size.estimate == pytest.approx(0.03)
    assert point.size.low < 0.03 < point.size.high
    assert change_points(series, 0.05, in_points=True) == []


def test_the_size_and_its_interval_are_those_of_students_test():
    series = stepped(10)
    (point,) = change_points(series)
    logs = np.log(np.ravel(series))
    oracle = scipy.stats.ttest_ind(logs[point.first :], logs[: point.first])
    low, high = np.exp(oracle.confidence_interval(0.95))
    assert (point.size.low, point.size.high) == pytest.approx((low - 1, high - 1))
    # 59 places, and 60 launches are 4 doubled four times
    assert point.p == pytest.approx(oracle.pvalue * 59 * 5)


def test_the_chances_of_a_cut_are_those_of_integrating_over_levels_and_spread():
    values, cuts = np.array([0.0, 0.3, 1.1, 0.9, 1.4]), np.array([1, 2, 3, 4])
    means, spreads = np.linspace(-8, 9, 341), np.exp(np.linspace(-4, 4, 200))

    def likelihood(side):  # integrated over its mean, for each spread
        apart = np.square(side[:, None] - means).sum(axis=0)[:, None]
        return np.exp(-apart / (2 * spreads**2)).sum(axis=0) / spreads ** len(side)

    # The prior of the spread is flat in its logarithm, as the grid is.
    weights = np.array([1.0, 2.0, 1.0, 1.0])
    expected = weights * [(likelihood(values[:c]) * likelihood(values[c:])).sum() for c in cuts]
    expected /= expected.sum()
    assert cut_chances(values, cuts, weights) == pytest.approx(expected, abs=0.01)


def test_the_range_holds_the_change_in_95_percent():
    results = [change_points(stepped(seed, factor=1.02)) for seed in range(80)]
    held = [any(point.good < 40 <= point.last for point in points) for points in results]
    assert np.mean(held) > 0.95
    assert np.mean([point.num_commits - 1 for points in results for point in points]) < 5


@pytest.mark.parametrize("num_commits", [10, 200])
def test_series_without_a_change_hardly_ever_alarm(num_commits):
    alarms = [bool(change_points(made(seed, num_commits).tolist())) for seed in range(100)]
    assert np.mean(alarms) <= 0.04


def test_levels_hold_all_commits_with_students_interval():
    series = [[], [1.0], [1.1], [], [2.0, 2.1], [2.2], []]
    first, last = find_changes(series).levels
    assert (first.first, first.last, first.num_launches) == (0, 3, 2)
    assert (last.first, last.last, last.num_launches) == (4, 6, 3)
    logs = np.log([2.0, 2.1, 2.2])
    assert last.estimate == pytest.approx(np.exp(logs.mean()))
    oracle = scipy.stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert last.interval == pytest.approx(np.exp(oracle))


def test_levels_of_few_launches_say_what_is_known():
    assert find_changes([]).levels == ()
    assert find_changes([[], []]).levels == ()
    (single,) = find_changes([[3.0]]).levels
    assert (single.estimate, single.interval) == (pytest.approx(3.0), None)
    (fraction,) = find_changes([[0.0, 0.0]], in_points=True).levels
    assert (fraction.estimate, fraction.interval) == (0.0, (0.0, 0.0))


def disturbed(series, share=0.1, seed=0):
    """Some launches take 10 to 35 % longer."""
    draw = np.random.default_rng([seed, 7])
    slowed = np.where(draw.random(series.shape) < share, draw.uniform(1.1, 1.35, series.shape), 1.0)
    return series * slowed


def test_a_change_is_found_among_disturbed_launches():
    found, close, alarms = [], [], []
    for seed in range(25):
        series = disturbed(made(seed, 80), seed=seed)
        alarms.append(bool(change_points(series.tolist(), slow_sign=1)))
        series[40:] *= 1.05
        points = change_points(series.tolist(), slow_sign=1)
        found.append(any(point.good < 40 <= point.last for point in points))
        close.append(any(abs(point.first - 40) <= 1 for point in points))
    assert np.mean(alarms) <= 0.04
    assert np.mean(found) >= 0.9
    assert np.mean(close) >= 0.75


def test_disturbed_launches_are_named_and_in_no_level():
    series = made(0, 20, 2)
    series[7, 1] *= 1.2
    assert find_changes(series.tolist(), slow_sign=1).apart == ((7, 1),)
    assert find_changes((1 / series).tolist(), slow_sign=-1).apart == ((7, 1),)
    assert find_changes(series.tolist()).apart == ()
    (level,) = find_changes(series.tolist(), slow_sign=1).levels
    assert level.num_launches == 39
    assert level.estimate < find_changes(series.tolist()).levels[0].estimate


def test_a_figure_that_is_none_does_not_move_the_names_of_disturbed_launches():
    series = made(0, 20, 2).tolist()
    series[3] = [math.nan, series[3][1]]
    series[7] = [series[7][0], series[7][1] * 1.2]
    assert find_changes(series, slow_sign=1).apart == ((7, 1),)
    series[3] = [math.nan, 1.3]
    assert find_changes(series, slow_sign=1).apart == ((3, 1), (7, 1))


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("seed", sampled(range(4)))
def test_a_commit_that_was_reverted_is_a_spike_and_the_later_change_is_found(seed, num):
    levels = np.array([1400.0] * 3 + [1080.0] + [1400.0] * 4 + [1171.0] * 4)
    series = levels[:, None] * made([seed, num], 12, num, 0.006)
    changes = find_changes(series.tolist(), slow_sign=-1)
    assert [(point.good, point.first, point.last) for point in changes.steps] == [(7, 8, 8)]
    assert changes.steps[0].size.estimate == pytest.approx(1171 / 1400 - 1, abs=0.01)
    assert [spike.first for spike in changes.spikes] == [3]
    assert changes.spikes[0].size.estimate == pytest.approx(1080 / 1400 - 1, abs=0.01)
    assert changes.apart == ()


@pytest.mark.parametrize("num", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", sampled(range(40), 3))
def test_spikes_anywhere_hide_no_change_and_are_none(seed, num):
    draw = np.random.default_rng([seed, num, 3])
    at = int(draw.integers(6, 15))
    series = made([seed, num], 20, num, 0.006)
    series[at:] *= draw.choice([0.93, 1.07])
    beside = {0, at - 2, at - 1, at, at + 1, 19}  # there a change of one commit reads otherwise
    places = draw.choice(sorted(set(range(20)) - beside), 2, replace=False)
    while abs(places[0] - places[1]) < 3:
        places = draw.choice(sorted(set(range(20)) - beside), 2, replace=False)
    series[places] *= draw.choice([0.75, 1.3], (2, 1))
    changes = find_changes(series.tolist(), slow_sign=-1)
    assert [point.first for point in changes.steps] == [at]
    alone = [spike.first for spike in changes.spikes] or [commit for commit, _ in changes.apart]
    assert alone == sorted(places)


@pytest.mark.parametrize("seed", sampled(range(60), 8))
def test_further_launches_hide_no_change_that_fewer_show(seed):
    draw = np.random.default_rng([seed, 9])
    num = int(draw.integers(5, 14))
    levels = np.full(num, 1000.0)
    first, second = sorted(draw.choice(np.arange(2, num - 1), 2, replace=False))
    levels[first:] *= 0.835
    levels[second:] *= 1.088
    series = (levels[:, None] * draw.lognormal(0, 0.006, (num, 2))).tolist()
    before = find_changes(series, slow_sign=-1)
    for commit in draw.choice(num, 3, replace=False):
        series[commit].append(levels[commit] * draw.lognormal(0, 0.006))
    after = find_changes(series, slow_sign=-1)
    assert {point.first for point in before.steps} <= {point.first for point in after.steps}


def test_one_fast_launch_hides_no_later_change():
    series = made(2, 24)
    series[12:] *= 1 - 0.036
    series[5] *= 1.25
    changes = find_changes(series.tolist(), slow_sign=-1)
    assert [point.first for point in changes.steps] == [12]
    assert changes.apart == ((5, 0),)


def commits(seed, nums, shared, own=0.008):
    draw = np.random.default_rng(seed)
    return [group(draw.normal(draw.normal(0, shared), own, num)) for num in nums]


def is_shared(groups, cuts=(), size=0.01):
    """Whether launches of a commit seem to share their luck, between the same levels."""
    shared = min(misfit(groups, cuts, ratio, size) for ratio in RATIOS)
    return shared < misfit(groups, cuts, 0.0, size)


@pytest.mark.parametrize("nums", [[5] * 60, [3] * 20, [1, 2, 5] * 10])
def test_shared_luck_is_seen_and_none_is_seen_where_there_is_none(nums):
    seen = [is_shared(commits(seed, nums, 0.012)) for seed in range(20)]
    assert np.mean(seen) > 0.9
    seen = [is_shared(commits(seed, nums, 0.0), size=0.0) for seed in range(60)]
    assert np.mean(seen) < 0.05


def test_a_change_of_level_is_no_shared_luck():
    alike, changed = [group([0.0, 0.01, -0.01])] * 10, [group([0.1, 0.11, 0.09])] * 10
    assert is_shared([*alike, *changed])
    assert not is_shared([*alike, *changed], [10])


def test_luck_that_is_far_smaller_than_what_matters_is_as_good_as_none():
    groups = commits(2, [3] * 20, shared=0.001, own=0.0001)
    assert is_shared(groups, size=0.002)
    assert not is_shared(groups)


def test_launches_that_agree_to_the_last_digit_still_tell():
    groups = [group([value] * 3) for value in (1.0, 1.1, 0.9, 1.05, 0.95)]
    assert is_shared(groups)
    assert not is_shared([group([0.1] * 3)] * 5, size=0.0)
