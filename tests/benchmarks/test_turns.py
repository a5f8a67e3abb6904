"""Arms in turn: who comes when, what is kept, and how long an open goal is measured on."""

import random

from benchmarks.outcome import Goal, Standing
from benchmarks.turns import Aim, Rounds, in_turns, timed_in_turns


def test_warm_up_is_not_kept_and_values_pair_by_round():
    calls = []

    def arm(name):
        return lambda: calls.append(name) or float(len(calls))

    turns = in_turns({"a": arm("a"), "b": arm("b")}, 2, num_warmup=1)
    assert calls == ["a", "b", "b", "a", "b", "a"]  # the third round begins with the other one
    assert turns.values == {"a": [4.0, 6.0], "b": [3.0, 5.0]}
    assert turns.ratio("a over b", "a", "b").values == (4 / 3, 6 / 5)
    assert [figure.name for figure in turns.figures()] == ["a", "b"]


def test_timed_arms_give_seconds():
    turns = timed_in_turns({"a": list, "b": dict}, 3)
    assert all(len(taken) == 3 and min(taken) >= 0 for taken in turns.values.values())


LEAST_ONE = Aim("a over b", "a", "b", Goal(at_least=1.0))


def arms_with_ratio(ratio, noise, seed=1):
    """Arms that take made-up times; b takes 1."""
    drawn = random.Random(seed)
    return {"a": lambda: ratio * (1 + drawn.gauss(0, noise)), "b": lambda: 1.0}


def test_looks_double_up_to_the_most_rounds():
    assert Rounds(8, 64, (LEAST_ONE,)).looks == (8, 16, 32, 64)
    assert Rounds(8, 20, (LEAST_ONE,)).looks == (8, 16, 20)
    assert Rounds(8, 8, (LEAST_ONE,)).looks == Rounds(8).looks == Rounds(8, 64).looks == (8,)


def test_a_clear_goal_is_not_measured_on():
    rounds = Rounds(8, 64, (LEAST_ONE,))
    for ratio, standing in ((1.2, Standing.held), (0.8, Standing.missed)):
        turns = in_turns(arms_with_ratio(ratio, 0.01), rounds)
        assert len(turns.values["a"]) == 8
        assert rounds.ratios(turns)[0].standing is standing


def test_an_open_goal_is_measured_on_until_it_is_decided():
    rounds = Rounds(8, 512, (LEAST_ONE,))
    turns = in_turns(arms_with_ratio(1.01, 0.03), rounds)
    num = len(turns.values["a"])
    assert num in rounds.looks[1:]
    assert rounds.ratios(turns)[0].standing is Standing.held


def test_looking_again_and_again_decides_falsely_in_at_most_5_percent():
    """A goal at the true ratio: whatever is decided of it is false in one direction."""
    rounds = Rounds(8, 64, (LEAST_ONE,))
    decided = 0
    for seed in range(2000):
        turns = in_turns(arms_with_ratio(1.0, 0.02, seed), rounds, num_warmup=0)
        decided += rounds.ratios(turns)[0].standing is not Standing.undecided
    assert decided / 2000 <= 0.05


def test_ranks_go_on_as_the_first_of_them_says():
    answers = []

    def stop(is_open):
        answers.append(is_open)
        return False

    rounds = Rounds(8, 64, (LEAST_ONE,))
    turns = in_turns(arms_with_ratio(1.0, 0.02, seed=3), rounds, agree=stop)
    assert (answers, len(turns.values["a"])) == ([True], 8)
