"""Arms in turn: who comes when, and what is kept."""

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.turns import in_turns, order, timed_in_turns


@pytest.mark.parametrize("num", [2, 3, 4])
def test_every_arm_is_first_and_last_and_before_every_neighbour_equally_often(num):
    names = tuple("abcd"[:num])
    rounds = [tuple(order(names, index)) for index in range(2 * num)]
    assert all(sorted(one) == sorted(names) for one in rounds)
    for place in (0, -1):
        assert set(Counter(one[place] for one in rounds).values()) == {2}
    following = Counter(pair for one in rounds for pair in pairwise(one))
    assert all(following[one, other] == following[other, one] for one, other in following)


def test_warm_up_is_not_kept_and_values_pair_by_round():
    calls = []

    def arm(name):
        return lambda: calls.append(name) or float(len(calls))

    turns = in_turns({"a": arm("a"), "b": arm("b")}, num_rounds=2, num_warmup=1)
    assert calls == ["a", "b", "b", "a", "b", "a"]  # the third round begins with the other one
    assert turns.values == {"a": [4.0, 6.0], "b": [3.0, 5.0]}
    assert turns.ratio("a over b", "a", "b").values == (4 / 3, 6 / 5)
    assert [figure.name for figure in turns.figures()] == ["a", "b"]


def test_timed_arms_give_seconds():
    turns = timed_in_turns({"a": list, "b": dict}, num_rounds=3)
    assert all(len(taken) == 3 and min(taken) >= 0 for taken in turns.values.values())
