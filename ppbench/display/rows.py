"""Rows of plain values, and the columns and the order that a reader asks of them.

JSON and CSV show rows raw, under the store's own names; people see columns in their usual units.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ppbench.config.toml import SYNONYMS, column_named
from ppbench.display.fields import field_of
from ppbench.errors import UsageError, nearest

if TYPE_CHECKING:  # a listing of the store needs no pandas
    import pandas as pd

_MOST_LISTED = 60
"""Most names that an error about an unknown one lists."""


@dataclass(frozen=True)
class Written:
    """A value that people see as this text, where its column does not say how."""

    value: object
    text: str
    link: str = ""
    """Where a page leads from it."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class View:
    """The columns and the order of rows that a reader asks for."""

    columns: tuple[str, ...] = ()
    sort: str = ""

    @classmethod
    def of(cls, columns: Iterable[str] | None, sort: str | None) -> View:
        """The view of the options `--columns a,b`, which may be repeated, and `--sort [-]a`."""
        names = [name.strip() for text in columns or () for name in text.split(",")]
        return cls(tuple(filter(None, names)), (sort or "").strip())

    def names(self, known: Sequence[str]) -> list[str]:
        """The asked columns under their stored names. Raises UsageError for an unknown one."""
        return list(dict.fromkeys(_column(name, known, "--columns") for name in self.columns))

    def order(self, known: Sequence[str]) -> str | None:
        """The stored name of the column to sort by. Raises UsageError for an unknown one."""
        return _column(self.sort.removeprefix("-"), known, "--sort") if self.sort else None


AS_IT_IS = View()


def _column(name: str, known: Sequence[str], option: str) -> str:
    """The column that a name means: its stored name, a synonym, or its heading if that is clear."""
    stored = column_named(name)
    if stored in known:
        return stored
    headed = [column for column in known if field_of(column).label.lower() == name.lower()]
    if len(headed) == 1:
        return headed[0]
    words = [*known, *(word for word, meant in SYNONYMS.items() if meant in known)]
    listed = words if len(words) <= _MOST_LISTED else [*words[:_MOST_LISTED], "..."]
    raise UsageError(f'{option}: unknown column "{name}"{nearest(name, words, listed)}')


@dataclass(frozen=True)
class Rows:
    """Rows of plain values, in which None is missing."""

    columns: Sequence[str]
    cells: Sequence[tuple[object, ...]] = ()
    for_people: Sequence[str] = ()
    """Columns that JSON and CSV have only where they are asked for."""

    @classmethod
    def of(cls, frame: pd.DataFrame, for_people: Sequence[str] = ()) -> Rows:
        """The rows of a frame, unrounded; integers stay whole."""
        plain = frame.convert_dtypes()
        values = plain.astype(object).where(plain.notna(), None).to_numpy().tolist()
        return cls(list(map(str, frame.columns)), [tuple(row) for row in values], for_people)

    @classmethod
    def of_records(
        cls, records: Sequence[Mapping[str, object]], for_people: Sequence[str] = ()
    ) -> Rows:
        """Records by column, in which a column may be missing."""
        columns = list(dict.fromkeys(name for record in records for name in record))
        cells = [tuple(record.get(name) for name in columns) for record in records]
        return cls(columns, cells, for_people)

    def read(self, names: Iterable[str], newest: int | None = None) -> Rows:
        """These columns alone, and the last rows alone if a number of them is given."""
        names = list(names)
        places = [self.columns.index(name) for name in names]
        cells = self.cells if newest is None else self.cells[max(len(self.cells) - newest, 0) :]
        return Rows(names, [tuple(row[place] for place in places) for row in cells])

    def viewed(self, view: View, usual: Sequence[str] = (), newest: int | None = None) -> Rows:
        """The rows as asked for: these usual columns, or all, where a view names none."""
        order, asked = view.order(self.columns), view.names(self.columns)
        names = asked or usual or [one for one in self.columns if one not in self.for_people]
        if order is None:
            return self.read(names, newest)
        rows = self.read(dict.fromkeys([*names, order]), newest)
        return rows.sorted(order, is_descending=view.sort.startswith("-")).read(names)

    def sorted(self, column: str, *, is_descending: bool) -> Rows:
        """Sort the rows: numbers before texts, missing values last in both directions."""
        place = self.columns.index(column)
        numbers, texts, missing = [], [], []
        for row in self.cells:
            value = plain(row[place])
            if isinstance(value, list | tuple):  # as people see it
                value = str(row[place])
            try:
                if value is None:
                    missing.append(row)
                else:
                    numbers.append((float(str(value)), row))
            except ValueError:
                texts.append((str(value), row))
        for group in (numbers, texts):
            group.sort(key=lambda pair: pair[0], reverse=is_descending)
        return replace(self, cells=[*(row for _, row in (*numbers, *texts)), *missing])

    def records(self) -> list[dict[str, object]]:
        """Each row by its columns, as JSON has it."""
        return [dict(zip(self.columns, map(plain, row), strict=True)) for row in self.cells]

    def csv(self, view: View = AS_IT_IS) -> str:
        """The rows as CSV, in which a list is written as JSON."""
        text, rows = io.StringIO(), self.viewed(view)
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(rows.columns)
        lines.writerows(map(_flat, rows.cells))
        return text.getvalue().rstrip("\n")


@dataclass(frozen=True)
class Record:
    """A single object: facts by their names."""

    facts: Mapping[str, object]

    @property
    def columns(self) -> list[str]:
        return list(self.facts)

    def viewed(self, view: View) -> Record:
        """The facts that are asked for; their order is that of the question."""
        view.order(self.columns)
        return Record({name: self.facts[name] for name in view.names(self.columns) or self.facts})

    def records(self) -> dict[str, object]:
        """The facts as JSON has them."""
        return {name: plain(value) for name, value in self.facts.items()}

    def csv(self, view: View = AS_IT_IS) -> str:
        """The facts as CSV, a row for each."""
        return Rows(["key", "value"], list(self.viewed(view).facts.items())).csv()


def as_records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows as plain values, unrounded; missing values are None, integers stay whole."""
    return Rows.of(frame).records()


def plain(value: object) -> object:
    """A value without the text that people see of it; a zero has no sign."""
    value = value.value if isinstance(value, Written) else value
    return value + 0.0 if isinstance(value, float) else value


def text_of(value: object) -> str:
    """A value as text: a list or an object as JSON."""
    is_nested = isinstance(value, list | tuple | dict)
    return json.dumps(value, ensure_ascii=False) if is_nested else str(value)


def _flat(row: Iterable[object]) -> list[object]:
    values = map(plain, row)
    return [text_of(one) if isinstance(one, list | tuple | dict) else one for one in values]
