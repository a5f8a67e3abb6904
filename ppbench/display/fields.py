"""How columns are shown, as `ppbench/store/columns.txt` declares it: heading, unit, direction.

Tables, pages, charts and exports take fields from here. JSON and CSV keep the store's own names
and raw values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ppbench.display.units import MEBIBYTES, NO_UNIT, UNITS, Unit, formatted, size, written
from ppbench.errors import first_line, shortened
from ppbench.store.columns import COMPUTED, SETTINGS, STAYS, TABLES


class Direction(Enum):
    """Which values of a figure are better."""

    higher = "higher"
    lower = "lower"
    neither = ""


@dataclass(frozen=True)
class Field:
    """How a column is shown. Without digits its values are written as they are."""

    label: str
    digits: str = ""
    unit: Unit = NO_UNIT
    direction: Direction = Direction.neither
    meaning: str = ""
    is_number: bool = False
    """Whether it is aligned like numbers, as one with digits or a unit is."""
    shorten: Callable[[object], str] = str

    def __post_init__(self) -> None:
        is_number = self.is_number or bool(self.digits) or self.unit is not NO_UNIT
        object.__setattr__(self, "is_number", is_number)

    @property
    def heading(self) -> str:
        """The label and the unit, unless every value is written with its unit."""
        return self.unit.heading(self.label)

    def cell(self, value: object) -> str:
        """Write a value for a column under `heading`; text stays as it is."""
        if not self.digits or isinstance(value, str):
            return self.shorten(value)
        text = formatted(value, self.digits, self.unit.factor)
        return f"{text} {self.unit.name}" if self.unit.is_in_cells else text

    def text(self, value: object) -> str:
        """Write a value with its unit, for a sentence; sizes in MiB or GiB."""
        if self.unit == MEBIBYTES:
            return size(value)
        if not self.digits:
            return written(value, ",.5g")
        return written(value, self.digits, self.unit.name, self.unit.factor)


def _first(length: int) -> Callable[[object], str]:
    return lambda value: str(value)[:length]


def _at_most(length: int) -> Callable[[object], str]:
    return lambda value: shortened(first_line(value), length)


WORKLOAD = ("schedule", "world_size", "num_microbatches", "seq_len")
"""The settings that identify a run where no sweep file says which vary."""
OF_REPLICAS = (*WORKLOAD[:2], "replicas", "sharding_policy", *WORKLOAD[2:])
"""These settings where some runs have several replicas."""
_SHORTENED: dict[str, Callable[[object], str]] = {
    "created_at": lambda value: str(value)[:16].replace("T", " "),
    "error": _at_most(90),
    "commit": _first(9),
    "author_date": _first(10),
    "subject": _at_most(50),
    "is_outlier": lambda value: "outlier" if value else "",
}
_STORED = [column for columns in TABLES.values() for column in columns]
_EVERY = [*reversed(_STORED), *(column for columns in COMPUTED.values() for column in columns)]
FIELDS = {
    column.name: Field(
        column.heading,
        column.digits,
        UNITS[column.unit],
        Direction(column.better),
        column.meaning,
        column.is_number,
        _SHORTENED.get(column.name, str),
    )
    for column in _EVERY
}
"""How each column is shown; one of several tables, as the first of them declares it."""
DISPENSABLE = tuple(
    dict.fromkeys(
        column.name
        for column in sorted(_EVERY, key=lambda column: column.importance)
        if column.importance < STAYS
    )
)
"""Columns that a table leaves out first where it has no room, the least important first."""
IDENTIFYING = ("commit", "launch")
"""Columns that are none of the settings, and without which rows that differ would look alike."""
SPEAKING = ("schedule", "device", "model_preset", "status")
"""Columns whose values speak for themselves: they need no name where all rows share them."""
COMMIT_COLUMNS = ("author_date", "commit", "subject")
"""The columns that identify a commit in a table of commits."""
CIRCUMSTANCES = (*SETTINGS, "sweep_name", "status", "commit", "fingerprint", "created_at")
"""Columns that describe a run and are none of its figures."""


def field_of(column: str) -> Field:
    """Return the column's field; a column without one is text, headed by its name."""
    return FIELDS.get(column) or Field(column.replace("_", " "))


def figure(column: str, value: object) -> str:
    """Write a value of a column with its unit: `58.1 ms`, `920 tokens/s`, `1.20 GiB`."""
    return field_of(column).text(value)
