"""Closed forms of schedules: their bubble, and the most activations that a rank holds.

For equal stages and free transfers, in units of one microbatch on one rank: F, I and W are the
times of its forward and of the two halves of its backward on all stages of a rank together. Stated
where they hold exactly and None elsewhere. A shape is (p, v, m).
"""

from fractions import Fraction
from typing import NamedTuple

from engine.plan.schedules.one_f_one_b import num_rounds


class Times(NamedTuple):
    f: Fraction
    i: Fraction
    w: Fraction


def _are_equal(times):
    return times.f == times.i == times.w


def fill_and_drain(shape, times):
    """A rank waits for p - 1 stages to be filled and to be drained; few microbatches, for more."""
    p, v, m = shape
    return (times.f + times.i + times.w) * (p - 1 + (v - 1) * max(0, p - m)) / v


def zero_bubble(shape, times):
    """W fills the drain, as far as there are W to fill it with."""
    p, v, m = shape
    f, i, w = times
    if (v > 1 and m < p) or not w <= min(f, i):
        return None
    return ((p - 1) * (f + i) - (min(m, p) - 1) * w) / v


def zb_h2_bubble(shape, times):
    p, _, m = shape
    return (p - 1) * times.f if _are_equal(times) and m >= 2 * p - 1 else None


def v_bubble(shape, times):
    p, _, m = shape
    return (p - 1) * times.f / 2 if _are_equal(times) and m >= 2 * p - 1 else None


def v_min_bubble(shape, times):
    p, _, m = shape
    if not _are_equal(times) or m < p:
        return None
    return times.f * max(0, 4 * p - (3 if p % 3 == 0 else 5)) / 2


def v_half_bubble(shape, times):
    p, _, m = shape
    if not _are_equal(times) or m < p:
        return None
    return times.f * (7 * p - (4 if p % 2 == 0 else 7)) / 4


def chimera_bubble(shape, times):
    """Filled and drained from both ends; each further unit waits for the backwards before it."""
    p, _, m = shape
    f, b = times.f, times.i + times.w
    return (p - 2) * (b + (m // p - 1) * (b - f)) if b >= f else None


def dualpipe_bubble(shape, times):
    """Pairs run in order: half a V over half the ranks."""
    p, _, _ = shape
    return (p // 2 - 1) * times.f if _are_equal(times) else None


def chimera_peak(shape, rank):
    p = shape.world_size
    return p // 2 + 1 + min(rank, p - 1 - rank)


def interleaved_peak(shape, rank):
    """What warms it up, and the forward of the first pair."""
    p, v, m = shape
    in_turn = m // num_rounds(p, m)
    return Fraction(min((v - 1) * in_turn + 2 * (p - 1 - rank) + 1, v * m), v)


def interleaved_zb_peak(shape, _rank):
    p, v, m = shape
    in_turn = m // num_rounds(p, m)
    return Fraction(min((v - 1) * in_turn + p, v * m), v)


def up_to(limit):
    """So many of p ranks, or all microbatches: a rank reaches it, some may hold less."""
    return lambda shape, _rank: Fraction(min(limit(shape.world_size), shape.num_microbatches))


FORMS = {  # idle time of a rank in a step, by the makespan; the most that a rank holds
    "afab": (fill_and_drain, lambda shape, _: shape.num_microbatches),
    "1f1b": (
        fill_and_drain,
        lambda shape, rank: min(shape.world_size - rank, shape.num_microbatches),
    ),
    "seq1f1b": (  # of one slice
        fill_and_drain,
        lambda shape, rank: min(shape.world_size - rank, shape.num_microbatches),
    ),
    "interleaved_1f1b": (fill_and_drain, interleaved_peak),
    "looped_bfs": (fill_and_drain, lambda shape, _: shape.num_microbatches),
    "zb_h1": (zero_bubble, up_to(lambda p: p)),
    "zb_h2": (zb_h2_bubble, up_to(lambda p: 2 * p - 1)),
    "interleaved_zb": (zero_bubble, interleaved_zb_peak),
    "zbv": (v_bubble, up_to(lambda p: p)),
    "dualpipev": (v_bubble, lambda shape, _: shape.world_size + Fraction(1, 2)),
    "chimera": (chimera_bubble, chimera_peak),
    "dualpipe": (dualpipe_bubble, lambda shape, _: shape.world_size + 1),
    "v_half": (v_half_bubble, up_to(lambda p: (p + 2) // 2)),
    "v_min": (v_min_bubble, up_to(lambda p: (p + 4) // 3)),
}
BUBBLE_TIME = {name: bubble for name, (bubble, _) in FORMS.items()}
PEAK = {name: peak for name, (_, peak) in FORMS.items()}
