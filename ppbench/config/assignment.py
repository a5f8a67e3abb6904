"""`KEY=VALUE` on the command line: a dotted key of the sweep file and a TOML value; and the check
of one value by itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from pydantic import ValidationError

from ppbench.config.locate import line_of_long_key
from ppbench.config.problems import cut, describe, nearest_key, printable, quoted
from ppbench.config.schema import SweepFile, known_keys
from ppbench.errors import UsageError

LISTS: dict[str, type | tuple[type, ...]] = {
    "model.partition": int,
    "model.split_points": str,
    "emulated.F_ms": (int, float),
    "emulated.I_ms": (int, float),
    "emulated.W_ms": (int, float),
    "emulated.link_ms": (int, float),
}
"""Settings that are lists themselves, and what their elements are."""


def parse_assignment(option: str, text: str, places: Sequence[str] = ()) -> tuple[str, object]:
    """`train.microbatch_size=2`; a value that is not TOML is taken as a string.

    The key may begin with `grid.`, but for those of `places`, which are allowed beside the keys of
    cases. `option` is where it was typed, for the message.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        problem = "expected KEY=VALUE, such as train.microbatch_size=2"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    bare, known = key.removeprefix("grid."), [*known_keys(), *places]
    if bare in places and bare != key:
        raise UsageError(f"{option} {cut(printable(text))}: {bare} is no axis; leave grid. out")
    if bare not in known:
        problem = f"unknown key {quoted(bare)}{nearest_key(bare, known)}"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    return key, _value_of(value)


def _value_of(text: str) -> object:
    """As TOML if it is one value and nothing else, or else as it stands."""
    assigned = f"value = {text}"
    try:
        parsed = {} if line_of_long_key(assigned) else tomllib.loads(assigned)
    except (ValueError, RecursionError):
        parsed = {}
    return parsed["value"] if len(parsed) == 1 else text.strip()


def is_list_of_values(key: str, value: object) -> bool:
    """Several lists are a list that holds more than a single list's elements."""
    if not isinstance(value, list):
        return False
    element = LISTS.get(key)
    return element is None or not all(isinstance(one, element) for one in value)


def checked_value(key: str, value: object) -> object:
    """A value as if it were set by itself, aliases resolved. Raises ValueError: what is allowed."""
    section, _, name = key.partition(".")
    trial = {"name": "x", section: {name: value} if name else value}
    try:
        settings = SweepFile.model_validate(trial).model_dump()
    except ValidationError as error:
        raise ValueError(describe(error.errors()[0], SweepFile)) from None
    return settings[section][name] if name else settings[section]
