"""A table of a document: the columns that people see of rows, figures in their usual units.

In a terminal it fits the width: what is equal in all rows is said once above it, ids are shortened
to what is unique, and what has no room is left out (`fitting`) and named below.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ppbench.console import note, width_of
from ppbench.display.fields import (
    CIRCUMSTANCES,
    DISPENSABLE,
    IDENTIFYING,
    SPEAKING,
    Direction,
    Field,
    field_of,
)
from ppbench.display.fitting import Column, Layout, fit
from ppbench.display.markup import escaped, fragment
from ppbench.display.rows import AS_IT_IS, Rows, View, Written, plain, text_of
from ppbench.display.units import MISSING
from ppbench.errors import printable
from ppbench.store.columns import SETTINGS

PAGE_WIDTH = 100
"""Columns of text in a file or a pipe, unless COLUMNS says how many."""
ALL_IN_MARKDOWN = "--format markdown shows all"
_ELLIPSIS = "…"
_HTML = """\
{% if searched %}<div class="tools">
<input type="search" id="find" placeholder="Find {{ searched }}" aria-label="Find {{ searched }}" \
autocomplete="off" spellcheck="false">
<span id="found" class="note" aria-live="polite"></span>
</div>
{% endif %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ name }}">
<table class="sortable">
<thead><tr>{% if details %}<td class="opening"></td>{% endif %}{% for one in fields %}\
<th scope="col"{% if one.is_number %} class="number"{% endif %}{% if one.meaning %} \
title="{{ one.meaning }}"{% endif %}>{{ one.heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}{% set number = loop.index0 %}\
<tr{% if cases %} data-cases="{{ cases[number] }}"{% endif %}>\
{% if details %}<td class="opening">{% if details[number] %}<button type="button" class="opener" \
aria-expanded="false" aria-controls="{{ details[number].name }}" \
aria-label="{{ details[number].label }}" title="Details"></button>{% endif %}</td>{% endif %}\
{% for cell in row %}<td{% if cell.kind %} class="{{ cell.kind }}"{% endif %}\
{% if cell.number is not none %} data-number="{{ cell.number }}"{% endif %}>\
{% if cell.link %}<a href="{{ cell.link }}">{{ cell.text }}</a>{% else %}{{ cell.text }}{% endif %}\
</td>\
{% endfor %}</tr>
{% if details and details[number] %}<tr class="detail" \
id="{{ details[number].name }}" hidden>\
<td colspan="{{ row | length + 1 }}"><div>{{ details[number].html | safe }}</div></td></tr>
{% endif %}{% endfor %}</tbody>
</table>
</div>"""
_LONG = 28
"""Characters from which on a cell of a page breaks its text."""
_COLORS = {"faster": "better", "slower": "worse"}  # of verdicts


class Detail(NamedTuple):
    """A page shows it below a row when that is opened."""

    name: str  # unique on its page
    label: str
    html: str


def page_width() -> int:
    """The columns of the terminal; elsewhere those that COLUMNS says, or of a page."""
    return width_of(sys.stdout) or PAGE_WIDTH


@dataclass(frozen=True)
class Table:
    """Some columns of rows; they are shown as the catalogue says, or as their fields do."""

    rows: Rows
    columns: Sequence[str] | Mapping[str, Field] = ()
    essential: Sequence[str] = ()
    """These name the row together with the first: they are the last to be left out."""
    usual: Mapping[str, object] = field(default_factory=dict)
    """Columns that are left out where every row has this value, or none."""
    short_ids: Callable[[Iterable[str]], Mapping[str, str]] | None = None
    """It shortens the ids of runs as a terminal shows them."""
    grouped: str = ""
    """A column that is named once for its rows; the lines of its text are one below the other."""
    most: int | None = None
    """Only so many rows are shown, the last ones."""
    remedy: str = "--columns shows them"
    """How to see the columns that have no room."""
    view: View = AS_IT_IS
    name: str = ""
    """A page calls it so."""
    cases: Sequence[str] = ()
    """The case of each row, by which a page's filters hide it."""
    details: Sequence[Detail | None] = ()
    """A page opens them below the rows."""
    searched: str = ""
    """What its rows are, as `runs`, if a page searches them; it does so in one table at most."""

    def _seen(self) -> tuple[Rows, dict[str, Field]]:
        """The rows as they are seen, and the fields of their columns."""
        newest = None if self.most is None else self.most + 1
        rows = self.rows.viewed(self.view, list(self.columns), newest)
        if self.most is not None and len(rows.cells) > self.most:
            note(f"the newest {self.most:,} are shown; --limit 0 lists all")
            rows = Rows(rows.columns, rows.cells[1:])
        if not self.view.columns:
            unusual = {
                name
                for name, own in self.usual.items()
                if any(value not in (None, own) for (value,) in rows.read([name]).cells)
            }
            rows = rows.read(n for n in rows.columns if n not in self.usual or n in unusual)
        own = self.columns if isinstance(self.columns, Mapping) else {}
        return rows, {name: own.get(name) or field_of(name) for name in rows.columns}

    def markdown(self) -> str:
        rows, fields = self._seen()
        rules = ("---:" if one.is_number else "---" for one in fields.values())
        lines = [
            "| " + " | ".join(one.heading for one in fields.values()) + " |",
            "|" + "|".join(rules) + "|",
        ]
        lines += [
            "| " + " | ".join(map(escaped, row)) + " |" for row in self._stacked(rows, fields)
        ]
        return "\n".join(lines)

    def html(self) -> str:
        """Write a table that a page's script sorts: it makes buttons of the headings."""
        rows, fields = self._seen()
        cells = []
        for row, texts in zip(rows.cells, _texts(rows, fields), strict=True):
            own = []
            for value, text, shown in zip(row, texts, fields.values(), strict=True):
                raw, seen = plain(value), MISSING if value is None else text
                color = _COLORS.get(str(raw), "") if isinstance(value, Written) else ""
                is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
                kinds = ["number"] * shown.is_number + ["long"] * (len(text) > _LONG)
                kind = " ".join(filter(None, [*kinds, color]))
                link = value.link if isinstance(value, Written) else ""
                number = raw if is_number else None
                own.append({"text": seen, "kind": kind, "number": number, "link": link})
            cells.append(own)
        return fragment(
            _HTML,
            name=self.name or "Table",
            fields=list(fields.values()),
            rows=cells,
            cases=self.cases,
            details=self.details,
            searched=self.searched,
        )

    def terminal(self) -> str:
        """Draw the table as wide as the terminal, with what all rows share above it."""
        rows, fields = self._seen()
        limit, cells = page_width(), self._stacked(rows, fields, in_lines=True)
        texts = dict(zip(fields, map(list, zip(*cells, strict=True)), strict=True)) if cells else {}
        if "run_id" in texts and self.short_ids is not None:
            short = self.short_ids(texts["run_id"])
            texts["run_id"] = [short.get(run_id, run_id) for run_id in texts["run_id"]]
        essential = {next(iter(fields)), *self.essential, *self.view.names(self.rows.columns)}
        columns = _weighed(fields, texts, essential)
        shared = _shared(columns, texts, len(cells), limit)
        said = []
        for name in shared:
            if texts[name][0]:
                shown, value = fields[name], rows.cells[0][rows.columns.index(name)]
                is_figure = bool(shown.digits) and not isinstance(value, str | Written)
                text = printable(shown.text(value) if is_figure else _cell(shown, value))
                is_clear = name in SPEAKING or (is_figure and shown.unit.is_in_label)
                said.append(text if is_clear else f"{shown.label} {text}")
        columns = [column for column in columns if column.name not in shared]
        layout = fit(columns, limit)
        left_out = []  # by the heading that a reader knows and the name that `--columns` takes
        for name in (column.name for column in columns if column not in layout.columns):
            label = fields[name].label
            is_same = label.lower().replace(" ", "_").replace("-", "_") == name
            left_out.append(name if is_same else f"{label} ({name})")
        caption, below = (
            textwrap.fill(text, limit, initial_indent=" ", subsequent_indent=" ")
            for text in (
                ", ".join(said),
                f"no room for {', '.join(left_out)}; {self.remedy}" if left_out else "",
            )
        )
        return "\n".join(filter(None, (caption, _drawn(layout, texts), below)))

    def _stacked(
        self, rows: Rows, fields: Mapping[str, Field], *, in_lines: bool = False
    ) -> list[list[str]]:
        """The cells as text; a group is named in its first row, or `in_lines` over its rows."""
        texts = _texts(rows, fields)
        if self.grouped not in rows.columns or self.view.sort:
            return texts
        place, stacked = rows.columns.index(self.grouped), []
        for name, group in groupby(texts, key=lambda row: row[place]):
            own = list(group)
            names = name.splitlines() if in_lines else [" ".join(name.splitlines())]
            own += [[""] * len(fields)] * (len(names) - len(own))
            for number, row in enumerate(own):
                stacked.append([*row])
                stacked[-1][place] = "".join(names[number : number + 1])
        return stacked


def _texts(rows: Rows, fields: Mapping[str, Field]) -> list[list[str]]:
    return [
        [
            "" if value is None else printable(_cell(shown, value))
            for shown, value in zip(fields.values(), row, strict=True)
        ]
        for row in rows.cells
    ]


def _cell(shown: Field, value: object) -> str:
    return shown.cell(text_of(value) if isinstance(value, list | tuple | dict | Written) else value)


def _weighed(
    fields: Mapping[str, Field], texts: Mapping[str, Sequence[str]], essential: Iterable[str]
) -> list[Column]:
    """The columns with their importance, which falls to the right.

    The dispensable ones are below all others. Between are settings in which the rows differ, which
    would look alike without them; but a setting may part the rows just as one to its left does,
    which implies it.
    """
    from rich.cells import cell_len

    seen: set[tuple[int, ...]] = set()
    columns = []
    for place, (name, shown) in enumerate(fields.items()):
        own = texts.get(name, [])
        rank = len(DISPENSABLE) + len(fields) - place
        if name in DISPENSABLE:
            is_varying = name in (*SETTINGS, *IDENTIFYING) and len(set(own)) > 1
            rank = len(DISPENSABLE) if is_varying else DISPENSABLE.index(name)
        if name in SETTINGS and name in texts:
            numbers = {text: number for number, text in enumerate(dict.fromkeys(own))}
            parts = tuple(numbers[text] for text in own)
            rank = DISPENSABLE.index("commit") if parts in seen else rank
            seen.add(parts)
        widths = tuple(map(cell_len, own))
        is_kept = name in essential
        columns.append(Column(name, shown.heading, widths, rank, not shown.is_number, is_kept))
    return columns


def _shared(
    columns: Sequence[Column], texts: Mapping[str, Sequence[str]], num_rows: int, limit: int
) -> list[str]:
    """Return what is said once: what all rows share, figures only where the table has no room.

    Of a single row it is the settings, where there is no room.
    """

    def have_room(some: Sequence[Column]) -> bool:
        return len(fit(some, limit).columns) == len(some)

    optional = [column.name for column in columns if not column.is_essential]
    if num_rows < 2:
        is_full = num_rows > 0 and not have_room(columns)
        return [name for name in optional if name in CIRCUMSTANCES and is_full]
    shared = [name for name in optional if len(set(texts[name])) == 1]
    settings = [name for name in shared if field_of(name).direction is Direction.neither]
    if have_room([column for column in columns if column.name not in settings]):
        empty = [name for name in shared if not texts[name][0]]
        return list(dict.fromkeys([*settings, *empty]))
    return shared


def _drawn(layout: Layout, texts: Mapping[str, Sequence[str]]) -> str:
    """The headings, a rule and a line for each row.

    rich would draw them too; its import takes longer than listing a store.
    """
    from rich.cells import cell_len, set_cell_size

    def padded(text: str, width: int, is_text: bool) -> str:
        """A cell as wide as its column: on one line, and with an ellipsis where it is cut."""
        line = " ".join(text.splitlines())
        if cell_len(line) > width:
            return set_cell_size(line, width - 1) + _ELLIPSIS
        padding = " " * (width - cell_len(line))
        return line + padding if is_text else padding + line

    headings = [
        textwrap.wrap(column.heading, width, break_on_hyphens=False)
        for column, width in zip(layout.columns, layout.widths, strict=True)
    ]
    depth = max(map(len, headings))
    aligned = [[""] * (depth - len(lines)) + lines for lines in headings]
    body = zip(*(texts.get(column.name, ()) for column in layout.columns), strict=True)
    sides = [column.is_text for column in layout.columns]
    lines = [
        (" " * layout.gap).join(map(padded, row, layout.widths, sides)).rstrip()
        for row in (*zip(*aligned, strict=True), *body)
    ]
    lines.insert(depth, "─" * (layout.total - layout.gap - 1))
    return "\n".join(f" {line}" for line in lines)
