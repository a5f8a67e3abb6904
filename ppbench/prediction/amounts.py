"""Costs and transfers as a command line has them, read as the exact fractions that were typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NamedTuple

from engine.plan.slices import shares_of
from ppbench.console import note
from ppbench.errors import UsageError

NS_PER_S = 10**9
LEAST_COST, MOST_COST = Decimal("1e-15"), Decimal("1e15")
_MOST_DIGITS = 40
MOST_SLICES = 4096


class UnitCosts(NamedTuple):
    """The seconds of a microbatch on one rank: forward, and the two halves of the backward.

    `pair` are those of a forward and a backward side by side; without, they run in order.
    """

    f: Fraction
    i: Fraction
    w: Fraction
    pair: Fraction | None = None


UNIT_COSTS = UnitCosts(Fraction(1), Fraction(1), Fraction(1))
_COSTS = (
    "seconds per microbatch and rank of F, I and W, such as F=1,I=1,W=1 (a full backward B takes "
    "I + W; a pair of F and B takes FB, or runs in order)"
)


@dataclass(frozen=True)
class Transfers:
    """The duration of a message between two ranks, and whether the sender computes meanwhile."""

    duration_s: Fraction = Fraction(0)
    message_bytes: int = 0
    overlaps: bool = True


FREE_TRANSFERS = Transfers()


def number(value: Fraction) -> float:
    """A fraction as an int if it is whole, else as the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)


def read_costs(text: str) -> UnitCosts:
    """Parse `F=1,I=0.5,W=0.5`, in seconds. Raises UsageError for any other form."""
    times = read_amounts("--cost", text, dict.fromkeys((*"FIW", "FB"), "seconds"), _COSTS)
    missing = [key for key in "FIW" if key not in times]
    if missing or not any(times.values()):
        problem = f"{missing[0]} is missing" if missing else "all are 0: nothing takes time"
        raise UsageError(f"--cost: {problem}; expected {_COSTS}")
    return UnitCosts(times["F"], times["I"], times["W"], times.get("FB"))


def read_slices(text: str | None) -> tuple[float, ...]:
    """Parse `4` or `4,attention=0.3`: the share of each slice in the time of its microbatch.

    Slices have equal numbers of tokens. None: whole microbatches. Raises UsageError.
    """
    if text is None:
        return ()
    number, _, rest = text.partition(",")
    expected = f"1 to {MOST_SLICES} slices, as in 4, or in 4,attention=0.3 with attention's share"
    if not number.strip().isdecimal() or not 1 <= int(number) <= MOST_SLICES:
        raise UsageError(f'--slices: got "{text}"; expected {expected} of the time of a microbatch')
    given = read_amounts("--slices", rest, {"attention": "a share"}, expected) if rest else {}
    attention = given.get("attention", Fraction(0))
    if not 0 <= attention <= 1:
        raise UsageError(
            f"--slices: attention is {float(attention):g}; expected a share from 0 to 1"
        )
    return shares_of((1,) * int(number), float(attention))


def read_amounts(
    option: str, text: str, units: Mapping[str, str], expected: str
) -> dict[str, Fraction]:
    """Parse `KEY=AMOUNT,...` with the keys that have units. Raises UsageError."""
    given: dict[str, Fraction] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        problem = f"{key} is given twice" if key in given else ""
        if not equals:
            problem = f'"{part.strip()}" is not KEY=AMOUNT'
        elif key not in units:
            problem = f'unknown key "{key}"'
        if problem:
            raise UsageError(f"{option}: {problem}; expected {expected}")
        given[key] = read_quantity(f"{option}: {key}", value, units[key])
    return given


def read_transfers(
    latency: str, bandwidth: str | None, message_bytes: int, *, overlaps: bool
) -> Transfers:
    """The transfer model of a command line. Raises UsageError."""
    duration = read_quantity("--latency", latency, "seconds")
    if message_bytes < 0:
        raise UsageError(f"--message-bytes: {message_bytes} is negative; expected 0 or more")
    if bandwidth is not None:
        if not message_bytes:
            note("warning: --bandwidth has no effect on messages of 0 bytes; add --message-bytes N")
        bytes_per_s = read_quantity("--bandwidth", bandwidth, "bytes per second")
        if not bytes_per_s:
            raise UsageError("--bandwidth: is 0 bytes per second; expected more than 0")
        duration += message_bytes / bytes_per_s
    return Transfers(duration, message_bytes, overlaps)


def read_quantity(where: str, text: str, unit: str) -> Fraction:
    """Parse a decimal number of `unit` exactly. Raises UsageError, which begins with `where`."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    is_sane = value.is_finite() and len(value.as_tuple().digits) <= _MOST_DIGITS
    if is_sane and (value == 0 or LEAST_COST <= value <= MOST_COST):
        return Fraction(value)
    raise UsageError(
        f'{where}: "{text}" is not a number of {unit}; expected 0, or from {LEAST_COST:e} to '
        f"{MOST_COST:e}, such as 0.02"
    )
