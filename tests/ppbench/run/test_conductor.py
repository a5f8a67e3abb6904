"""Sets of processes take turns: one works at a time, in balanced rounds, whoever dies."""

import itertools
import json
import threading
import time

import pytest

from ppbench.run.conductor import NO_MORE, VARIABLE, Conducted, Conductor
from ppbench.run.rounds import MOST_OF_BUDGET, is_time_left, order_of


@pytest.mark.parametrize("num_arms", [1, 2, 3, 4])
def test_each_arm_comes_first_last_and_after_each_other_equally_often(num_arms):
    rounds = [order_of(num_arms, index) for index in range(4 * num_arms)]
    assert all(sorted(one) == list(range(num_arms)) for one in rounds)
    for place in (0, -1):
        firsts = [one[place] for one in rounds]
        assert {firsts.count(arm) for arm in range(num_arms)} == {4}
    pairs = [pair for one in rounds for pair in itertools.pairwise(one)]
    assert all(pairs.count((a, b)) == pairs.count((b, a)) for a, b in set(pairs))


class Sets:
    """Sets that note when they work, each in a thread in place of processes."""

    def __init__(self, conductor, nums):
        self.log, self._working, self._lock = [], 0, threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(conductor, number, num))
            for number, num in enumerate(nums)
        ]

    def _work(self, conductor, number, num_rounds):
        connected = Conducted(*json.loads(conductor.variables(number)[VARIABLE]))
        for wants in ("open", *["round"] * num_rounds):
            self._take_part(number, wants, connected.ask(wants))
        while num_rounds and (index := connected.ask("more")) != NO_MORE:
            self._take_part(number, "round", index)
        self._take_part(number, "close", connected.ask("close"))
        connected.close()
        conductor.leave_out(number)

    def _take_part(self, number, wants, index):
        with self._lock:
            self._working += 1
            assert self._working == 1
            self.log.append((wants, number, index))
        time.sleep(0.05 if wants == "open" else 0.002)
        with self._lock:
            self._working -= 1

    def run(self):
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.log


def rounds_in(log):
    numbered = [(index, number) for wants, number, index in log if wants == "round"]
    return {
        index: [number for _, number in group]
        for index, group in itertools.groupby(numbered, lambda one: one[0])
    }


@pytest.mark.parametrize("planned", [[5], [5, 5], [5, 5, 5], [1, 4], [0, 4]])
def test_sets_work_one_at_a_time_and_each_round_has_all_that_have_not_closed(planned):
    """There are as many rounds as the set with the most has planned."""
    with Conductor("a", len(planned)) as conductor:
        log = Sets(conductor, planned).run()
    taking_part = [number for number, num in enumerate(planned) if num]
    assert rounds_in(log) == {
        index: [taking_part[place] for place in order_of(len(taking_part), index)]
        for index in range(max(planned))
    }
    assert [wants for wants, _, _ in log].count("open") == len(planned)


def test_with_a_budget_all_sets_go_on_with_rounds_for_as_long():
    with Conductor("a", 2, budget_s=60) as conductor:
        log = Sets(conductor, [2, 2]).run()
    found = rounds_in(log)
    assert len(found) > 4  # for twice as long as both took to open, .1 s
    assert found == {index: order_of(2, index) for index in range(len(found))}


def test_rounds_take_as_long_as_opening_and_closing_within_a_share_of_the_budget():
    def most_s(opening_s, budget_s, *, is_later=False):
        """The time of rounds of a second each."""
        going = (
            n
            for n in itertools.count(1)
            if not is_time_left(n, n, opening_s, budget_s, is_later=is_later)
        )
        return next(going)

    assert most_s(10, 1000) == 20
    assert most_s(10, 240) == 240 * MOST_OF_BUDGET - 20
    assert most_s(1, 1000) == 2
    assert most_s(1, 1000, is_later=True) == 50
    assert most_s(10, 0) == 1


def test_a_set_that_dies_in_its_turn_or_never_comes_holds_nobody_up():
    with Conductor("a", 3) as conductor:
        dying = Conducted(*json.loads(conductor.variables(1)[VARIABLE]))
        dying.ask("open")
        threading.Timer(0.05, lambda: (dying.close(), conductor.leave_out(1))).start()
        conductor.leave_out(2)
        assert rounds_in(Sets(conductor, [3]).run()) == {0: [0], 1: [0], 2: [0]}


def test_without_its_conductor_a_set_ends():
    with Conductor("a", 2) as conductor:
        waiting = Conducted(*json.loads(conductor.variables(0)[VARIABLE]))
        waiting.ask("open")
        asking = threading.Timer(0.05, conductor.__exit__)
    with pytest.raises(ConnectionError):
        waiting.ask("round")
    asking.cancel()
