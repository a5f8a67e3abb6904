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
from pathlib import Path
from typing import Protocol

from engine.plan.spans import Span
from engine.run.clock import MAX_DRIFT_PPB, Line, Ping, Tie, line_through
from engine.run.p2p.fabric import Ranks

NUM_PINGS = 50
"""Ten do where little else runs; on loopback, the narrowest bounds the offset to some 30 us."""
_BILLION = 1_000_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


@dataclass(frozen=True)
class Offset:
    """This rank's clock ahead of rank 0's at a moment, by `offset_ns` +- `error_ns`."""

    at_ns: int  # on rank 0's clock
    offset_ns: int
    error_ns: int
    is_shared: bool = False  # the two are one clock


SAME_CLOCK = Offset(0, 0, 0, is_shared=True)


def estimate_offset(pings: Sequence[Ping]) -> Offset:
    """What the pings have in common, in the middle of the narrowest.

    A ping tells of its own time: at another moment its interval is wider by what the clocks may
    have drifted since. Where that leaves nothing in common, they drift faster than is taken for
    possible: the narrowest ping decides, and what parts the others is added to the error.
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
    return Offset(at_ns, (low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2 + parted_ns)


def _interval(ping: Ping, at_ns: int) -> tuple[int, int]:
    """The least and the greatest offset at a moment of rank 0's clock."""
    away_ns = max(abs(at_ns - ping.sent_ns), abs(at_ns - ping.returned_ns))
    drifted_ns = -(-away_ns * MAX_DRIFT_PPB // _BILLION)
    low_ns, high_ns = ping.answered_ns - ping.returned_ns, ping.received_ns - ping.sent_ns
    return low_ns - drifted_ns, high_ns + drifted_ns


@dataclass(frozen=True)
class Alignment:
    """Takes this rank's times to rank 0's clock.

    It is right within `error_ns` between the two offsets that it was made from.
    """

    line: Line  # from rank 0's clock to this rank's
    is_shared: bool

    @property
    def offset_ns(self) -> int:
        """This rank's clock ahead of rank 0's in the middle of the time, in nanoseconds."""
        return self.line.second_ns - self.line.first_ns

    @property
    def drift_ppb(self) -> int:
        """Nanoseconds that this clock gains on rank 0's in a second.

        It is known no better than the offsets: to within twice `error_ns` over the time between.
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


_IDENTITY = Alignment(Line(0, 0, 0.0, 0), is_shared=True)


def align(before: Offset, after: Offset) -> Alignment:
    """Return the alignment from this rank's offsets before and after what was timed."""
    if before.is_shared:
        return _IDENTITY
    return Alignment(line_through(_tie(before), _tie(after)), is_shared=False)


def _tie(offset: Offset) -> Tie:
    return Tie(offset.at_ns, offset.at_ns + offset.offset_ns, offset.error_ns)


class Control(Protocol):
    """The way in which ranks talk beside what is timed.

    It is a `Fabric` that has connected them, or something with a group of its own over them.
    """

    def gather_objects(self, ours: str | None, ranks: Ranks) -> list[str | None]:
        """Every rank's object, in the order of the ranks, on all of them."""

    def exchange_pings(self, peers: Ranks, count: int, ranks: Ranks) -> list[Ping]:
        """The first of the ranks and each peer in turn; the pings that this rank answered."""


def measure_offset(control: Control, ranks: Ranks) -> Offset:
    """This rank's clock against that of the first of the ranks, now.

    Collective over `ranks`, whom `control` connects; blocks. With one rank nothing is
    communicated, and pings are spared where two ranks share a clock.
    """
    if len(ranks) == 1:
        return SAME_CLOCK
    first, *others = control.gather_objects(clock_identity(), ranks)
    apart = [r for r, other in zip(ranks[1:], others, strict=True) if not is_same(first, other)]
    pings = control.exchange_pings(tuple(apart), NUM_PINGS, ranks)
    return estimate_offset(pings) if pings else SAME_CLOCK


def clock_identity() -> str | None:
    """Names this process's monotonic clock: the kernel since it booted, and the time namespace.

    None where the system does not tell. A host's name would not do: containers have their own on
    one clock, and namespaces may shift the clock under one name. Virtual machines restored from one
    snapshot cannot be told apart by it.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_TIME_NAMESPACE.readlink()}"
    except OSError:
        return None


def is_same(first: str | None, other: str | None) -> bool:
    """Whether two identities name one clock; what is not told is taken for another."""
    return first is not None and first == other
