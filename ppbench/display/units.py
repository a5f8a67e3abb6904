"""Units, and numbers written in them; a missing figure is written as an en dash."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

KIB, MIB, GIB = 2**10, 2**20, 2**30
NS_PER_MS = 1e6
MISSING = "–"


@dataclass(frozen=True)
class Unit:
    """A unit, and the factor from a stored value to a value in it."""

    name: str
    factor: float = 1.0
    is_in_cells: bool = False  # written with every value, as in `36.5 %`
    is_in_label: bool = False  # says what is measured, as `tokens/s` does

    def heading(self, label: str) -> str:
        """Return the heading of a column in this unit."""
        has_unit = not self.name or self.is_in_cells or self.is_in_label
        return label if has_unit else f"{label} ({self.name})"


UNITS = {
    unit.name: unit
    for unit in (
        *map(Unit, ("", "s", "J", "W", "MHz", "°C", "cores", "ppb")),
        Unit("%", 100, is_in_cells=True),
        Unit("ms", 1 / NS_PER_MS),
        Unit("rank-ms", 1 / NS_PER_MS),
        Unit("µs", 1e-3),
        Unit("KiB", 1 / KIB),
        Unit("MiB", 1 / MIB),
        Unit("MB/s", 1e-6),
        Unit("tokens/s", is_in_label=True),
        Unit("J/token", is_in_label=True),
    )
}
"""Every unit by its name."""
NO_UNIT, PERCENT, MS = UNITS[""], UNITS["%"], UNITS["ms"]
MEBIBYTES, TOKENS_PER_S = UNITS["MiB"], UNITS["tokens/s"]


def is_missing(value: object) -> bool:
    """Whether a stored figure is null or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def formatted(value: object, digits: str, factor: float = 1.0) -> str:
    """Format `value` times `factor` by a format specification such as `,.1f`, never as -0.0."""
    sign, rest = ("+", digits[1:]) if digits.startswith("+") else ("", digits)
    return format(float(str(value)) * factor, f"{sign}z{rest}")


def written(value: object, digits: str, unit: str = "", factor: float = 1.0) -> str:
    """Format `value` times `factor` with its unit: `12.5 ms`; a dash if it is missing."""
    return MISSING if is_missing(value) else f"{formatted(value, digits, factor)} {unit}".rstrip()


def percent(fraction: object) -> str:
    return written(fraction, ".1f", "%", 100)


def milliseconds(duration_ns: object) -> str:
    return written(duration_ns, ",.1f", "ms", 1 / NS_PER_MS)


def duration(seconds: float) -> str:
    """`0:42`, or `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def held_share(run: Mapping[Hashable, Any] | pd.Series) -> float | None:
    """Return the activations held at once, as microbatches of a rank's whole share of the model.

    A run counts each stage of a rank, and each slice of a microbatch, by itself; the default is one
    stage per rank.
    """
    count, num_stages = run.get("peak_held_microbatches"), run.get("num_stages")
    if is_missing(count):
        return None
    share = 1.0 if is_missing(num_stages) else int(run["world_size"]) / float(str(num_stages))
    return float(str(count)) * share / int(run.get("slices_number", 1))


def held(run: pd.Series) -> str:
    return written(held_share(run), ".4g")


def size(num_bytes: object) -> str:
    """Format a size in MiB, or in GiB where it would be 1,024.0 MiB or more."""
    if is_missing(num_bytes) or round(float(str(num_bytes)) / MIB, 1) < GIB / MIB:
        return written(num_bytes, ",.1f", "MiB", 1 / MIB)
    return written(num_bytes, ",.2f", "GiB", 1 / GIB)


def rounded_size(num_bytes: float) -> float:
    """Round a size, in bytes, to the digits that `size` prints."""
    unit, digits = (GIB, 2) if round(num_bytes / MIB, 1) >= GIB / MIB else (MIB, 1)
    return round(num_bytes / unit, digits) * unit


def size_unit(largest_bytes: float) -> tuple[str, int]:
    """Return the unit, and its bytes, for a figure with sizes up to `largest_bytes`."""
    units = {"GiB": GIB, "MiB": MIB}
    return next(((name, n) for name, n in units.items() if largest_bytes >= n), ("KiB", KIB))


def comparison(ratio: float, what: str, digits: int | None = None) -> str:
    """Format a ratio: `12 % more memory than`, `3.1 % less memory than`, `as much memory as`.

    By default it has one digit after the point below 10 %, else none.
    """
    if is_missing(ratio):
        return f"an unknown amount of {what} compared with"
    change = abs(ratio - 1)
    if change < 0.005:
        return f"as much {what} as"
    if digits is None:
        digits = 0 if change >= 0.095 else 1
    return f"{change * 100:.{digits}f} % {'more' if ratio > 1 else 'less'} {what} than"


def counted(number: int, word: str) -> str:
    """Format a number of things: `1 rank`, `1,024 ranks`, `2 microbatches`."""
    many = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else many}"


def round_step(least: float | Fraction) -> Fraction:
    """Return the smallest of 1, 2, 5, 10, ... that is as large, over all powers of ten."""
    power = Fraction(10) ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
