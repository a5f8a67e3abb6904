"""The tables of the store and their columns, which `columns.txt` declares: one line for each.

Tables, headings, pages and the reference of columns follow from that file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppbench.config.case import Case, Measure, settings_in
from ppbench.config.toml import column_named

SCHEMA_VERSION = 1
"""Version of the columns; a store of another version is not read."""
RUN_ID = "run_id"
IMPORTED, ATTACHED = "imported", "attached"
"""Origins of runs that no sweep has made."""
SQL_TYPES = {
    "string": "VARCHAR",
    "int64": "BIGINT",
    "int32": "INTEGER",
    "double": "DOUBLE",
    "bool": "BOOLEAN",
}
"""The types of stored columns, as SQL names them."""
STAYS = 1000
"""The importance of a column that leaves no table."""


@dataclass(frozen=True)
class Column:
    """A line of `columns.txt`, which says what each cell is."""

    name: str
    type: str
    heading: str
    digits: str
    unit: str
    better: str
    importance: int
    meaning: str

    @property
    def is_number(self) -> bool:
        return self.type not in ("string", "bool", "text")


_SETTINGS_OF = "settings of "
_OWNERS = {"Case": Case, "Measure": Measure}
_TYPES = {bool: "bool", int: "int64", float: "double"}


def _declared() -> dict[str, tuple[Column, ...]]:
    """The columns of each section. A setting is typed as its default; text, if it is no number."""
    sections: dict[str, tuple[Column, ...]] = {}
    looks: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("columns.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            sections[section] = ()
        elif line.startswith(_SETTINGS_OF):
            owner = _OWNERS[line.removeprefix(_SETTINGS_OF)]
            for declared in settings_in(owner):
                kind = _TYPES.get(type(getattr(owner(), declared.field)), "string")
                row = [column_named(declared.key), kind, declared.meaning]
                sections[section] += (_column(row, [""] * 5, looks),)
        elif line and not line.startswith("#"):
            name, kind, *look, meaning = (cell.strip() for cell in line.split("|"))
            sections[section] += (_column([name, kind, meaning], look, looks),)
    return sections


def _column(row: list[str], look: list[str], looks: dict[str, list[str]]) -> Column:
    """A column that looks as its line says, or as one of that name did before."""
    name, kind, meaning = row
    heading, digits, unit, better, importance = looks.setdefault(name, look)
    if any(look):
        heading, digits, unit, better, importance = look
    words = heading or name.replace("_", " ")
    return Column(name, kind, words, digits, unit, better, int(importance or STAYS), meaning)


_SECTIONS = _declared()
SETTINGS = tuple(column.name for column in _SECTIONS.pop("settings"))
"""The settings that are shown as columns."""
TABLES = {name: columns for name, columns in _SECTIONS.items() if name.isalpha()}
COMPUTED = {title: columns for title, columns in _SECTIONS.items() if title not in TABLES}
"""Columns that commands compute, by the command that shows them."""
RUNS, SPANS, FLIGHT = TABLES["runs"], TABLES["spans"], TABLES["flight"]
