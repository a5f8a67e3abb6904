"""Amounts of memory in words: `1.5 GiB` is 1,610,612,736 bytes."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    "kB": 1000,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,9}})?)\s*({'|'.join(UNITS)})", re.ASCII)


def bytes_of(text: str) -> int:
    """Whole bytes of `1.5 GiB`, `800 MB` and the like. Raises ValueError on other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f'expected a number and a unit such as "1.5 GiB" or "800 MB", got "{text}"'
        )
    return int(Fraction(match[1]) * UNITS[match[2]])


def exact_text(num_bytes: int) -> str:
    """The same bytes in the unit that makes the shortest text, with at most three decimals."""
    texts = []
    for unit, size in UNITS.items():
        thousandths, rest = divmod(num_bytes * 1000, size)
        if not rest:
            number = f"{thousandths // 1000}.{thousandths % 1000:03}".rstrip("0").rstrip(".")
            texts.append(f"{number} {unit}")
    return min(texts, key=len)


def size_text(num_bytes: int) -> str:
    """Bytes, rounded up, in the largest of B, KiB, MiB, GiB and TiB in which that is 1 or more."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        hundredths = -(-num_bytes * 100 // 1024**power)
        lower_hundredths = -(-num_bytes * 100 // 1024 ** (power - 1))
        if lower_hundredths >= 1024 * 100:
            return f"{hundredths / 100:g} {unit}"
    return f"{num_bytes} B"
