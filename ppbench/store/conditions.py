"""Conditions on stored runs, such as `schedule=1f1b and train.microbatch_size>=2`, and as SQL.

A key is a column of `runs` or a key of sweep files; a value has the type of the column.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Callable, Iterable, Sequence

from ppbench.config.case import CASE_KEYS, SETTINGS, UNKNOWN, VARIABLE
from ppbench.config.conditions import Condition, alternatives, parse_conditions, toml_value
from ppbench.config.toml import SYNONYMS, brief, column_named
from ppbench.errors import UsageError
from ppbench.store.columns import RUNS
from ppbench.store.reader import quoted

Value = str | int | float | bool | None
_TYPES = {column.name: column.type for column in RUNS}
_WORDS = {"true": True, "false": False}
_KEYS = {column_named(key): key for key in CASE_KEYS}


def read_conditions(texts: Sequence[str], option: str = "--where") -> tuple[Condition, ...]:
    """Parse texts of one condition, or of several joined with `and`. Raises UsageError."""
    try:
        return parse_conditions(texts, _read)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _read(word: str, written: str) -> tuple[str, list[Value]]:
    """The column that a word means, and the values that are written for it."""
    column = column_named(word)
    if column not in _TYPES:
        close = difflib.get_close_matches(column, [*_TYPES, *SYNONYMS], n=1)
        hint = f'; did you mean "{close[0]}"?' if close else "."
        raise ValueError(
            f'unknown key "{word}"{hint} Known are the keys of sweep files, and the columns of '
            "the table runs; list these with: ppbench query 'DESCRIBE runs'"
        )
    is_text = _TYPES[column] == "string"
    if is_text and len(written) > 1 and written[0] == written[-1] and written[0] in "\"'":
        return column, [written[1:-1]]
    value = toml_value(written)
    if column in _KEYS:
        several = alternatives(_KEYS[column], value)
    else:  # a column of lists has them as JSON
        several = value if isinstance(value, list) else [value]
        if is_text and not all(isinstance(one, str) for one in several):
            several = [value]
    if is_text and not isinstance(value, list):
        several = [written if column not in _KEYS else value]
    return column, [_kept(word, column, one) for one in several]


def _kept(word: str, column: str, value: object) -> Value:
    """A value as the store has it. Raises ValueError for one that the column cannot have."""
    kind = _TYPES[column]
    if value == "null":
        return None
    if column == "seq_len" and value in (VARIABLE, UNKNOWN):
        return str(value)
    of_setting = SETTINGS[_KEYS[column]].kind if column in _KEYS else None
    is_number = kind != "string" and type(value) in (int, float)  # it would round a large one
    if of_setting is not None and not is_number:
        with contextlib.suppress(ValueError):  # a value of another version, or of another tool
            value = of_setting.check(value)
    if isinstance(value, list | tuple):
        value = json.dumps(value)
    if kind == "string":
        return str(value)
    if isinstance(value, str):  # as TOML does not write it
        written = value.lower()
        readings: Sequence[Callable[[str], object]] = (int, float)
        for reading in (_WORDS.__getitem__,) if kind == "bool" else readings:
            with contextlib.suppress(LookupError, ValueError):
                value = reading(written)
                break
    if kind == "bool" and type(value) is not bool:
        raise ValueError(f"{word}: expected true or false, got {brief(value)}")
    if kind != "bool":
        is_whole = type(value) is int and -(2**63) <= value < 2**63
        if not is_whole and not (type(value) is float and math.isfinite(value)):
            raise ValueError(f"{word}: expected a number, got {brief(value)}")
    assert isinstance(value, int | float)
    return value


def sql_of(condition: Condition) -> str:
    """A condition in SQL: null equals only null, and has no order."""
    column, is_equal = condition.key, condition.operator == "="
    assert column in _TYPES
    tests = []
    for value in condition.values:
        if column == "seq_len" and value in (VARIABLE, UNKNOWN):
            wanted = "true" if value == VARIABLE else "false"
            test = f"(seq_len IS NULL AND coalesce(is_seq_len_variable, false) = {wanted})"
            tests.append(test if is_equal else f"NOT {test}")
        elif value is None:
            tests.append(f'"{column}" IS {"" if is_equal else "NOT "}NULL')
        else:
            sign = "IS DISTINCT FROM" if condition.operator == "!=" else condition.operator
            written = quoted(value) if isinstance(value, str) else f"{value!r}"
            kind = "::DOUBLE" if isinstance(value, float) else ""
            tests.append(f'"{column}" {sign} {written}{kind}')
    return f"({(' OR ' if is_equal else ' AND ').join(tests)})"


def all_of(conditions: Iterable[Condition]) -> str:
    """SQL for whether all conditions hold."""
    return " AND ".join(["true", *map(sql_of, conditions)])
