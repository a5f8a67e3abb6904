"""How many launches are made again because something else was running on their machine.

    launches of a side    ok   disturbed   ok   ok       three launches count in full, the fourth
                           1       -        2    3       replaces the second

A disturbed launch stays: it does not count (`judge.estimates`), and is shown. It is recognised
by what was measured beside it, never by its own figure: to repeat launches that look wrong would
make any two sides equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def most_repeats(num_launches: int) -> int:
    """The most launches beyond those asked for; a machine that is never quiet has no end."""
    return num_launches // 2


def num_taken(disturbed: Sequence[bool], num_launches: int) -> int:
    """How many of a side's launches, in their order, one takes to have so many undisturbed ones."""
    most = num_launches + most_repeats(num_launches)
    good = list(accumulate(not one for one in disturbed[:most]))
    return next((num for num, count in enumerate(good, 1) if count >= num_launches), len(good))


def is_lacking(disturbed: Sequence[bool], num_launches: int) -> bool:
    """Whether a side needs a further launch to have so many undisturbed ones."""
    is_full = len(disturbed) >= num_launches + most_repeats(num_launches)
    return not is_full and sum(not one for one in disturbed) < num_launches
