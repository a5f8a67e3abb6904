"""The filters of a report: the values that each varying axis of the grid takes, and who has them.

A page filters by case: every chart's points, every table's rows and every list's entries say
which case they belong to, so one list of the cases serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from pandas.api.types import is_bool, is_number

from ppbench.config.case import UNKNOWN, VARIABLE
from ppbench.report.cases import Axes

NOT_GIVEN = "none"
_HEADINGS = {
    "world_size": "ranks",
    "num_microbatches": "microbatches",
    "seq_len": "seq len",
    "model_preset": "model",
}
_SHORT = 40  # characters of a value that a filter shows; the whole is told on hovering


@dataclass(frozen=True)
class Choice:
    """A value of an axis, as text, and how many cases have it."""

    text: str
    num_cases: int

    @property
    def shown(self) -> str:
        return self.text if len(self.text) <= _SHORT else f"{self.text[: _SHORT - 1]}…"


@dataclass(frozen=True)
class Filter:
    """An axis and all its values."""

    axis: str
    heading: str
    choices: tuple[Choice, ...]


def axis_heading(axis: str) -> str:
    """An axis above a column or beside its values."""
    return _HEADINGS.get(axis, axis.replace("_", " "))


def value_text(value: object) -> str:
    """A setting's bare value, its axis being named elsewhere."""
    if is_bool(value):
        return "yes" if value else "no"
    text = str(value)
    return NOT_GIVEN if text in ("[]", "None", "nan") else text


def filters(runs: pd.DataFrame, axes: Axes) -> list[Filter]:
    """A filter for every varying axis: numbers in their order, words in that of the runs."""
    cases = runs.drop_duplicates("case_id")
    return [Filter(axis, axis_heading(axis), _choices(cases[axis])) for axis in axes]


def case_list(runs: pd.DataFrame, axes: Axes) -> list[Mapping[str, object]]:
    """Every case with the text of its value on each axis, for the page's script."""
    cases = runs.drop_duplicates("case_id")
    return [
        {"case_id": str(case["case_id"]), "axes": {axis: value_text(case[axis]) for axis in axes}}
        for _, case in cases.iterrows()
    ]


def _choices(values: pd.Series) -> tuple[Choice, ...]:
    distinct = list(dict.fromkeys(values))
    if all(place_of(value) is not None for value in distinct):
        distinct.sort(key=lambda value: place_of(value) or 0.0)
    counts = values.map(value_text).value_counts()
    texts = dict.fromkeys(value_text(value) for value in distinct)
    return tuple(Choice(text, int(counts[text])) for text in texts)


def place_of(value: object) -> float | None:
    """What a setting sorts by, before all numbers if it varies; None for words."""
    if value in (VARIABLE, UNKNOWN):
        return 0.0
    return float(str(value)) if is_number(value) and not is_bool(value) else None
