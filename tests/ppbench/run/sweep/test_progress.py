"""The time left of a sweep, from what its runs have taken so far."""

from __future__ import annotations

import pytest

from ppbench.config.case import Case, Measure
from ppbench.run.job import PlannedRun
from ppbench.run.sweep.progress import Estimate, time_left

MEASURE = Measure(warmup_steps=1, steps=9)


class Clock:
    """The time that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def item(seq_len: int | str, max_seq_len: int = 2048, world_size: int = 2) -> PlannedRun:
    case = Case(seq_len=seq_len, data_max_seq_len=max_seq_len, world_size=world_size)
    return PlannedRun(case, MEASURE, 0, f"{seq_len}-{world_size}")


def run(estimate: Estimate, clock: Clock, index: int, around_s: float, step_s: float) -> None:
    """A run from its beginning to its end."""
    estimate.begin(index)
    clock.seconds += around_s
    for step in range(10):
        clock.seconds += step_s
        estimate.step(step + 1, 10, step_s)
    estimate.finish(index)


def test_short_runs_that_take_long_to_begin_do_not_make_long_ones_look_longer():
    clock = Clock()
    estimate = Estimate([item(8), item(800)], clock)
    run(estimate, clock, 0, around_s=12, step_s=0.01)
    seconds, has_more = estimate.seconds_left()
    assert seconds == pytest.approx(12 + 10 * 0.01 * 100)
    assert not has_more


def test_sequences_of_varying_length_are_not_counted_as_long_as_they_may_be():
    clock = Clock()
    every = [item(32), item("variable"), item("variable", world_size=1), item(32, world_size=1)]
    estimate = Estimate(every, clock)
    run(estimate, clock, 0, around_s=5, step_s=0.1)
    assert estimate.seconds_left() == (pytest.approx(15 + 1), True)
    assert time_left(estimate) == "0:16 or more left"
    run(estimate, clock, 1, around_s=5, step_s=0.2)  # not 0.1 × 2048 / 32
    assert estimate.seconds_left() == (pytest.approx(5 + 2 + 5 + 1), False)
    assert time_left(estimate) == "0:13 left"


def test_runs_of_another_limit_or_text_are_of_another_kind():
    clock = Clock()
    estimate = Estimate([item("variable", 512), item("variable", 2048)], clock)
    run(estimate, clock, 0, around_s=1, step_s=0.1)
    assert estimate.seconds_left() == (None, True)
    assert time_left(estimate) == "-:-- left"


def test_the_current_run_is_judged_by_its_own_steps():
    clock = Clock()
    estimate = Estimate([item(8), item("variable")], clock)
    run(estimate, clock, 0, around_s=4, step_s=0.1)
    estimate.begin(1)
    clock.seconds += 4
    for step in range(5):
        clock.seconds += 2
        estimate.step(step + 1, 10, 2.0)
    assert estimate.seconds_left() == (pytest.approx(5 * 2), False)


def test_a_run_that_fails_or_begins_anew_leaves_the_rest_right():
    clock = Clock()
    estimate = Estimate([item(8), item(8, world_size=1), item(16)], clock)
    run(estimate, clock, 0, around_s=2, step_s=0.5)
    estimate.begin(1)
    clock.seconds += 2
    estimate.begin(1)  # its workers died, and it is tried again
    clock.seconds += 2
    estimate.finish(1)
    assert estimate.seconds_left() == (pytest.approx(2 + 10 * 0.5 * 2), False)
    run(estimate, clock, 2, around_s=2, step_s=1)
    assert estimate.seconds_left() == (0.0, False)


def test_nothing_is_claimed_before_a_step_has_been_seen():
    assert time_left(Estimate([item(8)], Clock())) == "-:-- left"
