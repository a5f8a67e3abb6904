"""Verdicts by hand, tests and intervals by scipy."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppbench.display.metrics import METRICS
from ppbench.judge.differences import group, is_larger, welch
from ppbench.statistics.verdicts import (
    Discount,
    DiscountReason,
    Doubt,
    Noise,
    Pair,
    Verdict,
    compare,
    holm,
)

SPEED, BUBBLE, MEMORY, STEP = (
    METRICS[name] for name in ("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "step_ns")
)
figures = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8).map(tuple)


def one(metric, base, head, **more):
    return compare(metric, [Pair(tuple(base), tuple(head), **more)])[0]


def drawn(seed, num=5, factor=1.0, deviation=0.008):
    return tuple(factor * np.random.default_rng(seed).lognormal(7, deviation, num))


def test_the_p_value_and_the_interval_are_welchs_on_logarithms():
    base, head = drawn(0), drawn(2, num=7, deviation=0.016)
    change = one(SPEED, base, head)
    oracle = scipy.stats.ttest_ind(np.log(head), np.log(base), equal_var=False)
    assert change.p == pytest.approx(oracle.pvalue)
    interval = np.exp(oracle.confidence_interval(0.95))
    assert (change.ratio.low, change.ratio.high) == pytest.approx(interval)
    assert (change.base, change.head) == (np.median(base), np.median(head))
    assert (change.num_base, change.num_head) == (5, 7)


def test_an_f_test_is_scipys():
    p = scipy.stats.f.sf(6.0, 4, 19)
    assert is_larger(6.0, 4, 1.0, 19, level=p * 1.01)
    assert not is_larger(6.0, 4, 1.0, 19, level=p * 0.99)
    assert is_larger(1e-9, 4, 0.0, 19)
    assert not is_larger(0.0, 4, 0.0, 19)


@pytest.mark.parametrize(
    ("metric", "factor", "verdict"),
    [
        (SPEED, 1.05, Verdict.faster),
        (SPEED, 0.95, Verdict.slower),
        (MEMORY, 1.05, Verdict.slower),
        (MEMORY, 0.95, Verdict.faster),
    ],
)
def test_faster_is_better_in_the_metrics_own_direction(metric, factor, verdict):
    base = drawn(0)
    head = tuple(value * factor for value in base)
    assert one(metric, base, head).verdict is verdict


def test_a_change_beyond_chance_but_inside_the_floor_is_no_verdict():
    base = drawn(0, deviation=2e-3)
    head = tuple(value * 0.991 for value in base)
    change = one(SPEED, base, head)
    assert change.p < 1e-3
    assert change.verdict is Verdict.unclear
    assert one(SPEED, base, head, floor=0.005).verdict is Verdict.slower
    assert one(SPEED, base, head, floor=0.02).verdict is Verdict.same


def test_sides_are_the_same_only_where_the_whole_interval_lies_inside_the_floor():
    assert one(SPEED, drawn(0), drawn(1)).verdict is Verdict.unclear
    quiet = one(SPEED, drawn(0, deviation=1e-3), drawn(1, deviation=1e-3))
    assert quiet.verdict is Verdict.same
    assert 0.99 < quiet.ratio.low <= quiet.ratio.high < 1.01


@pytest.mark.parametrize(("bytes_", "verdict"), [(1000, "same"), (1005, "same"), (1020, "slower")])
def test_launches_without_any_spread_decide_at_once(bytes_, verdict):
    change = one(MEMORY, [1000] * 3, [bytes_] * 4)
    assert change.verdict == verdict
    assert change.ratio.low == change.ratio.high == pytest.approx(bytes_ / 1000)
    assert change.p == (1.0 if bytes_ == 1000 else 0.0)


def test_a_side_without_spread_is_judged_by_the_spread_of_the_other():
    change = one(MEMORY, [1000] * 3, [1050, 1060, 1070])
    oracle = scipy.stats.ttest_1samp(np.log([1050, 1060, 1070]), np.log(1000))
    assert change.p == pytest.approx(oracle.pvalue)


@pytest.mark.parametrize(
    ("base", "head"),
    [
        ((), ()),
        ((1.0, 1.0), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, math.nan), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, 1.0), (1.0, math.inf, 1.0)),
        ((1.0, 1.0, 1.0), (1.0, 0.0, 1.0)),
    ],
)
def test_too_few_launches_or_figures_without_a_logarithm_are_insufficient(base, head):
    change = one(SPEED, base, head)
    assert (change.verdict, change.p, change.ratio) == (Verdict.insufficient, None, None)
    assert (change.num_base, change.num_head) == (len(base), len(head))


def test_a_bubble_is_compared_in_points_and_may_be_none_at_all():
    change = one(BUBBLE, [0.0, -0.001, 0.001], [0.03, 0.031, 0.029])
    assert change.verdict is Verdict.slower
    assert change.ratio is None
    assert change.difference.estimate == pytest.approx(0.03)
    small = one(BUBBLE, [0.0100, 0.0101, 0.0099], [0.0150, 0.0151, 0.0149])
    assert small.verdict is Verdict.same  # half as much again, but half a point
    assert small.ratio.estimate == pytest.approx(1.5, rel=1e-3)
    assert small.difference.high < 0.006
    assert one(SPEED, drawn(0), drawn(1)).difference is None


def test_noise_that_was_measured_raises_the_floor():
    base = drawn(0, deviation=1e-3)
    head = tuple(value * 0.97 for value in base)
    assert one(SPEED, base, head, noise=Noise(0.01, 20)).floor == 0.01
    loud = one(SPEED, base, head, noise=Noise(0.04, 20))
    assert (loud.floor, loud.verdict) == (0.04, Verdict.unclear)


def test_noise_that_was_measured_counts_as_launches():
    base, head = drawn(4), drawn(5)
    change = one(SPEED, base, head, noise=Noise(0.008, 20))
    spread = sum(np.var(np.log(side), ddof=1) * 4 for side in (base, head)) + 19 * 0.008**2
    error = math.sqrt(spread / 27 * 2 / 5)
    t = (np.mean(np.log(head)) - np.mean(np.log(base))) / error
    assert change.p == pytest.approx(2 * scipy.stats.t.sf(abs(t), 27))
    half = scipy.stats.t.ppf(0.975, 27) * error
    assert math.log(change.ratio.high / change.ratio.low) == pytest.approx(2 * half)


def test_launches_that_scatter_more_than_the_noise_are_judged_by_themselves():
    base, head = drawn(4, deviation=0.03), drawn(5, deviation=0.03)
    known, unknown = one(SPEED, base, head, noise=Noise(0.002, 100)), one(SPEED, base, head)
    assert (known.p, known.ratio) == (unknown.p, unknown.ratio)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_more_cases_make_a_verdict_harder_and_insufficient_ones_do_not_count():
    weak = Pair(drawn(0), tuple(value * 0.98 for value in drawn(8)))
    nothing, few = Pair(drawn(2), drawn(3)), Pair((1.0,), (1.0,))
    alone = compare(SPEED, [weak])[0]
    assert compare(SPEED, [weak, few])[0] == alone
    assert compare(SPEED, [few, weak, nothing, nothing])[1].p == pytest.approx(3 * alone.p)


@settings(max_examples=60)
@given(figures, figures)
def test_swapping_sides_inverts_ratio_and_verdict(base, head):
    there, back = one(SPEED, base, head), one(SPEED, head, base)
    inverse = {Verdict.faster: Verdict.slower, Verdict.slower: Verdict.faster}
    assert back.verdict is inverse.get(there.verdict, there.verdict)
    assert back.p == pytest.approx(there.p)
    assert back.ratio.estimate == pytest.approx(1 / there.ratio.estimate)
    assert back.ratio.low == pytest.approx(1 / there.ratio.high)


@settings(max_examples=60)
@given(figures, figures)
@example((0.5, 0.5, 0.5), (0.5, 0.5, 0.5000000000000001))
@example((0.3, 0.3, 0.3), (0.30000000000000004, 0.30000000000000004, 0.30000000000000004))
def test_the_unit_does_not_matter(base, head):
    scaled = [tuple(1024 * value for value in side) for side in (base, head)]
    here, there = one(SPEED, base, head), one(SPEED, *scaled)
    assert there.p == pytest.approx(here.p, rel=1e-6, abs=1e-9)
    assert there.ratio.estimate == pytest.approx(here.ratio.estimate)


def test_welch_is_exact_for_spreads_of_any_size():
    tiny = [group(np.array(values) * 1e-170) for values in ([1.0, 2.0, 4.0], [2.0, 3.0, 9.0])]
    plain = [group(values) for values in ([1.0, 2.0, 4.0], [2.0, 3.0, 9.0])]
    assert welch(*plain).freedom == pytest.approx(
        scipy.stats.ttest_ind([1, 2, 4], [2, 3, 9], equal_var=False).df
    )
    assert welch(*tiny).freedom in (4, pytest.approx(welch(*plain).freedom))


QUIET = (100.0, 100.4, 99.7, 100.2, 99.9)
APART, REFERENCE = DiscountReason.apart, DiscountReason.reference


def times(figures, *slowdowns):
    """Step times, the last so much longer."""
    factors = [1.0] * (len(figures) - len(slowdowns)) + [1 + slow for slow in slowdowns]
    return tuple(value * factor for value, factor in zip(figures, factors, strict=True))


def speeds(figures):
    return tuple(1e4 / value for value in figures)


@pytest.mark.parametrize(("base", "head"), [((0.2,), ()), ((), (0.2,)), ((0.3, 0.12), (0.2,))])
def test_disturbed_launches_hide_no_change_and_are_named(base, head):
    sides = times(QUIET, *base), times([1.05 * value for value in QUIET], *head)
    change = one(STEP, *sides)
    assert change.verdict is Verdict.slower
    assert change.ratio.low < 1.05 < change.ratio.high < 1.07
    assert [(each.side, each.index) for each in change.discounts] == [
        *(("base", 5 - len(base) + place) for place in range(len(base))),
        *(("head", 5 - len(head) + place) for place in range(len(head))),
    ]
    assert {each.reason for each in change.discounts} == {APART}


def test_the_slow_side_is_the_metrics_own():
    sides = times(QUIET, 0.2), times([1.05 * value for value in QUIET])
    change = one(SPEED, *map(speeds, sides))
    assert change.verdict is Verdict.slower
    assert change.discounts == one(STEP, *sides).discounts
    assert change.p == pytest.approx(one(STEP, *sides).p)
    points = [tuple(value / 1000 for value in side) for side in sides]
    assert one(BUBBLE, *points, floor=0.003).discounts == change.discounts


def test_memory_is_not_disturbed():
    change = one(MEMORY, QUIET, times(QUIET, 0.2))
    assert change.discounts == ()
    oracle = scipy.stats.ttest_ind(np.log(times(QUIET, 0.2)), np.log(QUIET), equal_var=False)
    assert change.p == pytest.approx(oracle.pvalue)


def test_a_launch_whose_reference_was_slow_does_not_count_whatever_its_figure():
    slowdowns = {"base_slowdowns": (0.0, math.nan, 0.3, 0.01, 0.0)}
    change = one(STEP, QUIET, QUIET, **slowdowns)
    assert change.discounts == (Discount("base", 2, REFERENCE),)
    without = one(STEP, (*QUIET[:2], *QUIET[3:]), QUIET)
    assert (change.p, change.ratio) == (without.p, without.ratio)
    assert change.num_base == 5


def test_without_three_undisturbed_launches_there_is_no_verdict():
    change = one(STEP, QUIET, QUIET[:4], head_slowdowns=(0.2, 0.0, 0.2, 0.0))
    assert (change.verdict, change.p) == (Verdict.insufficient, None)


def test_both_reasons_are_given_at_the_right_places():
    head = times(QUIET, 0.2)[::-1]  # the first is disturbed
    change = one(STEP, QUIET, head, head_slowdowns=(0.0, 0.0, 0.5, 0.0, 0.0))
    assert change.discounts == (
        Discount("head", 0, APART),
        Discount("head", 2, REFERENCE),
    )


def test_two_levels_that_chance_may_have_shared_out_are_no_change():
    base, head = times(QUIET, 0.1, 0.1), tuple(1.1 * value for value in QUIET)
    change = one(STEP, base, head)
    assert (change.verdict, change.p, change.doubt) == (Verdict.unclear, 1.0, Doubt.two_levels)
    assert one(STEP, QUIET, head).doubt is None


def test_sides_of_which_one_alone_has_slow_launches_are_not_the_same():
    quiet = tuple(100 + 0.01 * value for value in QUIET)
    assert one(STEP, quiet, times(quiet, 0.2)).verdict is Verdict.same
    assert one(STEP, times(quiet, 0.3, 0.2), times(quiet, 0.2, 0.25)).verdict is Verdict.same
    change = one(STEP, quiet, times(quiet, 0.2, 0.3))
    assert (change.verdict, change.doubt) == (Verdict.unclear, Doubt.lopsided)


def test_a_metric_without_a_direction_discounts_by_the_reference_alone():
    neither = dataclasses.replace(STEP, higher_is_better=None)
    head = times(QUIET, 0.2)
    change = one(neither, QUIET, head, base_slowdowns=(0.0, 0.3, 0.0, 0.0, 0.0))
    assert change.discounts == (Discount("base", 1, REFERENCE),)


def rates(seed, change, share, num=400):
    """Verdicts of five launches a side, of which some are disturbed."""
    draw = np.random.default_rng(seed)
    sides = draw.lognormal(0, 0.008, (num, 2, 5))
    sides *= np.where(draw.random(sides.shape) < share, draw.uniform(1.1, 1.35, sides.shape), 1.0)
    sides[:, 1] *= 1 + change
    found = [one(STEP, base, head) for base, head in sides]
    holds = [each.ratio.low <= 1 + change <= each.ratio.high for each in found]
    return [each.verdict for each in found], np.mean(holds)


@pytest.mark.parametrize(("share", "least"), [(0.1, 0.95), (0.2, 0.85)])
def test_a_change_of_5_percent_is_found_among_disturbed_launches(share, least):
    verdicts, coverage = rates(0, 0.05, share)
    assert np.mean([verdict is Verdict.slower for verdict in verdicts]) > least
    assert Verdict.faster not in verdicts
    assert coverage > 0.9


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_disturbed_launches_hardly_ever_alarm(share):
    verdicts, coverage = rates(1, 0.0, share)
    assert np.mean([verdict is Verdict.slower for verdict in verdicts]) < 0.02
    assert coverage > 0.9
