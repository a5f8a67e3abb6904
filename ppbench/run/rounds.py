"""The order of arms in a round."""

from __future__ import annotations


def order_of(num_arms: int, round_index: int) -> list[int]:
    """Return the places of arms in the order of a round.

    Rounds go forwards and backwards in turn, and begin with the next arm every second one. So each
    arm comes first, last and after each neighbour equally often.
    """
    first = round_index // 2 % num_arms
    turned = [*range(first, num_arms), *range(first)]
    return turned if round_index % 2 == 0 else turned[::-1]
