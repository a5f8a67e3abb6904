"""Validation errors in words: the value that was given, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
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
}
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def shown(value: object) -> str:
    """A value as TOML would write it, with its type, cut to a readable length."""
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = _text_of(value)
    return f"{_cut(text)} ({_TYPE_NAMES.get(type(value), 'a ' + type(value).__name__)})"


def _text_of(value: object) -> str:
    """Also of an integer too long, or a table too deep, for Python to write out."""
    try:
        return str(value)
    except (ValueError, RecursionError):
        return "..."


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def describe(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """One pydantic error as `problem; what is allowed`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(str(error["loc"][-1]), value, _siblings(error["loc"], schema))
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {shown(value)}"
    if kind == "literal_error":
        return _unknown_word(value, str(context["expected"]))
    if kind == "value_error":
        problem = str(context["error"])
        return problem if f'"{_text_of(value)}"' in problem else f"{problem}; got {shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} may hold only letters, digits and . _ - (at most 100)"
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "greater than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        return f"{_cut(_text_of(value))} is out of range; must be {words} {context[name]}"
    return f"{error['msg']}; got {shown(value)}"


def unknown_key(key: str, value: object, known: Iterable[str]) -> str:
    return f"unknown key, set to {shown(value)}{nearest(key, known)}"


def _unknown_word(value: object, expected: str) -> str:
    known = expected.replace("'", "").replace(" or ", ", ").split(", ")
    if isinstance(value, str):
        return f'unknown value "{value}"{nearest(value, known)}'
    return f"expected one of {', '.join(known)}, got {shown(value)}"


def _siblings(path: tuple[str | int, ...], schema: type[BaseModel]) -> list[str]:
    """The keys that are known where an unknown one stands."""
    section: object = schema
    for step in path[:-1]:
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        section = section.model_fields[str(step)].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    extra = ["grid", "exclude"] if section is schema else []
    return [*section.model_fields, *extra]
