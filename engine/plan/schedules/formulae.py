"""Closed forms of schedules: their bubble, and the most activations that a rank holds.

For equal stages and free transfers, in units of one microbatch on one rank: F, I and W are the
times of its forward and of the two halves of its backward on all stages of a rank together. Stated
where they hold exactly and None elsewhere; `engine.plan.predict` has the figure everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from engine.plan.schedules.one_f_one_b import num_rounds


class Shape(NamedTuple):
    """The numbers of ranks, stages and microbatches that a schedule is made for."""

    world_size: int
    stages_per_rank: int
    num_microbatches: int


class Times(NamedTuple):
    """The times of one microbatch on one rank: forward, and the two halves of the backward."""

    f: Fraction
    i: Fraction
    w: Fraction

    @property
    def all_equal(self) -> bool:
        return self.f == self.i == self.w


BubbleTime = Callable[[Shape, Times], Fraction | None]
Peak = Callable[[Shape, int], Fraction | None]


def fill_and_drain(shape: Shape, times: Times) -> Fraction:
    """A rank waits for p - 1 stages to be filled and to be drained; few microbatches, for more."""
    p, v, m = shape
    return (times.f + times.i + times.w) * (p - 1 + (v - 1) * max(0, p - m)) / v


def zero_bubble(shape: Shape, times: Times) -> Fraction | None:
    """W fills the drain, as far as there are W to fill it with."""
    p, v, m = shape
    f, i, w = times
    if (v > 1 and m < p) or not w <= min(f, i):
        return None
    return ((p - 1) * (f + i) - (min(m, p) - 1) * w) / v


def zb_h2_bubble(shape: Shape, times: Times) -> Fraction | None:
    p, _, m = shape
    return (p - 1) * times.f if times.all_equal and m >= 2 * p - 1 else None


def v_bubble(shape: Shape, times: Times) -> Fraction | None:
    p, _, m = shape
    return (p - 1) * times.f / 2 if times.all_equal and m >= 2 * p - 1 else None


def v_min_bubble(shape: Shape, times: Times) -> Fraction | None:
    p, _, m = shape
    if not times.all_equal or m < p:
        return None
    return times.f * max(0, 4 * p - (3 if p % 3 == 0 else 5)) / 2


def v_half_bubble(shape: Shape, times: Times) -> Fraction | None:
    p, _, m = shape
    if not times.all_equal or m < p:
        return None
    return times.f * (7 * p - (4 if p % 2 == 0 else 7)) / 4


def interleaved_peak(shape: Shape, rank: int) -> Fraction:
    """What warms it up, and the forward of the first pair."""
    p, v, m = shape
    in_turn = m // num_rounds(p, m)
    return Fraction(min((v - 1) * in_turn + 2 * (p - 1 - rank) + 1, v * m), v)


def interleaved_zb_peak(shape: Shape, _rank: int) -> Fraction:
    p, v, m = shape
    in_turn = m // num_rounds(p, m)
    return Fraction(min((v - 1) * in_turn + p, v * m), v)


def up_to(limit: Callable[[int], Fraction | int]) -> Peak:
    """So many of p ranks, or all microbatches: a rank reaches it, some may hold less."""
    return lambda shape, _rank: Fraction(min(limit(shape.world_size), shape.num_microbatches))
