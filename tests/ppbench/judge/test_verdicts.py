"""Verdicts by hand, tests and intervals by scipy, error rates by simulation."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from leads import lead
from samples import sampled

from ppbench.display.metrics import METRICS
from ppbench.judge.differences import group, is_larger, welch
from ppbench.judge.estimates import Doubt
from ppbench.judge.evidence import (
    Discount,
    DiscountReason,
    Evidence,
    Launches,
    Noise,
    Rounds,
)
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import LEVEL, Verdict, judge, judge_means

SPEED, BUBBLE, MEMORY, STEP = (
    METRICS[name] for name in ("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "step_ns")
)
APART, REFERENCE = DiscountReason.apart, DiscountReason.reference
figures = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8).map(tuple)
rounds = st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=4, max_size=12).map(
    lambda pairs: Rounds(*map(tuple, zip(*pairs, strict=True)))
)


def sides(base, head, **known):
    return Evidence(Launches(tuple(base)), Launches(tuple(head)), **known)


def one(metric, base, head, **known):
    return judge(metric, [sides(base, head, **known)])[0]


def drawn(seed, num=5, factor=1.0, deviation=0.008):
    return tuple(factor * np.random.default_rng(seed).lognormal(7, deviation, num))


def test_a_disturbed_launch_hides_no_lead_from_any_question():
    """The first input of FAULT 1: the report, compare and plan had three answers."""
    head, base = (100, 101, 99, 100.4, 70), (90, 91, 89, 90.3, 89.6)
    evidence = sides(base, head)
    (change,) = judge(SPEED, [evidence])
    assert change.verdict is Verdict.faster
    assert change.ratio.low < 100.1 / 90 < change.ratio.high
    assert change.discounts == (Discount("head", 4, APART),)
    leading = lead(SPEED, {(0, 1): evidence}, 2)
    assert leading.arms == (0, 1)
    assert leading.is_decided
    assert leading.changes[0, 1] == change
    assert leading.most_lost(1) == pytest.approx(math.expm1(change.ends[1]))


def test_a_known_noise_counts_in_every_question():
    """The second input of FAULT 1: decided in the report, unclear in compare."""
    base, head = (1000, 1001, 1002), (1020, 1022, 1021)
    assert one(SPEED, base, head).verdict is Verdict.faster
    evidence = sides(base, head, noise=Noise(0.03, 19))
    assert judge(SPEED, [evidence])[0].verdict is Verdict.open
    assert not lead(SPEED, {(0, 1): evidence}, 2).is_decided


def test_the_p_value_and_the_interval_are_welchs_on_logarithms():
    base, head = drawn(0), drawn(2, num=7, deviation=0.016)
    change = one(SPEED, base, head)
    oracle = scipy.stats.ttest_ind(np.log(head), np.log(base), equal_var=False)
    assert change.p == pytest.approx(oracle.pvalue)
    interval = np.exp(oracle.confidence_interval(0.95))
    assert (change.ratio.low, change.ratio.high) == pytest.approx(interval)
    assert change.ends == pytest.approx(tuple(oracle.confidence_interval(1 - 2 * LEVEL)))
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
    base = drawn(0, deviation=0.004)
    head = tuple(value * factor for value in base)
    assert one(metric, base, head).verdict is verdict
    in_turns = Evidence(paired=(Rounds(base, head),) * 3)
    assert judge(metric, [in_turns])[0].verdict is verdict


def test_the_figures_of_sides_in_turns_are_medians_over_launches():
    """The median of all rounds, 6, is of no launch that a user sees."""
    heads = ((1.0, 2.0, 3.0, 2.0), (6.0, 5.0, 7.0, 6.0), (9.0, 8.0, 9.0, 10.0))
    launches = [Rounds(tuple(2 * figure for figure in head), head) for head in (*heads, heads[2])]
    late = Rounds((1000.0, 1000.0), (1000.0, 1000.0))  # too few rounds to count yet
    (change,) = judge(SPEED, [Evidence(paired=(*launches, late))])
    assert (change.base, change.head) == (15.0, 7.5)
    assert (change.num_base, change.num_head) == (4, 4)
    assert change.ratio.estimate == pytest.approx(0.5)
    assert not change.shown_otherwise


def test_longer_launches_add_to_what_many_short_ones_show():
    """Nine launches of two rounds, then two of six: the two alone would show no interval."""
    draw = np.random.default_rng(38)

    def launches(num, num_rounds):
        starts = draw.normal(-0.06, 0.01, num)
        logs = starts[:, None] + draw.normal(0, 0.01, (num, num_rounds))
        return tuple(Rounds((1.0,) * num_rounds, tuple(np.exp(own))) for own in logs)

    short, longer = launches(9, 2), launches(2, 6)
    (before,), (after,) = (judge(SPEED, [Evidence(paired=own)]) for own in (short, short + longer))
    assert (before.num_head, after.num_head) == (9, 11)
    assert before.verdict is after.verdict is Verdict.slower
    assert after.exact.error < before.exact.error
    (many,) = judge(SPEED, [Evidence(paired=short + longer * 5)])
    assert many.num_head == 10  # the short ones are fewer


def test_medians_that_say_another_ratio_than_the_rounds_are_known():
    heads = (800.0, 900.0, 900.0)
    bases = (1000.0, 910.0, 1200.0)
    launches = [Rounds((base,) * 4, (head,) * 4) for base, head in zip(bases, heads, strict=True)]
    (change,) = judge(SPEED, [Evidence(paired=tuple(launches))])
    assert (change.base, change.head) == (1000.0, 900.0)
    assert change.ratio.estimate < 0.85
    assert change.shown_otherwise


def test_sides_are_the_same_where_the_whole_interval_lies_within_the_resolution():
    base = drawn(0, deviation=2e-3)
    head = tuple(value * 0.991 for value in base)
    change = one(SPEED, base, head)
    assert (change.verdict, change.is_decided) == (Verdict.same, True)
    assert change.p < LEVEL
    assert 0.009 < change.within < 0.02
    finer = one(SPEED, base, head, resolution=0.01)
    assert finer.verdict is Verdict.slower


def test_what_is_open_is_known_within_a_bound():
    change = one(SPEED, drawn(0, deviation=0.02), drawn(1, deviation=0.02))
    assert (change.verdict, change.is_decided) == (Verdict.open, False)
    assert change.within > 0.02
    wide = one(
        SPEED,
        drawn(0, deviation=0.02),
        drawn(1, deviation=0.02),
        resolution=change.within * 1.001,
    )
    assert wide.verdict is Verdict.same


@pytest.mark.parametrize(("bytes_", "verdict"), [(1000, "same"), (1015, "same"), (1025, "slower")])
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
def test_too_few_launches_or_figures_without_a_logarithm_leave_all_open(base, head):
    change = one(SPEED, base, head)
    assert (change.verdict, change.p, change.ratio) == (Verdict.open, 1.0, None)
    assert (change.num_base, change.num_head) == (len(base), len(head))
    assert change.within == math.inf


def test_a_bubble_is_compared_in_points_and_may_be_none_at_all():
    change = one(BUBBLE, [0.0, -0.001, 0.001], [0.03, 0.031, 0.029])
    assert change.verdict is Verdict.slower
    assert change.ratio is None
    assert change.difference.estimate == pytest.approx(0.03)
    small = one(BUBBLE, [0.0100, 0.0101, 0.0099], [0.0150, 0.0151, 0.0149])
    assert small.verdict is Verdict.same  # half as much again, but half a point
    assert small.within < 0.006
    in_turns = Rounds((0.0, 0.001, -0.001, 0.0), (0.03, 0.031, 0.029, 0.03))
    points = judge(BUBBLE, [Evidence(paired=(in_turns,), starts=Noise(0.001, 9))])[0]
    assert (points.verdict, points.difference.estimate) == (Verdict.slower, pytest.approx(0.03))


def test_noise_that_was_measured_counts_as_launches():
    base, head = drawn(4), drawn(5)
    change = one(SPEED, base, head, noise=Noise(0.008, 19))
    spread = sum(np.var(np.log(side), ddof=1) * 4 for side in (base, head)) + 19 * 0.008**2
    error = math.sqrt(spread / 27 * 2 / 5)
    t = (np.mean(np.log(head)) - np.mean(np.log(base))) / error
    assert change.p == pytest.approx(2 * scipy.stats.t.sf(abs(t), 27))
    half = scipy.stats.t.ppf(0.975, 27) * error
    assert math.log(change.ratio.high / change.ratio.low) == pytest.approx(2 * half)


def test_launches_that_scatter_more_than_the_noise_are_judged_by_themselves():
    base, head = drawn(4, deviation=0.03), drawn(5, deviation=0.03)
    known, unknown = one(SPEED, base, head, noise=Noise(0.002, 99)), one(SPEED, base, head)
    assert (known.p, known.ratio) == (unknown.p, unknown.ratio)


def test_more_cases_make_a_claim_harder_and_those_without_interval_do_not_count():
    weak = sides(drawn(0), [value * 0.98 for value in drawn(8)])
    nothing, few = sides(drawn(2), drawn(3)), sides((1.0,), (1.0,))
    alone = judge(SPEED, [weak])[0]
    assert judge(SPEED, [weak, few])[0].p == alone.p
    assert judge(SPEED, [few, weak, nothing, nothing])[1].p == pytest.approx(3 * alone.p)


def test_p_is_compared_with_the_level_of_all_looks():
    evidence = sides(
        np.exp(np.linspace(-0.01, 0.01, 5)), 1.02 * np.exp(np.linspace(-0.01, 0.01, 5))
    )
    looks = Looks((3, 4, 5), 12)
    (change,), (single,) = judge(SPEED, [evidence], looks), judge(SPEED, [evidence])
    assert change.p == pytest.approx(single.p * LEVEL / looks.level(LEVEL))
    assert change.ratio.low < single.ratio.low < single.ratio.high < change.ratio.high
    assert change.within > single.within


def mirrored(change, other):
    inverse = {Verdict.faster: Verdict.slower, Verdict.slower: Verdict.faster}
    assert other.verdict is inverse.get(change.verdict, change.verdict)
    assert other.p == pytest.approx(change.p)
    assert other.within == pytest.approx(change.within)
    if change.ratio is not None:
        assert other.ratio.estimate == pytest.approx(1 / change.ratio.estimate)
        assert other.ratio.low == pytest.approx(1 / change.ratio.high)
    assert [each.index for each in other.discounts if each.side != "base"] == [
        each.index for each in change.discounts if each.side != "head"
    ]


@given(figures, figures)
def test_exchanged_sides_have_the_inverse_ratio_and_verdict(base, head):
    there, back = one(SPEED, base, head), one(SPEED, head, base)
    mirrored(there, back)
    mirrored(there, there.reversed())


@given(st.lists(rounds, min_size=1, max_size=4), st.sampled_from([None, Noise(0.01, 5)]))
def test_exchanged_turns_have_the_inverse_ratio_and_verdict(launches, starts):
    exchanged = tuple(Rounds(each.head, each.base) for each in launches)
    there = judge(STEP, [Evidence(paired=tuple(launches), starts=starts)])[0]
    mirrored(there, judge(STEP, [Evidence(paired=exchanged, starts=starts)])[0])


@given(figures, figures, st.sampled_from([1024.0, 1e-9, 7.0]))
@example((0.5, 0.5, 0.5), (0.5, 0.5, 0.5000000000000001), 1024.0)
@example((0.3,) * 3, (0.30000000000000004,) * 3, 1024.0)
def test_the_unit_does_not_matter(base, head, unit):
    scaled = [tuple(unit * value for value in side) for side in (base, head)]
    here, there = one(SPEED, base, head), one(SPEED, *scaled)
    assert there.p == pytest.approx(here.p, rel=1e-6, abs=1e-9)
    assert there.ratio.estimate == pytest.approx(here.ratio.estimate)
    num = min(len(base), len(head))
    (here,), (there,) = (
        judge(SPEED, [Evidence(paired=(Rounds(one_side[:num], other[:num]),) * 3)])
        for one_side, other in ((base, head), scaled)
    )
    assert there.exact.estimate == pytest.approx(here.exact.estimate, abs=1e-12)


def test_welch_is_exact_for_spreads_of_any_size():
    tiny = [group(np.array(values) * 1e-170) for values in ([1.0, 2.0, 4.0], [2.0, 3.0, 9.0])]
    plain = [group(values) for values in ([1.0, 2.0, 4.0], [2.0, 3.0, 9.0])]
    assert welch(*plain).freedom == pytest.approx(
        scipy.stats.ttest_ind([1, 2, 4], [2, 3, 9], equal_var=False).df
    )
    assert welch(*tiny).freedom in (4, pytest.approx(welch(*plain).freedom))


# Launches that do not count

QUIET = (100.0, 100.4, 99.7, 100.2, 99.9)


def times(figures, *slowdowns):
    """Step times, the last so much longer."""
    factors = [1.0] * (len(figures) - len(slowdowns)) + [1 + slow for slow in slowdowns]
    return tuple(value * factor for value, factor in zip(figures, factors, strict=True))


def slow_sides(base, head, base_slowdowns=None, head_slowdowns=None):
    return Evidence(Launches(base, base_slowdowns), Launches(head, head_slowdowns))


@pytest.mark.parametrize(("base", "head"), [((0.2,), ()), ((), (0.2,)), ((0.3, 0.12), (0.2,))])
def test_disturbed_launches_hide_no_change_and_are_named(base, head):
    evidence = times(QUIET, *base), times([1.05 * value for value in QUIET], *head)
    change = one(STEP, *evidence)
    assert change.verdict is Verdict.slower
    assert change.ratio.low < 1.05 < change.ratio.high < 1.07
    assert [(each.side, each.index) for each in change.discounts] == [
        *(("base", 5 - len(base) + place) for place in range(len(base))),
        *(("head", 5 - len(head) + place) for place in range(len(head))),
    ]
    assert {each.reason for each in change.discounts} == {APART}


def test_the_slow_side_is_the_metrics_own():
    evidence = times(QUIET, 0.2), times([1.05 * value for value in QUIET])
    speeds = [tuple(1e4 / value for value in side) for side in evidence]
    change = one(SPEED, *speeds)
    assert change.verdict is Verdict.slower
    assert change.discounts == one(STEP, *evidence).discounts
    assert change.p == pytest.approx(one(STEP, *evidence).p)
    points = [tuple(value / 1000 for value in side) for side in evidence]
    assert one(BUBBLE, *points).discounts == change.discounts


def test_memory_is_not_disturbed():
    change = one(MEMORY, QUIET, times(QUIET, 0.2))
    assert change.discounts == ()
    oracle = scipy.stats.ttest_ind(np.log(times(QUIET, 0.2)), np.log(QUIET), equal_var=False)
    assert change.p == pytest.approx(oracle.pvalue)


def test_a_launch_whose_reference_was_slow_does_not_count_whatever_its_figure():
    evidence = slow_sides(QUIET, QUIET, (0.0, math.nan, 0.3, 0.01, 0.0))
    (change,) = judge(STEP, [evidence])
    assert change.discounts == (Discount("base", 2, REFERENCE),)
    without = one(STEP, (*QUIET[:2], *QUIET[3:]), QUIET)
    assert (change.p, change.ratio) == (without.p, without.ratio)
    assert change.num_base == 5


def test_without_three_undisturbed_launches_all_is_open():
    (change,) = judge(STEP, [slow_sides(QUIET, QUIET[:4], None, (0.2, 0.0, 0.2, 0.0))])
    assert (change.verdict, change.has_interval) == (Verdict.open, False)


def test_both_reasons_are_given_at_the_right_places():
    head = times(QUIET, 0.2)[::-1]  # the first is disturbed
    (change,) = judge(STEP, [slow_sides(QUIET, head, None, (0.0, 0.0, 0.5, 0.0, 0.0))])
    assert change.discounts == (Discount("head", 0, APART), Discount("head", 2, REFERENCE))


def test_two_levels_that_chance_may_have_shared_out_are_no_change():
    base, head = times(QUIET, 0.1, 0.1), tuple(1.1 * value for value in QUIET)
    change = one(STEP, base, head)
    assert (change.verdict, change.doubt) == (Verdict.open, Doubt.two_levels)
    assert one(STEP, QUIET, head).doubt is None


def test_sides_of_which_one_alone_has_slow_launches_are_not_the_same():
    quiet = tuple(100 + 0.01 * value for value in QUIET)
    assert one(STEP, quiet, times(quiet, 0.2)).verdict is Verdict.same
    assert one(STEP, times(quiet, 0.3, 0.2), times(quiet, 0.2, 0.25)).verdict is Verdict.same
    change = one(STEP, quiet, times(quiet, 0.2, 0.3))
    assert (change.verdict, change.doubt) == (Verdict.open, Doubt.lopsided)


def test_a_metric_without_a_direction_discounts_by_the_reference_alone():
    neither = dataclasses.replace(STEP, higher_is_better=None)
    (change,) = judge(neither, [slow_sides(QUIET, times(QUIET, 0.2), (0.0, 0.3, 0.0, 0.0, 0.0))])
    assert change.discounts == (Discount("base", 1, REFERENCE),)


# Rates


def until_decided(seed, change=0.0, most=12, noise=None):
    """The verdict of launches that are looked at one by one, and how many a side it took."""
    draw = np.random.default_rng(seed)
    base = draw.lognormal(0, 0.008, most)
    head = draw.lognormal(0, 0.008, most) * (1 + change)
    for num in range(3, most + 1):
        looks = Looks(tuple(range(3, num + 1)), most)
        (found,) = judge(STEP, [sides(base[:num], head[:num], noise=noise)], looks)
        if found.is_decided:
            break
    return found.verdict, num


def test_a_large_change_takes_hardly_more_than_three_launches():
    found = [until_decided(seed, 0.1) for seed in range(40)]
    assert {verdict for verdict, _ in found} == {Verdict.slower}
    assert np.mean([num for _, num in found]) <= 4


@pytest.mark.thorough
def test_equal_sides_are_soon_the_same_and_at_most_1_percent_claim_a_change():
    num_sequences = 2000
    found = [until_decided(seed) for seed in range(num_sequences)]
    assert np.mean([num for _, num in found]) <= 8
    assert np.mean([verdict is Verdict.same for verdict, _ in found]) >= 0.8
    false = np.mean([verdict.is_claim for verdict, _ in found])
    assert false <= 0.01 + 3 * (0.01 * 0.99 / num_sequences) ** 0.5


@pytest.mark.thorough
def test_the_same_within_2_percent_is_said_of_a_change_of_2_percent_in_1_percent_at_most():
    num_sequences = 1000
    found = [until_decided(seed, 0.02)[0] for seed in range(num_sequences)]
    assert found.count(Verdict.same) <= 10 + 3 * (1000 * 0.01 * 0.99) ** 0.5
    assert found.count(Verdict.slower) > 750
    assert Verdict.faster not in found


def rates(seed, change, share, num=150):
    """Verdicts of five launches a side, of which some are disturbed."""
    draw = np.random.default_rng(seed)
    drawn_sides = draw.lognormal(0, 0.008, (num, 2, 5))
    is_slow = draw.random(drawn_sides.shape) < share
    drawn_sides *= np.where(is_slow, draw.uniform(1.1, 1.35, drawn_sides.shape), 1.0)
    drawn_sides[:, 1] *= 1 + change
    found = [one(STEP, base, head) for base, head in drawn_sides]
    holds = [each.ratio.low <= 1 + change <= each.ratio.high for each in found]
    return [each.verdict for each in found], np.mean(holds)


@pytest.mark.parametrize(("share", "least"), sampled([(0.2, 0.8), (0.1, 0.9)]))
def test_a_change_of_5_percent_is_found_among_disturbed_launches(share, least):
    verdicts, coverage = rates(0, 0.05, share)
    assert np.mean([verdict is Verdict.slower for verdict in verdicts]) > least
    assert Verdict.faster not in verdicts
    assert coverage > 0.9


@pytest.mark.parametrize("share", sampled([0.2, 0.1]))
def test_disturbed_launches_hardly_ever_alarm(share):
    verdicts, coverage = rates(1, 0.0, share)
    assert np.mean([verdict is Verdict.slower for verdict in verdicts]) < 0.02
    assert coverage > 0.9


def families(rng, num_pairs: int, delta: float, noise: float):
    return [
        Evidence(
            Launches(tuple(np.exp(rng.normal(0, noise, 4)))),
            Launches(tuple(np.exp(rng.normal(delta, noise, 4)))),
        )
        for _ in range(num_pairs)
    ]


def test_a_mean_over_pairs_is_that_of_their_logarithms_with_their_errors_added():
    pairs = families(np.random.default_rng(3), 6, 0.03, 0.02)
    (change,) = judge_means(SPEED, [pairs])
    singles = [judge(SPEED, [pair])[0].exact for pair in pairs]
    assert change.exact.estimate == pytest.approx(np.mean([one.estimate for one in singles]))
    assert change.exact.error == pytest.approx(np.sqrt(sum(o.error**2 for o in singles)) / 6)
    assert min(one.freedom for one in singles) < change.exact.freedom
    assert change.exact.freedom <= sum(one.freedom for one in singles) * (1 + 1e-9)
    assert change.verdict is Verdict.faster


def test_a_mean_with_a_pair_of_which_nothing_is_known_is_open():
    pairs = [*families(np.random.default_rng(3), 2, 0.1, 0.01), Evidence()]
    assert judge_means(SPEED, [pairs])[0].verdict is Verdict.open


def test_pairs_that_share_what_a_start_decided_have_its_scatter_as_their_error():
    rng = np.random.default_rng(1)
    common = [0.05, -0.05, 0.06]
    pairs = []
    for _ in range(8):
        rounds = []
        for start in common:
            base = np.exp(rng.normal(0, 0.002, 8))
            rounds.append(Rounds(tuple(base), tuple(base * np.exp(rng.normal(start, 0.002, 8)))))
        pairs.append(Evidence(paired=tuple(rounds)))
    (change,) = judge_means(SPEED, [pairs])
    assert change.exact.error == pytest.approx(np.std(common, ddof=1) / np.sqrt(3), rel=0.05)
    assert change.exact.freedom == 2
    assert change.verdict is Verdict.open
