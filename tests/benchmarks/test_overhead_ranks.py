"""The orders in which the overhead of measuring is measured favour none of its arms."""

import collections
import itertools

import pytest

from benchmarks.overhead_ranks import ORDERS, ORDERS_WITH_PROFILER, RECORDINGS


@pytest.mark.parametrize("orders", [ORDERS, ORDERS_WITH_PROFILER])
def test_every_arm_is_as_often_at_each_place_and_after_each_arm(orders):
    arms = set(orders[0])
    assert arms == set(RECORDINGS) - ({"profiler"} if orders is ORDERS else set())
    places = collections.Counter((arm, at) for order in orders for at, arm in enumerate(order))
    in_a_row = [arm for order in orders for arm in order]
    neighbours = collections.Counter(itertools.pairwise([*in_a_row, in_a_row[0]]))
    assert places == dict.fromkeys(itertools.product(arms, range(len(arms))), 2)
    assert neighbours == dict.fromkeys(itertools.product(arms, arms), 2)
