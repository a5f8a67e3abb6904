"""`KEY=VALUE` on the command line: `--set` assigns a setting, `--only` selects cases.

The key is a dotted key of the sweep file, the value TOML.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from ppbench.config.case import Case, Measure, Planned, setting_of
from ppbench.config.messages import brief, cut, describe, nearest_key, printable, quoted
from ppbench.config.schema import SweepFile, known_keys
from ppbench.config.toml import line_of_long_key
from ppbench.errors import UsageError

MAX_LISTED = 20
AND = re.compile(r"\s+and\s+", re.IGNORECASE)
"""Separator of conditions in one line."""


@dataclass(frozen=True)
class Only:
    """Dotted keys with the values that a case may have; every key must hold."""

    allowed: tuple[tuple[str, tuple[object, ...]], ...]

    def matches(self, case: Case, measure: Measure) -> bool:
        return all(setting_of(case, measure, key) in values for key, values in self.allowed)

    def select(self, planned: Sequence[Planned]) -> tuple[Planned, ...]:
        """The cases that match. Raises UsageError with the existing values if none does."""
        left = tuple(planned)
        for position, (key, values) in enumerate(self.allowed):
            found = tuple(one for one in left if setting_of(*one, key) in values)
            if not found:
                raise UsageError(_none_left(left, self.allowed[: position + 1]))
            left = found
        return left


EVERYTHING = Only(())


def parse_only(texts: Sequence[str]) -> Only:
    """Parse conditions; a repeated key or a list of values means any of them.

    Raises UsageError for an unknown key or a value that it cannot have.
    """
    allowed: dict[str, list[object]] = {}
    for text in texts:
        key, value = parse_assignment("--only", text)
        key = key.removeprefix("grid.")
        if key == "name":
            raise UsageError(f"--only {cut(printable(text))}: not a setting of a case")
        listed = value if isinstance(value, list) and is_list_of_values(key, value) else [value]
        try:
            checked = [checked_value(key, one) for one in listed]
        except ValueError as error:
            raise UsageError(f"--only {cut(printable(text))}: {error}") from None
        allowed.setdefault(key, []).extend(checked)
    return Only(tuple((key, tuple(values)) for key, values in allowed.items()))


def _none_left(left: Sequence[Planned], allowed: Sequence[tuple[str, tuple[object, ...]]]) -> str:
    """The message when no case matches; `left` match all but the last key."""
    *others, (key, values) = allowed
    asked = ", ".join(brief(value) for value in values)
    there = list(dict.fromkeys(brief(setting_of(*one, key)) for one in left))
    more = f", ... ({len(there):,} values)" if len(there) > MAX_LISTED else ""
    among = f" of those with {_alternatives(others)}" if others else ""
    return (
        f"--only {key}={asked}: no case{among} has this value; "
        f"its values are {', '.join(there[:MAX_LISTED])}{more}"
    )


def _alternatives(allowed: Sequence[tuple[str, tuple[object, ...]]]) -> str:
    texts = [f"{key} = {' or '.join(map(brief, values))}" for key, values in allowed]
    return ", ".join(texts)


LISTS: dict[str, type | tuple[type, ...]] = {
    "model.partition": int,
    "model.split_points": str,
    "emulated.F_ms": (int, float),
    "emulated.I_ms": (int, float),
    "emulated.W_ms": (int, float),
    "emulated.link_ms": (int, float),
}
"""Settings that are lists themselves, and the types of their elements."""


def parse_assignment(option: str, text: str, places: Sequence[str] = ()) -> tuple[str, object]:
    """Parse `train.microbatch_size=2`; a value that is not TOML is a string.

    The key may begin with `grid.`, unless it is one of `places`, which are allowed beside the keys
    of cases. `option` is the command line's, for the message.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        problem = "expected KEY=VALUE, such as train.microbatch_size=2"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    bare, known = key.removeprefix("grid."), [*known_keys(), *places]
    if bare in places and bare != key:
        raise UsageError(f"{option} {cut(printable(text))}: {bare} cannot be an axis; drop grid.")
    if bare not in known:
        problem = f"unknown key {quoted(bare)}{nearest_key(bare, known)}"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    return key, _value_of(value)


def _value_of(text: str) -> object:
    """The TOML value if the text is exactly one, else the text itself."""
    assigned = f"value = {text}"
    try:
        parsed = {} if line_of_long_key(assigned) else tomllib.loads(assigned)
    except (ValueError, RecursionError):
        parsed = {}
    return parsed["value"] if len(parsed) == 1 else text.strip()


def is_list_of_values(key: str, value: object) -> bool:
    """Whether a value lists several values of a key, which may be lists themselves."""
    if not isinstance(value, list):
        return False
    element = LISTS.get(key)
    return element is None or not all(isinstance(one, element) for one in value)


def checked_value(key: str, value: object) -> object:
    """Check a single value, aliases resolved. Raises ValueError with what is allowed."""
    section, _, name = key.partition(".")
    trial = {"name": "x", section: {name: value} if name else value}
    try:
        settings = SweepFile.model_validate(trial).model_dump()
    except ValidationError as error:
        raise ValueError(describe(error.errors()[0], SweepFile)) from None
    return settings[section][name] if name else settings[section]
