"""Which columns of a table fit a width, and how: pure arithmetic on headings and cells.

1. columns move closer, and headings wrap
2. long texts are cut to `SHORTEST_TEXT`, except those that name the row
3. the least important columns are left out
4. what is left is cut, so that no row is ever wider than the width
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

GAPS = (3, 2)
"""Blanks between columns, the widest first."""
MARGIN = 1
SHORTEST_TEXT = 24
"""Characters that a text keeps before a column is left out for want of room."""


@dataclass(frozen=True)
class Column:
    """A column as text; the lower `importance`, the sooner it is left out."""

    name: str
    heading: str
    widths: Sequence[int]  # of its cells, in characters of the terminal
    importance: int
    is_text: bool = False  # may be cut
    is_essential: bool = False  # names the row: cut and left out only at the very end

    @property
    def filled(self) -> int:
        return max(self.widths, default=0)

    @property
    def longest_word(self) -> int:
        return max(map(len, self.heading.split()), default=1)


@dataclass(frozen=True)
class Layout:
    """The columns that fit, with a width each, and the blanks between two."""

    columns: tuple[Column, ...]
    widths: tuple[int, ...]
    gap: int

    @property
    def total(self) -> int:
        return MARGIN + sum(self.widths) + self.gap * len(self.widths)


def fit(columns: Sequence[Column], limit: int) -> Layout:
    """Lay out the columns, at least one, within `limit` characters."""
    left = list(columns)
    while True:
        filled = [column.filled for column in left]
        for gap in GAPS:
            widths = _wrapped(left, filled, limit - gap * len(left))
            if sum(widths) + MARGIN + gap * len(left) <= limit:
                return Layout(tuple(left), tuple(widths), gap)
        gap = GAPS[-1]
        room = limit - MARGIN - gap * len(left)
        optional = [column for column in left[1:] if not column.is_essential]
        # Texts that name the row are cut only where nothing else can be left out.
        for is_final in (False,) if optional else (False, True):
            shortened = _cut(left, filled, room, is_final=is_final)
            widths = _wrapped(left, shortened, room + MARGIN)
            if sum(widths) <= room:
                return Layout(tuple(left), tuple(widths), gap)
        if len(left) == 1:
            return Layout(tuple(left), (max(1, limit - MARGIN - gap),), gap)
        left.remove(min(optional or left[1:], key=lambda column: column.importance))


def _cut(
    columns: Sequence[Column], filled: Sequence[int], room: int, *, is_final: bool
) -> list[int]:
    """Widths of the cells after the longest texts are cut, as little as the room asks for."""
    widths = list(filled)
    least = [max(width, column.longest_word) for column, width in zip(columns, widths, strict=True)]
    cut_down = [
        place
        for place, column in enumerate(columns)
        if column.is_text and (is_final or not column.is_essential)
    ]
    while (excess := sum(least) - room) > 0:
        longest = [place for place in cut_down if widths[place] > SHORTEST_TEXT]
        if not longest:
            break
        place = max(longest, key=lambda place: widths[place])
        others = [widths[other] for other in longest if other != place]
        floor = max([SHORTEST_TEXT, widths[place] - excess, *(n - 1 for n in others)])
        widths[place] = min(floor, widths[place] - 1)
        least[place] = max(widths[place], columns[place].longest_word)
    return widths


def _wrapped(columns: Sequence[Column], filled: Sequence[int], limit: int) -> list[int]:
    """Widths that add up to the limit, if wrapping the longest headings achieves it."""
    pairs = list(zip(columns, filled, strict=True))
    widths = [max(len(column.heading), width) for column, width in pairs]
    least = [max(column.longest_word, width) for column, width in pairs]
    while MARGIN + sum(widths) > limit and widths != least:
        place = max(range(len(widths)), key=lambda column: widths[column] - least[column])
        narrower = max(widths[place] - 1, least[place])
        lines = textwrap.wrap(columns[place].heading, narrower, break_on_hyphens=False)
        widths[place] = max([least[place], *map(len, lines)])
    return widths
