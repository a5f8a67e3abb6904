"""Ranks' clocks against rank 0's: by hand exact; by any pings, real ones too, within the bound."""

import time
import types
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline import config, over_gloo

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from engine.run import alignment as alignment_room
from engine.run import clock
from engine.run.alignment import (
    SAME_CLOCK,
    Alignment,
    align,
    measure_tie,
    tie_by,
)
from engine.run.clock import MAX_DRIFT_PPB, HostClock, Line, Ping, Tie
from engine.run.host import clock_identity, is_same
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree

DRIFTS = st.fractions(-1, 1).map(lambda share: share * MAX_DRIFT_PPB * Fraction(999, 10**12))


def offset(at_ns, ahead_ns, error_ns):
    """A clock that is ahead of rank 0's at a moment."""
    return Tie(at_ns, at_ns + ahead_ns, error_ns)


def test_a_ping_bounds_the_offset_by_its_two_ways():
    # The rank is 1000 ahead; 40 there, 60 back.
    assert tie_by([Ping(0, 1040, 1050, 110)]) == offset(55, 990, 51)


def test_asymmetric_pings_share_what_is_narrower_than_either():
    slow_there, slow_back = Ping(0, 1900, 1900, 910), Ping(2000, 3010, 3010, 2910)
    both = tie_by([slow_there, slow_back])
    alone = [tie_by([ping]) for ping in (slow_there, slow_back)]
    assert alone == [offset(455, 1445, 456), offset(2455, 555, 456)]
    # At 455, as the first of two equals; what 2455 ns may have drifted is 3.
    assert both == offset(455, 1001, 12)


def test_pings_with_nothing_in_common_leave_the_narrowest_to_decide_and_widen_its_error():
    wide, narrow = Ping(0, 1100, 1100, 200), Ping(500, 700, 700, 600)
    assert tie_by([narrow]) == offset(550, 150, 51)
    # The wide one says 899 at least, the narrow one 201 at most, what may have drifted included.
    assert tie_by([wide, narrow]) == offset(550, 150, 51 + 698)


def test_a_clock_that_is_slewed_harder_than_taken_for_possible_widens_the_bound():
    before, after = offset(0, 0, 20_000), offset(2_000_000_000, 10_000_000, 20_000)
    alignment = align(before, after)
    for tie in (before, after):
        off_ns = alignment.to_rank_0(tie.second_ns) - tie.first_ns
        assert abs(off_ns) + tie.error_ns <= 1.002 * alignment.error_ns
    assert alignment.error_ns < 4_100_000


def test_an_alignment_follows_a_drifting_clock():
    alignment = align(offset(0, 5_000, 100), offset(1_000_000, 5_100, 60))
    assert (alignment.offset_ns, alignment.drift_ppb, alignment.error_ns) == (5_050, 100_000, 104)
    assert not alignment.is_shared
    assert alignment.to_rank_0(5_000) == 0
    assert alignment.to_rank_0(1_005_100) == 1_000_000
    assert alignment.to_rank_0(5_000 + 100_010) == 100_000


def test_a_shared_clock_is_left_as_it_is():
    alignment = align(SAME_CLOCK, SAME_CLOCK)
    assert alignment == Alignment(Line(0, 0, 0.0, 0))
    assert alignment.is_shared
    assert (alignment.offset_ns, alignment.drift_ppb, alignment.error_ns) == (0, 0, 0)
    assert alignment.to_rank_0(2**62 + 1) == 2**62 + 1


def test_spans_keep_everything_but_their_times():
    span = Span(3, 1, Lane.SEND, 1, Op.SEND_F, 2, 1_010, 1_030, 64)
    alignment = align(offset(0, 1_000, 1), offset(100, 1_000, 1))
    assert alignment.apply([span]) == [Span(3, 1, Lane.SEND, 1, Op.SEND_F, 2, 10, 30, 64)]


class DriftingClock:
    """A rank's clock as an exact function of rank 0's, read in whole nanoseconds."""

    def __init__(self, offset_ns: int, drift: Fraction) -> None:
        self._offset_ns, self._drift = offset_ns, drift

    def read_ns(self, time_ns: Fraction) -> int:
        return int((time_ns * (1 + self._drift) + self._offset_ns) // 1)

    def burst(self, start_ns: int, ways: list[tuple[int, int]]) -> list[Ping]:
        """Pings one after another, each with its own time there and back."""
        pings, now = [], Fraction(start_ns)
        for there_ns, back_ns in ways:
            received, returned = now + there_ns, now + there_ns + back_ns + 200
            answered = self.read_ns(received + 200)
            ping = Ping(int(now), self.read_ns(received), answered, int(returned))
            pings.append(ping)
            now = returned + 100
        return pings


# The first ping is tight on one side, of a time when the offset was another than at the narrowest.
TIGHT_EARLY = [(1, 10**7), (10**7, 10**7), (10**7, 10**7), (10**5, 10**5)]
WAYS = st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), min_size=1, max_size=20)


@given(
    offset=st.integers(-(10**13), 10**13),
    drift=DRIFTS,
    ways=st.tuples(WAYS, WAYS),
    lasted=st.integers(1, 10**12),
    share=st.fractions(0, 1),
)
@example(0, Fraction(999, 10**6), (TIGHT_EARLY, TIGHT_EARLY), 10**9, Fraction(0))
def test_the_true_time_lies_within_the_bound_whatever_delays_and_drift(
    offset, drift, ways, lasted, share
):
    clock = DriftingClock(offset, drift)
    first = clock.burst(10**9, ways[0])
    begin = first[-1].returned_ns
    last = clock.burst(begin + lasted, ways[1])
    alignment = align(tie_by(first), tie_by(last))
    moment = begin + round(share * lasted)
    assert abs(alignment.to_rank_0(clock.read_ns(Fraction(moment))) - moment) <= alignment.error_ns


def test_what_the_system_does_not_tell_is_no_shared_clock():
    assert is_same("boot 1", "boot 1")
    assert not is_same("boot 1", "boot 2")
    assert not is_same(None, None)
    assert not is_same("boot 1", None)


def test_one_rank_measures_nothing():
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    assert measure_tie(fabric, (0,)) is SAME_CLOCK


def offsets_of_ranks(fabric, is_member, settings):
    agree(settings, fabric)
    return measure_tie(fabric, (0, 1, 2)) if is_member else None


@pytest.mark.skipif(clock_identity() is None, reason="the system does not name its clock")
def test_ranks_of_one_machine_share_its_clock(ranks):
    assert ranks.run(3, offsets_of_ranks, config("1f1b", 3, 2)) == [SAME_CLOCK] * 3


@dataclass
class Apart:
    """The spans of a step on a rank with a clock of its own, before and after alignment."""

    true_offset_ns: int
    alignment: Alignment
    raw: list[Span]
    aligned: list[Span]


def step_apart(fabric, is_member, settings) -> Apart | None:
    """Train on ranks whose clocks are set ahead by some seconds."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    ranks, rank = tuple(range(settings.world_size)), dist.get_rank()
    offset_ns = (0, 5 * 10**9, -3 * 10**9, 10**6)[rank]
    ahead = types.SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + offset_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", ahead)
        patch.setattr(alignment_room, "clock_identity", lambda: str(rank))
        trainer = Trainer(agreement, fabric)
        before = measure_tie(fabric, ranks)
        trainer.step(0)
        spans = trainer.step(1).spans
        alignment = align(before, measure_tie(fabric, ranks))
        trainer.close()
    return Apart(offset_ns, alignment, spans, alignment.apply(spans))


def broken_orders(outcomes: list[Apart], spans: list[list[Span]]) -> list[Span]:
    """Receives that end before their send has begun, and actions that begin before what they
    need has ended, by more than the ranks' bounds allow.
    """
    errors = [one.alignment.error_ns for one in outcomes]
    at = {(s.op, s.stage, s.microbatch): s for of_rank in spans for s in of_rank}
    broken = []
    for (op, stage, microbatch), span in at.items():
        step = {Op.RECV_F: -1, Op.F: -1, Op.RECV_B: 1, Op.B: 1}.get(op, 0)
        sends = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
        other = at.get((sends.get(op, op), stage + step, microbatch))
        if step == 0 or other is None:
            continue
        slack_ns = errors[span.rank] + errors[other.rank]
        ours, theirs = (
            (span.end_ns, other.start_ns) if op in sends else (span.start_ns, other.end_ns)
        )
        if ours + slack_ns < theirs:
            broken.append(span)
    return broken


def test_clocks_that_differ_are_recovered_and_a_step_falls_into_place(ranks):
    outcomes = ranks.run(4, over_gloo, step_apart, config("1f1b", 4, 4))
    assert [one.alignment.is_shared for one in outcomes] == [True, False, False, False]
    for one in outcomes:
        off_ns = one.alignment.offset_ns - one.true_offset_ns
        assert abs(off_ns) <= one.alignment.error_ns
    assert broken_orders(outcomes, [one.raw for one in outcomes])
    assert not broken_orders(outcomes, [one.aligned for one in outcomes])
