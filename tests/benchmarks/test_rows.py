"""A row is what the judge says of rounds, is held to its goal, and is the same from its file."""

import math

import pytest
import scipy.stats

from benchmarks.claims import Goal, Standing
from benchmarks.rows import NO_STARTS, Result, Row, Surroundings, number
from ppbench.judge.evidence import Rounds

LAUNCHES = [
    Rounds((1.0, 1.1, 0.9, 1.0, 1.05, 0.95), (2.0, 2.3, 1.7, 2.1, 2.0, 1.9)),
    Rounds((1.0, 1.0, 1.1, 0.9, 1.0, 1.0), (2.1, 1.9, 2.2, 1.9, 2.0, 2.1)),
    Rounds((0.9, 1.1, 1.0, 1.0, 1.0, 1.0), (1.9, 2.2, 2.0, 2.1, 1.9, 2.0)),
]


def test_a_ratio_is_head_over_base_with_the_interval_of_the_judge():
    row = Row.ratio("a", LAUNCHES)
    assert row.low < row.value < row.high
    assert row.value == pytest.approx(2, rel=0.03)
    assert len(row.values) == 18


def test_one_launch_has_no_interval_unless_starts_decide_nothing():
    assert Row.ratio("a", LAUNCHES[:1]).low is None
    row = Row.ratio("a", LAUNCHES[:1], starts=NO_STARTS)
    assert row.low < row.value < row.high


def test_the_mean_of_ratios_is_their_geometric_mean():
    quarter = [Rounds(one.base, tuple(head / 4 for head in one.head)) for one in LAUNCHES]
    twice, half = Row.ratio("a", LAUNCHES), Row.ratio("a", quarter)
    mean = Row.mean_ratio("a", [LAUNCHES, quarter])
    assert mean.value == pytest.approx(math.sqrt(twice.value * half.value))


def test_a_share_has_its_exact_interval():
    row = Row.share("a", 1, 100)
    ends = scipy.stats.binomtest(1, 100).proportion_ci()
    assert (row.value, row.low, row.high) == (0.01, ends.low, ends.high)
    assert row.amount == f"0.01 [{number(ends.low)}, {number(ends.high)}] (1 of 100)"


def test_a_median_of_few_values_lies_between_all_of_them_and_of_one_is_open():
    assert Row.median("a", [3.0, 1.0, 2.0], "s").amount == "2.000 [1.000, 3.000] s"
    assert Row.median("a", [3.0], "s", Goal(at_most=5)).standing is Standing.undecided


@pytest.mark.parametrize(
    ("goal", "standing"),
    [
        (Goal(at_least=1.0), "held"),
        (Goal(at_least=2.0), "not decided"),
        (Goal(at_least=3.0), "missed"),
        (Goal(at_most=0.5), "missed"),
        (Goal(1.0, 3.0), "held"),
        (None, None),
    ],
)
def test_a_goal_is_judged_by_the_whole_interval(goal, standing):
    row = Row("a", 2.0, 1.5, 2.5, goal=goal)
    assert row.standing == standing


def test_what_is_counted_is_exact_and_what_is_not_known_has_no_standing():
    assert Row.exact("a", 2, Goal(at_most=2)).standing is Standing.held
    assert Row("a", math.nan, note="no driver").amount == "not known: no driver"


def test_what_is_written_is_read_again():
    rows = (Row.ratio("a", LAUNCHES, Goal(at_most=3)), Row.exact("b", 0, note="of 3"))
    text = Result("accuracy.memory", 60, Surroundings.here(), rows).as_json()
    again = Result.from_json(text)
    assert again.as_json() == text
    assert [row.standing for row in again.rows] == [Standing.held, None]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.01, "1.010"), (0.0123456, "0.0123"), (12345.6, "12,346")]
)
def test_numbers_have_as_many_digits_as_they_tell(value, text):
    assert number(value) == text
