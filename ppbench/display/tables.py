"""Tables as text, in the four formats that every listing takes.

`table` and `markdown` are for people: chosen columns, figures in their usual units. `json` and
`csv` are for programs: every column, raw, under the store's own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppbench.display.fields import FIELDS, Field, field_of
from ppbench.display.formats import Format
from ppbench.errors import printable

if TYPE_CHECKING:  # pandas and rich are imported when something is rendered
    import pandas as pd
    from rich.console import JustifyMethod

_GAP = 3
_UNBOUNDED = 10_000


def render(
    frame: pd.DataFrame, how: Format, columns: list[str], fields: Mapping[str, Field] = FIELDS
) -> str:
    """The table as text. `columns` are those that people see; programs get all of them.

    `fields` say how people see a column; one without a field is written as it is.
    """
    match how:
        case Format.json:
            return json.dumps(as_records(frame), indent=2, allow_nan=False)
        case Format.csv:
            return frame.to_csv(index=False).rstrip("\n")
        case Format.markdown:
            return _markdown(frame, _fields_of(columns, fields))
        case Format.table:
            return _table(frame, _fields_of(columns, fields))


def as_records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Rows as plain values, unrounded; missing ones are None, whole numbers stay whole."""
    plain = frame.convert_dtypes()
    rows = plain.astype(object).where(plain.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def _fields_of(columns: list[str], fields: Mapping[str, Field]) -> dict[str, Field]:
    return {column: field_of(column, fields) for column in columns}


def _cells(frame: pd.DataFrame, fields: Mapping[str, Field]) -> list[list[str]]:
    import pandas as pd

    return [
        [
            "" if pd.isna(value) else printable(field.write(value))
            for field, value in zip(fields.values(), row, strict=True)
        ]
        for row in frame[list(fields)].itertuples(index=False)
    ]


def _markdown(frame: pd.DataFrame, fields: Mapping[str, Field]) -> str:
    lines = [
        "| " + " | ".join(field.heading for field in fields.values()) + " |",
        "|" + "|".join("---:" if field.is_number else "---" for field in fields.values()) + "|",
    ]
    lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in _cells(frame, fields)]
    return "\n".join(lines)


def escaped(cell: str) -> str:
    """Text for a cell of a markdown table: one line, and no markup of HTML."""
    line = " ".join(cell.splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _table(frame: pd.DataFrame, fields: Mapping[str, Field]) -> str:
    """Headings may wrap; cells never do, even if the terminal is too narrow and wraps the line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = _cells(frame, fields)
    needed = 0
    for position, field in enumerate(fields.values()):
        words = [*(row[position] for row in cells), *field.heading.split()]
        width = max(map(len, words), default=0)
        side: JustifyMethod = "right" if field.is_number else "left"
        table.add_column(field.heading, justify=side, min_width=width)
        needed += width + _GAP
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    # A file or a pipe has no edge.
    width = max(console.width, needed) if console.is_terminal else _UNBOUNDED
    console = Console(highlight=False, width=width)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(line for line in lines if line)


def facts(values: dict[str, object], how: Format) -> str:
    """One thing's facts, a line each."""
    if how is Format.json:
        return json.dumps(values, indent=2, allow_nan=False)
    import pandas as pd

    frame = pd.DataFrame({"key": list(values), "value": [_plain(v) for v in values.values()]})
    return render(frame, how, ["key", "value"])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
