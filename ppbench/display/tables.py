"""Tables as text, in the four formats that every listing takes.

`table` and `markdown` are for people: chosen columns, figures in their usual units. `json` and
`csv` are for programs: every column, raw, under the store's own names. `--columns` and `--sort`
apply to all four.

A `table` fits the terminal: what is equal in all rows is said once above it, ids are shortened to
what is unique, and what has no room is left out (`fitting`) and named below.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppbench.config.toml import SYNONYMS, column_named
from ppbench.display.fields import (
    CIRCUMSTANCES,
    DISPENSABLE,
    IDENTIFYING,
    SPEAKING,
    Direction,
    Field,
    field_of,
)
from ppbench.display.fitting import Column, fit
from ppbench.display.formats import Format
from ppbench.errors import UsageError, nearest, printable
from ppbench.store.columns import SETTINGS

if TYPE_CHECKING:  # pandas and rich are imported when something is rendered
    import pandas as pd

PAGE_WIDTH = 100
"""Columns of text of a table in a file or a pipe."""
_MOST_LISTED = 60
"""Most names that an error about an unknown one lists."""
_LEAST_VALUE = 20
_ELLIPSIS = "…"


@dataclass(frozen=True)
class View:
    """The columns and the order of rows that a reader asks of a table."""

    columns: tuple[str, ...] = ()
    sort: str = ""
    short_ids: Mapping[str, str] = field(default_factory=dict)
    """What is shown of the ids of runs."""
    remedy: str = "--columns shows them"
    """How to see the columns that have no room."""

    @classmethod
    def of(cls, columns: Iterable[str] | None, sort: str | None, **more: object) -> View:
        """The view of the options `--columns a,b`, which may be repeated, and `--sort [-]a`."""
        names = [name.strip() for text in columns or () for name in text.split(",")]
        return cls(tuple(filter(None, names)), (sort or "").strip(), **more)  # type: ignore[arg-type]

    def names(self, known: Sequence[str]) -> list[str]:
        """The asked columns under their stored names. Raises UsageError for an unknown one."""
        found = [_column(name, known, "--columns") for name in self.columns]
        return list(dict.fromkeys(found))

    def order(self, known: Sequence[str]) -> str | None:
        """The stored name of the column to sort by. Raises UsageError for an unknown one."""
        return _column(self.sort.removeprefix("-"), known, "--sort") if self.sort else None

    def check(self, known: Sequence[str]) -> None:
        """Raise UsageError for an unknown column, before anything is measured."""
        self.within(known, ())

    def within(self, known: Sequence[str], shown: Sequence[str]) -> list[str]:
        """The columns to read of a table that usually shows some: these or the asked ones."""
        order = self.order(known)
        return list(dict.fromkeys([*(self.names(known) or shown), *([order] if order else [])]))


EVERYTHING = View()


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
    """Rows of plain values, in which None is missing; a listing of the store needs no pandas."""

    columns: list[str]
    cells: list[tuple[object, ...]]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Rows:
        """The rows of a frame, unrounded; integers stay whole."""
        plain = frame.convert_dtypes()
        values = plain.astype(object).where(plain.notna(), None).to_numpy().tolist()
        return cls(list(map(str, frame.columns)), [tuple(row) for row in values])

    def of_columns(self, names: Iterable[str]) -> Iterator[tuple[object, ...]]:
        """The rows with these columns alone."""
        places = [self.columns.index(name) for name in names]
        return (tuple(row[place] for place in places) for row in self.cells)

    def sorted(self, column: str, *, is_descending: bool) -> Rows:
        """Sort the rows: numbers before texts, missing values last in both directions."""
        place = self.columns.index(column)
        numbers, texts, missing = [], [], []
        for row in self.cells:
            value = row[place]
            if value is None:
                missing.append(row)
                continue
            try:
                numbers.append((float(str(value)), row))
            except ValueError:
                texts.append((str(value), row))
        for group in (numbers, texts):
            group.sort(key=lambda pair: pair[0], reverse=is_descending)
        return Rows(self.columns, [*(row for _, row in (*numbers, *texts)), *missing])

    def csv(self, names: Sequence[str]) -> str:
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(names)
        lines.writerows(self.of_columns(names))
        return text.getvalue().rstrip("\n")


def render(
    frame: pd.DataFrame | Rows,
    how: Format,
    columns: Sequence[str] | Mapping[str, Field],
    view: View = EVERYTHING,
    essential: Sequence[str] = (),
) -> str:
    """Return the table as text. People see `columns`; programs get all of the frame's.

    Columns are shown as the catalogue says, unless they are given with their fields. `view` may
    choose others. `essential` columns name the row together with the first: they stay in the table
    and are the last to be left out.
    """
    rows = frame if isinstance(frame, Rows) else Rows.of(frame)
    order, asked = view.order(rows.columns), view.names(rows.columns)
    if order is not None:
        rows = rows.sorted(order, is_descending=view.sort.startswith("-"))
    given = columns if isinstance(columns, Mapping) else {name: field_of(name) for name in columns}
    fields = {name: given.get(name) or field_of(name) for name in asked} if asked else given
    match how:
        case Format.json:
            names = asked or rows.columns
            records = [dict(zip(names, row, strict=True)) for row in rows.of_columns(names)]
            return json.dumps(records, indent=2, allow_nan=False, default=str)
        case Format.csv:
            return rows.csv(asked or rows.columns)
        case Format.markdown:
            rules = ("---:" if field.is_number else "---" for field in fields.values())
            lines = [
                "| " + " | ".join(field.heading for field in fields.values()) + " |",
                "|" + "|".join(rules) + "|",
            ]
            lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in _cells(rows, fields)]
            return "\n".join(lines)
        case Format.table:
            return _table(rows, fields, view, [*essential, *asked])


def as_records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows as plain values, unrounded; missing values are None, integers stay whole."""
    rows = Rows.of(frame)
    return [dict(zip(rows.columns, row, strict=True)) for row in rows.cells]


def _cells(rows: Rows, fields: Mapping[str, Field]) -> list[list[str]]:
    return [
        [
            "" if value is None else printable(field.cell(value))
            for field, value in zip(fields.values(), row, strict=True)
        ]
        for row in rows.of_columns(fields)
    ]


def escaped(cell: str) -> str:
    """Return text as a cell of a markdown table: one line, without HTML markup."""
    line = " ".join(cell.splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _table(rows: Rows, fields: Mapping[str, Field], view: View, kept: Sequence[str]) -> str:
    """Draw a table that fits the terminal, with what all rows share above it."""
    from rich.cells import cell_len, set_cell_size

    limit, cells = page_width(), _cells(rows, fields)
    texts = dict(zip(fields, map(list, zip(*cells, strict=True)), strict=True)) if cells else {}
    if "run_id" in texts:
        texts["run_id"] = [view.short_ids.get(run_id, run_id) for run_id in texts["run_id"]]
    essential = [next(iter(fields)), *kept]

    # A setting may part the rows just as one to its left does, which implies it.
    seen: set[tuple[int, ...]] = set()
    implied = set()
    for name in filter(SETTINGS.__contains__, texts):
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts[name]))}
        parts = tuple(numbers[text] for text in texts[name])
        if parts in seen:
            implied.add(name)
        seen.add(parts)

    # The importance of columns falls to the right, above that of all that is dispensable. Between
    # are settings in which the rows differ, which would look alike without them. A setting that
    # another one implies goes before all of these.
    columns = []
    for place, (name, shown) in enumerate(fields.items()):
        own = texts.get(name, [])
        rank = len(DISPENSABLE) + len(fields) - place
        if name in implied:
            rank = DISPENSABLE.index("commit")
        elif name in DISPENSABLE:
            is_varying = name in (*SETTINGS, *IDENTIFYING) and len(set(own)) > 1
            rank = len(DISPENSABLE) if is_varying else DISPENSABLE.index(name)
        widths, is_essential = tuple(map(cell_len, own)), name in essential
        columns.append(Column(name, shown.heading, widths, rank, not shown.is_number, is_essential))

    # What is equal in all rows is said once: figures only where the table has no room. Of a single
    # row it is the settings, where there is no room.
    def have_room(some: Sequence[Column]) -> bool:
        return len(fit(some, limit).columns) == len(some)

    optional = [column.name for column in columns if not column.is_essential]
    if len(cells) < 2:
        is_full = bool(cells) and not have_room(columns)
        shared = [name for name in optional if name in CIRCUMSTANCES and is_full]
    else:
        shared = [name for name in optional if len(set(texts[name])) == 1]
        settings = [name for name in shared if field_of(name).direction is Direction.neither]
        if have_room([column for column in columns if column.name not in settings]):
            empty = [name for name in shared if not texts[name][0]]
            shared = list(dict.fromkeys([*settings, *empty]))
    said = []
    for name in shared:
        if texts[name][0]:
            shown, value = fields[name], next(rows.of_columns([name]))[0]
            is_figure = bool(shown.digits) and not isinstance(value, str)
            text = printable(shown.text(value) if is_figure else shown.cell(value))
            is_clear = name in SPEAKING or (is_figure and shown.unit.is_in_label)
            said.append(text if is_clear else f"{shown.label} {text}")
    columns = [column for column in columns if column.name not in shared]
    layout = fit(columns, limit)
    left_out = []  # by the heading that a reader knows and the name that `--columns` takes
    for name in (column.name for column in columns if column not in layout.columns):
        label = fields[name].label
        is_same = label.lower().replace(" ", "_").replace("-", "_") == name
        left_out.append(name if is_same else f"{label} ({name})")
    note = f"no room for {', '.join(left_out)}; {view.remedy}" if left_out else ""

    def padded(text: str, width: int, is_number: bool) -> str:
        """A cell as wide as its column: on one line, and with an ellipsis where it is cut."""
        line = " ".join(text.splitlines())
        if cell_len(line) > width:
            return set_cell_size(line, width - 1) + _ELLIPSIS
        padding = " " * (width - cell_len(line))
        return padding + line if is_number else line + padding

    headings = [
        textwrap.wrap(column.heading, width, break_on_hyphens=False)
        for column, width in zip(layout.columns, layout.widths, strict=True)
    ]
    depth = max(map(len, headings))
    aligned = [[""] * (depth - len(lines)) + lines for lines in headings]
    body = zip(*(texts.get(column.name, ()) for column in layout.columns), strict=True)
    sides = [fields[column.name].is_number for column in layout.columns]
    lines = [
        (" " * layout.gap).join(map(padded, row, layout.widths, sides)).rstrip()
        for row in (*zip(*aligned, strict=True), *body)
    ]
    lines.insert(depth, "─" * (layout.total - layout.gap - 1))
    drawn = "\n".join(f" {line}" for line in lines)
    caption, below = (
        textwrap.fill(text, limit, initial_indent=" ", subsequent_indent=" ")
        for text in (", ".join(said), note)
    )
    return "\n".join(part for part in (caption, drawn, below) if part)


def page_width() -> int:
    """The columns of the terminal, or of a page where there is none."""
    if not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR"):
        return PAGE_WIDTH  # without what rich takes to be imported
    from rich.console import Console

    console = Console(highlight=False)
    return console.width if console.is_terminal else PAGE_WIDTH


def facts(values: Mapping[str, object], how: Format) -> str:
    """Render facts by their names, one per line; in a table, long values take several."""
    if how is Format.json:
        return json.dumps(values, indent=2, allow_nan=False)
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    if how is not Format.table:
        import pandas as pd

        frame = pd.DataFrame({"key": list(texts), "value": list(texts.values())})
        return render(frame, how, ["key", "value"])
    widest = max((len(key) for key in texts), default=0)
    room = max(page_width() - widest - 4, _LEAST_VALUE)
    lines = []
    for key, text in texts.items():
        parts = [
            part
            for line in printable(text).splitlines()
            for part in textwrap.wrap(line, room, break_on_hyphens=False, drop_whitespace=False)
            or [""]
        ]
        names = [key, *[""] * (len(parts) - 1)]
        lines += [
            f" {name:<{widest}}   {part}".rstrip()
            for name, part in zip(names, parts or [""], strict=True)
        ]
    return "\n".join(lines)
