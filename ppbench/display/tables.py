"""Tables as text, in the four formats that every listing takes.

`table` and `markdown` are for people: chosen columns, figures in their usual units. `json` and
`csv` are for programs: every column, raw, under the store's own names.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ppbench.display.fields import Field, field_of
from ppbench.display.formats import Format
from ppbench.errors import printable

if TYPE_CHECKING:  # pandas and rich are imported when something is rendered
    import pandas as pd
    from rich.console import JustifyMethod

PAGE_WIDTH = 100
"""Columns of text that a table in a file or a pipe fits, if its values allow."""
_GAPS = {3: (0, 1, 0, 1), 2: (0, 1, 0, 0)}  # between columns, and the padding that makes it
_MARGIN = 1


def render(frame: pd.DataFrame, how: Format, columns: Sequence[str] | Mapping[str, Field]) -> str:
    """Return the table as text. People see `columns`; programs get all of the frame's.

    Columns are shown as the catalogue says, unless they are given with their fields.
    """
    fields = columns if isinstance(columns, Mapping) else {name: field_of(name) for name in columns}
    match how:
        case Format.json:
            return json.dumps(as_records(frame), indent=2, allow_nan=False)
        case Format.csv:
            return frame.to_csv(index=False).rstrip("\n")
        case Format.markdown:
            return _markdown(frame, fields)
        case Format.table:
            return _table(frame, fields)


def as_records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows as plain values, unrounded; missing values are None, integers stay whole."""
    plain = frame.convert_dtypes()
    rows = plain.astype(object).where(plain.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def _cells(frame: pd.DataFrame, fields: Mapping[str, Field]) -> list[list[str]]:
    import pandas as pd

    return [
        [
            "" if pd.isna(value) else printable(field.cell(value))
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
    """Return text as a cell of a markdown table: one line, without HTML markup."""
    line = " ".join(cell.splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _table(frame: pd.DataFrame, fields: Mapping[str, Field]) -> str:
    """Draw a table that fits the terminal, or a page: headings wrap, columns move closer.

    Cells never wrap, even if they make the table wider.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = _cells(frame, fields)
    headings = [field.heading for field in fields.values()]
    filled = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    console = Console(highlight=False)
    limit = console.width if console.is_terminal else PAGE_WIDTH
    for gap in _GAPS:
        widths = _widths(headings, filled or [0] * len(headings), limit - gap * len(headings))
        total = _MARGIN + sum(widths) + gap * len(headings)
        if total <= limit:
            break
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=_GAPS[gap])
    for field, width in zip(fields.values(), widths, strict=True):
        side: JustifyMethod = "right" if field.is_number else "left"
        table.add_column(field.heading, justify=side, width=width, vertical="bottom")
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(highlight=False, width=total)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(line for line in lines if line)


def _widths(headings: Sequence[str], filled: Sequence[int], limit: int) -> list[int]:
    """Return widths that add up to the limit, if wrapping the longest headings achieves it.

    `filled` are the widths of the cells.
    """
    widths = [max(len(heading), width) for heading, width in zip(headings, filled, strict=True)]
    least = [
        max([width, *map(len, heading.split())])
        for heading, width in zip(headings, filled, strict=True)
    ]
    while _MARGIN + sum(widths) > limit and widths != least:
        place = max(range(len(widths)), key=lambda column: widths[column] - least[column])
        lines = textwrap.wrap(headings[place], max(widths[place] - 1, least[place]))
        widths[place] = max([least[place], *map(len, lines)])
    return widths


def facts(values: dict[str, object], how: Format) -> str:
    """Render facts by their names, one per line."""
    if how is Format.json:
        return json.dumps(values, indent=2, allow_nan=False)
    import pandas as pd

    frame = pd.DataFrame({"key": list(values), "value": [_plain(v) for v in values.values()]})
    return render(frame, how, ["key", "value"])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
