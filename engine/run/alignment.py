"""Every rank's times on rank 0's clock, with a bound on how far off they can be.

Ranks of one machine read one monotonic clock; others do not, and NTP makes machines agree on the
date to milliseconds at best, without a bound. So rank 0 pings each rank whose clock is another:

    rank 0   t0 ----.          .---> t3      the rank's clock is ahead of rank 0's by an offset
    rank r          `-> t1 t2 -'             t2 - t3  <=  offset  <=  t1 - t0

which holds whatever the network does, as no message arrives before it was sent. A burst of pings
bounds the offset by what their intervals share; bursts before and after the steps bound the drift.
The clocks are taken to drift at one rate in between (a monotonic clock is never set, but NTP may
slew it), of at most MAX_DRIFT_PPB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.plan.spans import Span
from engine.run.clock import MAX_DRIFT_PPB, HostClock, Line, Ping, Tie, line_through
from engine.run.host import clock_identity, is_same
from engine.run.p2p.fabric import Processes

NUM_PINGS = 50
"""Ten do where little else runs; on loopback, the narrowest bounds the offset to some 30 us."""
_BILLION = 1_000_000_000


SAME_CLOCK = Tie(0, 0, 0)
"""Ties rank 0's clock to this rank's where the two are one; others have an error."""


def tie_by(pings: Sequence[Ping]) -> Tie:
    """Tie rank 0's clock to this rank's in the middle of the narrowest ping.

    The rank's clock is ahead by an offset that all pings have in common. A ping tells of its own
    time: at another moment its interval is wider by what the clocks may have drifted since. Where
    that leaves nothing in common, they drift faster than is taken for possible: the narrowest ping
    decides, and what parts the others is added to the error.
    """
    narrowest = min(
        pings, key=lambda p: (p.returned_ns - p.sent_ns) - (p.answered_ns - p.received_ns)
    )
    at_ns = (narrowest.sent_ns + narrowest.returned_ns) // 2
    intervals = [_interval(ping, at_ns) for ping in pings]
    low_ns, high_ns = max(low for low, _ in intervals), min(high for _, high in intervals)
    parted_ns = max(0, low_ns - high_ns)
    if parted_ns:
        low_ns, high_ns = _interval(narrowest, at_ns)
    offset_ns, error_ns = (low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2 + parted_ns
    return Tie(at_ns, at_ns + offset_ns, error_ns)


def _interval(ping: Ping, at_ns: int) -> tuple[int, int]:
    """The least and the greatest offset at a moment of rank 0's clock."""
    away_ns = max(abs(at_ns - ping.sent_ns), abs(at_ns - ping.returned_ns))
    drifted_ns = -(-away_ns * MAX_DRIFT_PPB // _BILLION)
    low_ns, high_ns = ping.answered_ns - ping.returned_ns, ping.received_ns - ping.sent_ns
    return low_ns - drifted_ns, high_ns + drifted_ns


@dataclass(frozen=True)
class Alignment:
    """Takes this rank's times to rank 0's clock.

    It is right within `error_ns` between the two ties that it was made from.
    """

    line: Line  # from rank 0's clock to this rank's

    @property
    def is_shared(self) -> bool:
        """Whether the two clocks are one."""
        return self.line == _IDENTITY

    @property
    def offset_ns(self) -> int:
        """This rank's clock ahead of rank 0's in the middle of the time, in nanoseconds."""
        return self.line.second_ns - self.line.first_ns

    @property
    def drift_ppb(self) -> int:
        """Nanoseconds that this clock gains on rank 0's in a second.

        It is known no better than the ties: to within twice `error_ns` over the time between.
        """
        return round(self.line.drift * _BILLION)

    @property
    def error_ns(self) -> int:
        """The most that an answer is off."""
        return self.line.error_ns

    def to_rank_0(self, time_ns: int) -> int:
        return self.line.to_first(time_ns)

    def apply(self, spans: Iterable[Span]) -> list[Span]:
        """The spans with their times on rank 0's clock."""
        to_rank_0 = self.to_rank_0
        return [
            s._replace(start_ns=to_rank_0(s.start_ns), end_ns=to_rank_0(s.end_ns)) for s in spans
        ]


_IDENTITY = Line(0, 0, 0.0, 0)


def align(before: Tie, after: Tie) -> Alignment:
    """Return the alignment from the ties before and after what was timed."""
    return Alignment(_IDENTITY if before == SAME_CLOCK else line_through(before, after))


class Control(Protocol):
    """The way in which processes talk beside what is timed.

    It is a `Fabric` that has connected them, or something with a group of its own over them. Every
    call blocks.
    """

    def gather_objects(self, ours: str | None, processes: Processes) -> list[str | None]:
        """Every process's object, in their order, on all of them."""

    def place_in(self, processes: Processes) -> int:
        """The place of this process among them."""

    def send(self, tensor: Tensor, place: int, processes: Processes) -> None:
        """Send a tensor to the process at a place."""

    def receive(self, tensor: Tensor, place: int, processes: Processes) -> None:
        """Fill the tensor with what the process at a place sends."""


def measure_tie(control: Control, processes: Processes) -> Tie:
    """Tie the clock of the first of the processes to this one's, now.

    Collective over `processes`, whom `control` connects; blocks. With one nothing is communicated,
    and pings are spared where two share a clock.
    """
    if len(processes) == 1:
        return SAME_CLOCK
    first, *others = control.gather_objects(clock_identity(), processes)
    apart = [place for place, other in enumerate(others, 1) if not is_same(first, other)]
    pings = exchange_pings(control, apart, NUM_PINGS, processes)
    return tie_by(pings) if pings else SAME_CLOCK


def exchange_pings(
    control: Control, places: Sequence[int], count: int, processes: Processes
) -> list[Ping]:
    """The first of the processes pings those at these places in turn: `count` round trips each.

    Nothing is timed meanwhile. Blocks until this process's are over. Returns the pings that it
    answered: none where it is at no such place.
    """
    own, clock, number = control.place_in(processes), HostClock(), torch.zeros(1)
    for place in places if own == 0 else ():
        asked = []
        for _ in range(count):
            sent_ns = clock.mark()
            control.send(number, place, processes)
            control.receive(number, place, processes)
            asked.append((sent_ns, clock.mark()))
        control.send(torch.tensor(asked, dtype=torch.int64), place, processes)
    if own not in places:
        return []
    answered = []
    for _ in range(count):
        control.receive(number, 0, processes)
        received_ns, answered_ns = clock.mark(), clock.mark()
        control.send(number, 0, processes)
        answered.append((received_ns, answered_ns))
    theirs = torch.zeros(count, 2, dtype=torch.int64)
    control.receive(theirs, 0, processes)
    return [
        Ping(sent_ns, *ours, returned_ns)
        for (sent_ns, returned_ns), ours in zip(theirs.tolist(), answered, strict=True)
    ]
