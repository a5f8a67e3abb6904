"""Validation errors in words: the value that was given, and what is allowed."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ppbench.errors import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
    dt.date: "a date",
    dt.time: "a time",
    dt.datetime: "a date and time",
}
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_BARE_KEY = re.compile(r"[A-Za-z0-9_.-]+")
MAX_SHOWN = 60


def shown(value: object) -> str:
    """A value as TOML would write it, with its type, cut to a readable length."""
    return f"{brief(value)} ({_TYPE_NAMES.get(type(value), 'a ' + type(value).__name__)})"


def brief(value: object) -> str:
    """A value as TOML would write it, on one line, cut to a readable length."""
    return cut(as_toml(value))


def as_toml(value: object) -> str:
    """A value as TOML on one line; `...` for a table too deep for Python to write."""
    try:
        return _written(value)
    except RecursionError:
        return "..."


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return quoted(value)
        case list() | tuple():
            return f"[{', '.join(map(_written, value))}]"
        case int() if abs(value) >= 10**MAX_SHOWN:  # too long to write in decimals
            return hex(value)
        case dict():
            return f"{{{', '.join(f'{key_text(k)} = {_written(v)}' for k, v in value.items())}}}"
        case _:
            return str(value)


def quoted(text: str) -> str:
    """Quote a text and escape what would break a line or control a terminal."""
    escaped = json.dumps(text, ensure_ascii=False)
    return printable(escaped)


def printable(text: str) -> str:
    """Escape what cannot be printed on one line."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def key_text(key: str) -> str:
    """A key, quoted where TOML requires it."""
    return key if _BARE_KEY.fullmatch(key) else quoted(key)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def describe(error: ErrorDetails, schema: type[BaseModel], others: Sequence[str] = ()) -> str:
    """One pydantic error as `problem; what is allowed`; `others` are keys not in the schema."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(str(error["loc"][-1]), value, _siblings(error["loc"], schema, others))
    if kind == "float_type" and type(value) is int:
        return f"{brief(value)} is out of range; no float is so large"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {shown(value)}"
    if kind == "literal_error":
        return _unknown_word(value, str(context["expected"]))
    if kind == "value_error":
        problem = str(context["error"])
        has_value = isinstance(value, str) and brief(value) in problem
        return problem if has_value else _got(problem, value)
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} may hold only letters, digits and . _ - (at most 100)"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{brief(value)} is out of range; must be {words} {_number(context[name])}"
    return _got(error["msg"], value)


def _got(problem: str, value: object) -> str:
    return f"{problem}; got {shown(value)}"


def _number(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else str(bound)


def unknown_key(key: str, value: object, known: Iterable[str]) -> str:
    return f"unknown key, set to {shown(value)}{nearest_key(key, known)}"


def nearest_key(key: str, known: Iterable[str]) -> str:
    """A hint like `nearest`'s, for dotted keys.

    A key of the same name in another section is the nearest, and only dotted keys of the same
    section are listed.
    """
    names = list(known)
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    namesake = next((name for name in names if name.rpartition(".")[2] == leaf), key)
    same = [name for name in names if name.startswith(f"{section}.")]
    sections = dict.fromkeys(f"{n.partition('.')[0]}.KEY" for n in names if "." in n)
    return nearest(namesake, names, same or [*(n for n in names if "." not in n), *sections])


def _unknown_word(value: object, expected: str) -> str:
    known = expected.replace("'", "").replace(" or ", ", ").split(", ")
    if isinstance(value, str):
        return f"unknown value {brief(value)}{nearest(value, known)}"
    return f"expected one of {', '.join(known)}, got {shown(value)}"


def _siblings(
    path: tuple[str | int, ...], schema: type[BaseModel], others: Sequence[str]
) -> list[str]:
    """The known keys of the section of an unknown one."""
    section: object = schema
    for step in path[:-1]:
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        section = section.model_fields[str(step)].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    return [*section.model_fields, *(others if section is schema else ())]
