"""Slices of a microbatch's sequences: how long each is, and its share of the microbatch's time.

With causal attention, the tokens of a slice need those before them alone. A slice of L tokens with
a prefix of x takes t(L, x) of a microbatch of S tokens, of whose time a share `a` is attention:

    t(L, x) = (1 - a) L / S  +  a ((x + L)^2 - x^2) / S^2

Everything but attention takes as long for each token; attention, as long for each pair of a token
and one that is not after it. The shares of all slices add up to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def even_lengths(seq_len: int, num_slices: int) -> tuple[int, ...]:
    """Tokens of each slice, the longer ones first."""
    length, longer = divmod(seq_len, num_slices)
    return tuple(length + (number < longer) for number in range(num_slices))


def balanced_lengths(seq_len: int, num_slices: int, attention: float) -> tuple[int, ...]:
    """Tokens of slices that take as long as each other, to a token; no slice is empty.

    Source of the idea: Sun et al., arXiv 2406.03488, "computation-wise partition".
    """
    cuts = [0]
    for number in range(1, num_slices):
        done = number / num_slices
        share = done  # of the tokens
        if attention > 0:
            rest = 1 - attention
            share = (math.sqrt(rest * rest + 4 * attention * done) - rest) / (2 * attention)
        most = seq_len - (num_slices - number)
        cuts.append(min(max(cuts[-1] + 1, round(share * seq_len)), most))
    return tuple(end - begin for begin, end in itertools.pairwise([*cuts, seq_len]))


def shares_of(lengths: Sequence[int], attention: float) -> tuple[float, ...]:
    """The share of each slice in the time of its microbatch, by the formula above."""
    ends, seq_len = [*itertools.accumulate(lengths, initial=0)], sum(lengths)
    return tuple(
        (1 - attention) * (end - begin) / seq_len
        + attention * (end * end - begin * begin) / (seq_len * seq_len)
        for begin, end in itertools.pairwise(ends)
    )
