"""A benchmark's outcome: ratios of pairs, goals, and the same again from its file."""

import argparse
import json

import pytest

from benchmarks.outcome import Figure, Goal, Outcome, Ratio, number, parser, write
from benchmarks.surroundings import read_surroundings

TEN = tuple(1.0 + n / 100 for n in range(10))


def test_a_ratio_is_of_pairs_and_its_interval_of_order_statistics():
    ratio = Ratio.of("a over b", [2.0, 6.0, 12.0], [1.0, 2.0, 3.0])
    assert ratio.values == (2.0, 3.0, 4.0)
    assert (ratio.median, ratio.interval, ratio.holds) == (3.0, None, None)
    # Of ten values the second and the ninth: P(fewer than 2 below the median) = 11 / 1024 < 2.5 %.
    assert Ratio("x", TEN).interval == (1.01, 1.08)


def test_pairs_without_a_partner_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        Ratio.of("a over b", [1.0, 2.0], [1.0])


def test_a_geometric_mean_is_taken_round_by_round():
    mean = Ratio.geometric_mean("all", [Ratio("a", (1.0, 4.0)), Ratio("b", (4.0, 9.0))])
    assert mean.values == pytest.approx((2.0, 6.0))


@pytest.mark.parametrize(
    ("goal", "missed_by", "words"),
    [
        (Goal(at_least=1.045), 0, "≥ 1.045"),
        (Goal(at_least=2.09), 0.5, "≥ 2.09"),
        (Goal(at_least=1.0, low_at_least=1.01), 0, "≥ 1, low end ≥ 1.01"),
        (Goal(at_least=1.0, low_at_least=2.02), 0.5, "≥ 1, low end ≥ 2.02"),
        (Goal(at_most=1.045), 0, "≤ 1.045"),
        (Goal(at_most=0.95), 0.1, "≤ 0.95"),
    ],
)
def test_a_goal_tells_by_how_much_it_is_missed(goal, missed_by, words):
    ratio = Ratio("x", TEN, goal=goal)
    assert goal.missed_by(ratio) == pytest.approx(missed_by)
    assert ratio.holds is (missed_by == 0)
    assert str(goal) == words


def test_too_few_rounds_for_an_interval_are_judged_by_the_least():
    goal = Goal(at_least=1.0, low_at_least=0.98)
    assert not Ratio("x", (0.9, 1.1, 1.2), goal=goal).holds


def test_what_is_written_is_read_again(tmp_path, capsys):
    settings = parser("Doc.\n\nMore.").parse_args(["--results", str(tmp_path)])
    ratio = Ratio("a over b", TEN, goal=Goal(at_most=1.01))
    figures = [Figure("a", (1 / 3, 2 / 3), "s")]
    kept = write("made_up", settings, read_surroundings(), [ratio], figures)
    text = (tmp_path / "made_up.json").read_text("utf-8")
    again = Outcome.from_json(text)
    assert again.ratios == kept.ratios
    assert again.figures == (Figure("a", (0.333333, 0.666667), "s"),)
    assert again.as_json() == text
    assert '"values": [0.333333, 0.666667]' in text
    assert json.loads(text)["ratios"][0]["holds"] is False
    assert "a over b: 1.045 [1.010, 1.080]; goal ≤ 1.01: missed by 3.5%" in capsys.readouterr().out


def test_where_results_go_is_no_setting(tmp_path):
    settings = argparse.Namespace(results=tmp_path, rounds=3)
    assert write("made_up", settings, read_surroundings(), []).settings == {"rounds": 3}


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.01, "1.010"), (0.0123456, "0.0123"), (12345.6, "12,346")]
)
def test_numbers_have_as_many_digits_as_they_tell(value, text):
    assert number(value) == text
