"""Grades of leads: what they need, and how often they are wrong in made-up stores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.stats

from ppbench.statistics.ranking import (
    MOST_LAUNCHES,
    Grade,
    Launches,
    launches_needed,
    lead,
    weakest,
)

DECIDED, LEANING, UNDECIDED = Grade.decided, Grade.leaning, Grade.undecided


def launches(*figures: float, low: float = math.nan, high: float = math.nan) -> Launches:
    return Launches(figures, low, high)


def test_three_launches_that_are_apart_decide() -> None:
    ahead = lead(launches(1100, 1110, 1105), launches(1000, 1004, 1002))
    assert ahead.grade is DECIDED
    assert ahead.interval is not None
    assert ahead.interval.low < ahead.ratio < ahead.interval.high
    assert ahead.ratio == pytest.approx(1.1028, abs=1e-3)
    assert lead(launches(1000, 1004, 1002), launches(1100, 1110, 1105)).grade is UNDECIDED


def test_the_level_is_that_of_welchs_test() -> None:
    slow = (1000.0, 1010.0, 995.0, 1004.0)
    for shift in np.linspace(1.0, 1.06, 25):
        fast = tuple(1003.0 * shift * (1 + step / 300) for step in (-1, 0, 2))
        p = scipy.stats.ttest_ind(np.log(fast), np.log(slow), equal_var=False).pvalue
        ahead = lead(launches(*fast), launches(*slow))
        if ahead.ratio <= 1.01:
            assert ahead.grade is UNDECIDED
        else:
            assert ahead.grade is (DECIDED if p < 0.02 else LEANING if p < 0.2 else UNDECIDED)


def test_two_launches_lean_at_most() -> None:
    assert lead(launches(2000, 2001), launches(1000, 1001)).grade is LEANING
    assert lead(launches(2000, 2001, 2002), launches(1000, 1001)).grade is LEANING


def test_a_single_launch_leans_only_if_its_lead_is_large_and_its_steps_are_apart() -> None:
    slow = launches(1000, low=980, high=1020)
    assert lead(launches(1200, low=1150, high=1250), slow).grade is LEANING
    assert lead(launches(1200, low=1010, high=1350), slow).grade is UNDECIDED
    assert lead(launches(1040, low=1030, high=1050), slow).grade is UNDECIDED
    assert lead(launches(2000), slow).grade is UNDECIDED


def test_a_lead_of_less_than_a_per_cent_is_none_however_certain() -> None:
    ahead = lead(launches(1005, 1005, 1005), launches(1000, 1000, 1000))
    assert (ahead.grade, ahead.is_equal) == (UNDECIDED, True)
    wide = lead(launches(1004, 1012, 1020), launches(1000, 1005, 1010))
    assert (wide.grade, wide.is_equal) == (UNDECIDED, False)


def test_the_weakest_grade_counts() -> None:
    assert weakest([DECIDED, UNDECIDED, LEANING]) is UNDECIDED
    assert weakest([]) is DECIDED


def test_more_scatter_needs_more_launches_and_too_small_a_lead_is_not_worth_any() -> None:
    quiet = launches_needed(launches(1048, 1050, 1052), launches(998, 1000, 1002))
    noisy = launches_needed(launches(1030, 1050, 1070), launches(980, 1000, 1020))
    assert quiet is not None
    assert noisy is not None
    assert 3 <= quiet < noisy <= MOST_LAUNCHES
    assert launches_needed(launches(1005, 1006, 1007), launches(1000, 1001, 1002)) is None
    assert launches_needed(launches(900, 1000, 1100), launches(880, 990, 1100)) is None
    assert launches_needed(launches(1100), launches(1000)) is None


# Made-up stores, of which the true order is known


def stores(seed: int, *, heavy: bool, spread: float) -> Iterator[tuple[np.ndarray, list[Launches]]]:
    """Yield the true throughputs of 200 stores, and their launches.

    Cases differ by a normal `spread`, launches by 0.3 to 10 %, each case by its own amount.
    """
    random = np.random.default_rng(seed)
    for _ in range(200):
        num_cases, num_launches = random.integers(2, 7), random.integers(3, 7)
        true = 1000 * np.exp(random.normal(0, spread, num_cases))
        noise = 0.02 * np.exp(random.normal(0, 0.7, (num_cases, 1)))
        shape = (num_cases, num_launches)
        drawn = random.standard_t(3, shape) / 3**0.5 if heavy else random.normal(size=shape)
        figures = true[:, None] * np.exp(noise * drawn)
        yield true, [launches(*row) for row in figures.tolist()]


def winner(sides: list[Launches]) -> int | None:
    """Return the place of the case that is called the fastest, if one is."""
    best = max(range(len(sides)), key=lambda place: sides[place].median)
    leads = [lead(sides[best], other) for place, other in enumerate(sides) if place != best]
    return best if all(ahead.grade is DECIDED for ahead in leads) else None


@pytest.mark.parametrize("spread", [0.0005, 0.01, 0.05])
@pytest.mark.parametrize("heavy", [False, True])
def test_a_case_called_the_fastest_is_not_in_at_most_2_per_cent_of_stores(
    spread: float, heavy: bool
) -> None:
    judged = [(true, winner(sides)) for true, sides in stores(7, heavy=heavy, spread=spread)]
    num_wrong = sum(place is not None and place != int(true.argmax()) for true, place in judged)
    assert num_wrong <= 0.02 * len(judged)


def test_clear_stores_have_a_winner() -> None:
    judged = [winner(sides) for _, sides in stores(7, heavy=False, spread=0.5)]
    assert sum(place is not None for place in judged) > 0.7 * len(judged)
