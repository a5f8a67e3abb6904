"""A benchmark's outcome: ratios of pairs, goals, and the same again from its file."""

import json

import numpy as np
import pytest
import scipy.stats

from benchmarks.outcome import Figure, Goal, Outcome, Ratio, Standing, number, parser, write
from benchmarks.surroundings import read_surroundings

TEN = tuple(1.0 + n / 100 for n in range(10))


def test_a_ratio_is_of_pairs_and_its_interval_of_order_statistics():
    ratio = Ratio.of("a over b", [2.0, 6.0, 12.0], [1.0, 2.0, 3.0])
    assert ratio.values == (2.0, 3.0, 4.0)
    assert (ratio.median, ratio.interval, ratio.standing) == (3.0, None, None)
    # Of ten values the second and the ninth: P(fewer than 2 below the median) = 11 / 1024 < 2.5 %.
    assert Ratio("x", TEN).interval == (1.01, 1.08)


def test_a_geometric_mean_is_taken_round_by_round():
    mean = Ratio.geometric_mean("all", [Ratio("a", (1.0, 4.0)), Ratio("b", (4.0, 9.0))])
    assert mean.values == pytest.approx((2.0, 6.0))


@pytest.mark.parametrize(
    ("goal", "standing", "words"),
    [
        (Goal(at_least=1.0), "held", "≥ 1"),
        (Goal(at_least=1.02), "not decided", "≥ 1.02"),  # the median is 1.045, the low end 1.01
        (Goal(at_least=1.09), "missed", "≥ 1.09"),
        (Goal(at_most=1.1), "held", "≤ 1.1"),
        (Goal(at_most=1.05), "not decided", "≤ 1.05"),
        (Goal(at_most=1.0), "missed", "≤ 1"),
        (Goal(at_least=1.0, at_most=1.1), "held", "≥ 1, ≤ 1.1"),
        (Goal(at_least=1.09, at_most=1.2), "missed", "≥ 1.09, ≤ 1.2"),
        (Goal(at_most=1.04, is_exact=True), "missed", "≤ 1.04"),
        (Goal(at_most=1.05, is_exact=True), "held", "≤ 1.05"),
    ],
)
def test_a_goal_is_judged_by_the_whole_interval_or_exactly(goal, standing, words):
    assert Ratio("x", TEN, goal=goal).standing == standing
    assert str(goal) == words


@pytest.mark.parametrize(
    ("goal", "missed_by"),
    [(Goal(at_least=2.09), 0.5), (Goal(at_most=0.95), 0.1), (Goal(at_most=1.045), 0)],
)
def test_a_goal_is_missed_by_a_share_of_itself(goal, missed_by):
    assert goal.missed_by(Ratio("x", TEN, goal=goal)) == pytest.approx(missed_by)


def test_few_rounds_are_judged_by_students_t():
    values = (4.0, 5.0, 6.0)
    known = scipy.stats.t.interval(
        0.95, 2, loc=np.log(values).mean(), scale=scipy.stats.sem(np.log(values))
    )
    ratio = Ratio("x", values, goal=Goal(at_least=5))
    assert ratio.judged_interval == pytest.approx(tuple(np.exp(known)))
    assert ratio.standing is Standing.undecided


def test_a_single_round_decides_nothing_unless_it_is_exact():
    assert Ratio("x", (0.1,), goal=Goal(at_most=1)).standing is Standing.undecided
    assert Ratio("x", (0.1,), goal=Goal(at_most=1, is_exact=True)).standing is Standing.held


def test_an_interval_of_several_looks_is_wider():
    one, four = (Ratio("x", TEN * 4, goal=Goal(at_least=1), num_looks=num) for num in (1, 4))
    assert four.judged_interval[0] < one.judged_interval[0]
    assert four.judged_interval[1] > one.judged_interval[1]


def test_what_is_written_is_read_again(tmp_path, capsys):
    settings = parser("Doc.\n\nMore.").parse_args(["--results", str(tmp_path)])
    ratio = Ratio("a over b", TEN, goal=Goal(at_most=1.01), num_looks=2)
    figures = [Figure("a", (1 / 3, 2 / 3), "s")]
    kept = write("made_up", settings, read_surroundings(), [ratio], figures)
    assert "results" not in kept.settings
    text = (tmp_path / "made_up.json").read_text("utf-8")
    again = Outcome.from_json(text)
    assert again.ratios == kept.ratios
    assert again.figures == (Figure("a", (0.333333, 0.666667), "s"),)
    assert again.as_json() == text
    assert '"values": [0.333333, 0.666667]' in text
    assert json.loads(text)["ratios"][0]["standing"] == "not decided"
    assert "a over b: 1.045 [1.010, 1.080]; goal ≤ 1.01: not decided" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.01, "1.010"), (0.0123456, "0.0123"), (12345.6, "12,346")]
)
def test_numbers_have_as_many_digits_as_they_tell(value, text):
    assert number(value) == text
