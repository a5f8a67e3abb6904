"""The columns of `runs` from the repetitions of all ranks."""

from __future__ import annotations

import pytest

from ppbench.analysis.reference import ReferenceTimes, reference_figures


def rank(before: tuple[int, ...], after: tuple[int, ...], share: float = 0.01) -> ReferenceTimes:
    return ReferenceTimes("train", (before, after), share)


def test_the_slowest_rank_counts_at_each_place():
    figures = reference_figures([rank((10, 10, 10), (20,)), rank((12, 12, 90), (16,), 0.02)])
    assert figures["reference_ns"] == (12 + 20) / 2
    assert figures["reference_share"] == 0.02
    assert figures["reference"] == "train"


def test_a_disturbance_after_the_steps_shows_although_more_was_repeated_before():
    quiet = reference_figures([rank((10,) * 30, (10, 10))])
    disturbed = reference_figures([rank((10,) * 30, (14, 14))])
    assert (quiet["reference_ns"], disturbed["reference_ns"]) == (10, 12)


def test_of_ranks_that_sleep_the_fastest_repetition_counts():
    """One sleep of three that ends late is chance; if all do, the machine is disturbed."""
    chance = [ReferenceTimes("sleep", ((20, 10, 11), (10, 10, 30)), 0.01, sleeps=True)] * 2
    disturbed = [ReferenceTimes("sleep", ((20, 15, 16), (15, 18, 30)), 0.01, sleeps=True)] * 2
    assert reference_figures(chance)["reference_ns"] == 10
    assert reference_figures(disturbed)["reference_ns"] == 15


def test_the_spread_is_that_of_repetitions_and_not_between_places():
    assert reference_figures([rank((10, 10), (20, 20))])["reference_spread"] == 0
    figures = reference_figures([rank((8, 10, 12), (8, 10, 12))])
    assert figures["reference_spread"] == pytest.approx(0.2)


@pytest.mark.parametrize("ranks", [[], [None], [rank((1,), (1,)), None], [rank((), ())]])
def test_without_the_times_of_a_rank_nothing_is_known(ranks):
    assert set(reference_figures(ranks).values()) == {None}
