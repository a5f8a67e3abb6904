"""Conditions on runs, such as `schedule=1f1b and train.microbatch_size>=2`, and as SQL.

A key is a column of `runs` or a key of sweep files; a value has the type of the column.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.plan.schedules.registry import UnknownScheduleError, find_schedule
from ppbench.config.case import UNKNOWN, VARIABLE, Case
from ppbench.config.conditions import OPERATORS, split_conditions
from ppbench.config.synonyms import SYNONYMS, column_named
from ppbench.errors import UsageError
from ppbench.store.columns import RUNS
from ppbench.store.reader import quoted

Value = str | int | float | bool | None
_TYPES = {column.name: column.type for column in RUNS}
_LISTS = {name for name, value in vars(Case()).items() if isinstance(value, tuple)} | {
    "model_partition"
}


@dataclass(frozen=True)
class Condition:
    """A condition on a column of `runs`; `value` None means null."""

    column: str
    operator: str
    value: Value

    def __post_init__(self) -> None:
        assert self.column in _TYPES
        assert self.operator in OPERATORS

    @property
    def sql(self) -> str:
        """The condition in SQL: null equals only null, and has no order."""
        if self.column == "seq_len" and self.value in (VARIABLE, UNKNOWN):
            wanted = "true" if self.value == VARIABLE else "false"
            test = f"(seq_len IS NULL AND coalesce(is_seq_len_variable, false) = {wanted})"
            return test if self.operator == "=" else f"NOT {test}"
        if self.value is None:
            return f'"{self.column}" IS {"" if self.operator == "=" else "NOT "}NULL'
        operator = "IS DISTINCT FROM" if self.operator == "!=" else self.operator
        is_text = isinstance(self.value, str)
        value = quoted(self.value) if is_text else f"{self.value!r}"
        kind = "::DOUBLE" if isinstance(self.value, float) else ""
        return f'"{self.column}" {operator} {value}{kind}'


def read_conditions(texts: Sequence[str], option: str = "--where") -> tuple[Condition, ...]:
    """Parse texts of one condition, or of several joined with `and`. Raises UsageError."""
    try:
        written_ones = [one for text in texts for one in split_conditions(text)]
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    conditions = []
    for key, operator, written in written_ones:
        column = column_named(key)
        if column not in _TYPES:
            close = difflib.get_close_matches(column, [*_TYPES, *SYNONYMS], n=1, cutoff=0.5)
            hint = f'; did you mean "{close[0]}"?' if close else "."
            raise UsageError(
                f'{option}: unknown key "{key}"{hint} Known are the keys of sweep files, and the '
                "columns of runs that results/README.md lists"
            )
        value = _value_of(column, written, f"{option}: {key}")
        is_word = value is None or (column == "seq_len" and isinstance(value, str))
        if is_word and operator not in ("=", "!="):
            raise UsageError(f"{option}: {key}: {written} has no order; compare it with = or !=")
        conditions.append(Condition(column, operator, value))
    return tuple(conditions)


def _value_of(column: str, written: str, where: str) -> Value:
    """A value of a column's type; a text without quotes, a schedule's registered name."""
    if written == "null":
        return None
    kind = _TYPES[column]
    if column == "seq_len" and written in (VARIABLE, UNKNOWN):
        return written
    if kind == "bool":
        if written.lower() not in ("true", "false"):
            raise UsageError(f'{where}: expected true or false, got "{written}"')
        return written.lower() == "true"
    if kind != "string":
        with contextlib.suppress(ValueError):
            whole = int(written)
            if -(2**63) <= whole < 2**63:
                return whole
        with contextlib.suppress(ValueError):
            value = float(written)
            if math.isfinite(value):
                return value
        raise UsageError(f'{where}: expected a number, got "{written}"')
    if len(written) > 1 and written[0] == written[-1] and written[0] in "\"'":
        return written[1:-1]
    if column == "schedule":
        try:
            return find_schedule(written).name
        except UnknownScheduleError:
            return written  # csv:PATH, or a schedule of another version
    if column not in _LISTS:
        return written
    try:
        listed = json.loads(written)
    except ValueError:
        return written
    # As the store writes it; one number means a list of one, as in sweep files.
    values = listed if isinstance(listed, list) else [listed]
    is_time = column.endswith("_ms") and all(isinstance(value, int | float) for value in values)
    return json.dumps([float(value) for value in values] if is_time else values)


def all_of(conditions: Iterable[Condition]) -> str:
    """SQL for whether all conditions hold."""
    return " AND ".join(["true", *(condition.sql for condition in conditions)])
