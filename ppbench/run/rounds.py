"""The order of arms in a round, and how long a launch goes on with rounds."""

from __future__ import annotations

from ppbench.judge.looks import LATER_SHARE

MOST_OF_BUDGET = 1 / 8
"""Share of a budget that one launch takes at most, where its planned rounds leave a choice.

Fewer than six launches or so say too little about their spread, however long each of them is.
"""


def order_of(num_arms: int, round_index: int) -> list[int]:
    """Return the places of arms in the order of a round.

    Rounds go forwards and backwards in turn, and begin with the next arm every second one. So each
    arm comes first, last and after each neighbour equally often.
    """
    first = round_index // 2 % num_arms
    turned = [*range(first, num_arms), *range(first)]
    return turned if round_index % 2 == 0 else turned[::-1]


def is_time_left(
    num_rounds: int, passed_s: float, opening_s: float, budget_s: float, *, is_later: bool
) -> bool:
    """Whether a launch with a budget makes another round, after so many in so many seconds.

    It goes on for twice as long as it took to open the cases, as closing them takes about as long:
    more rounds would replace launches, and fewer would be mostly waiting. A later launch, made
    after the first look, has at least a share of the budget.
    """
    wanted_s = max(2 * opening_s, is_later * LATER_SHARE * budget_s)
    most_s = MOST_OF_BUDGET * budget_s - 2 * opening_s
    return passed_s * (num_rounds + 0.5) / num_rounds < min(wanted_s, most_s)
