"""Conditions on cases: of `--only`, `[[exclude]]`, `[[override]]`, thresholds, accepted changes.

    schedule=1f1b and world_size>=4                  in a line
    {schedule = ["1f1b", "afab"], world_size = 4}    in a table of a sweep file; a list: any of them

Values are compared as a case has them: aliases are resolved, `device = "auto"` is the device of
this machine, `stages_per_rank = "auto"` is the schedule's own number.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from engine.plan.schedules.registry import CSV_PREFIX, find_schedule
from ppbench.config.case import CASE_KEYS, SETTINGS, Planned, setting_of
from ppbench.config.kinds import AUTO
from ppbench.config.synonyms import setting_named
from ppbench.config.toml import (
    as_toml,
    brief,
    cut,
    nearest_key,
    printable,
    quoted,
)
from ppbench.errors import UsageError

OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MAX_LISTED = 20
_WORD = re.compile(r"""\s+and\s+|"[^"]*"|'[^']*'|\[[^\]]*\]|.""", re.IGNORECASE | re.DOTALL)
_ONE = re.compile(r"\s*([^\s=!<>]+)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
FORM: Final = 'give KEY=VALUE, or !=, <, <=, >, >= in its place; join several with " and "'


class Words(NamedTuple):
    """One condition as it is written."""

    key: str
    operator: str
    value: str


def split_conditions(text: str) -> list[Words]:
    """Split a text at each `and` outside quotes and brackets. Raises ValueError."""
    parts = [""]
    for word in _WORD.findall(text):
        if word.strip().lower() == "and":
            parts.append("")
        else:
            parts[-1] += word
    found = []
    for part in parts:
        if (match := _ONE.fullmatch(part)) is None:
            raise ValueError(f"cannot read {quoted(cut(part))}; {FORM}")
        found.append(Words(match[1], match[2].replace("==", "="), match[3]))
    return found


def toml_value(written: str) -> object:
    """A TOML value; a text that is none is a string."""
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):
        parsed = {}
    return parsed["value"] if len(parsed) == 1 else written.strip()


def alternatives(key: str, value: object) -> list[object]:
    """The values that a list names; one value, which may be a list itself, is alone."""
    if not isinstance(value, list):
        return [value]
    kind = SETTINGS[key].kind
    elements = () if kind is None else kind.elements
    is_one = bool(elements) and all(isinstance(inner, elements) for inner in value)
    return [value] if is_one else value


def checked_value(key: str, value: object) -> Any:
    """Check a single value, and resolve aliases. Raises ValueError with the allowed values."""
    kind = SETTINGS[key].kind
    assert kind is not None
    return kind.check(value)


def parse_assignment(
    option: str, text: str, keys: Sequence[str] = CASE_KEYS
) -> tuple[str, Any, bool]:
    """Parse `train.microbatch_size=2`: key, value, and whether it is an axis by `grid.` before it.

    A value that is not TOML is a string. `option` names the option in the message. Raises
    UsageError.
    """
    word, separator, written = text.partition("=")
    word = word.strip()
    key = setting_named(word.removeprefix("grid."))
    problem = ""
    if not separator or not word:
        problem = "expected KEY=VALUE, such as train.microbatch_size=2"
    elif key not in keys:
        problem = f"unknown key {quoted(key)}{nearest_key(key, keys)}"
    elif word.startswith("grid.") and (reason := SETTINGS[key].shared):
        problem = f"{key} cannot be an axis: {reason}; drop grid."
    if problem:
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    return key, toml_value(written), word.startswith("grid.")


@functools.cache
def stages_of(schedule: str) -> int | None:
    """The stages of a rank that `stages_per_rank = "auto"` means; None for a program file."""
    if schedule == AUTO:
        return 1
    if schedule.startswith(CSV_PREFIX):
        return None
    return find_schedule(schedule).stages_per_rank.default


@dataclass(frozen=True)
class Condition:
    """A comparison of a setting; with several values, any of them may hold."""

    key: str
    operator: str
    values: tuple[Any, ...]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the setting, of which a function has the value, meets the condition."""
        found, compare = value_of(self.key), OPERATORS[self.operator]
        values: Iterable[Any] = self.values
        if self.key == "stages_per_rank" and AUTO in self.values:
            own = stages_of(value_of("schedule"))
            values = [(found if own is None else own) if one == AUTO else one for one in values]
        if self.operator in ("=", "!="):
            return (found in values) is (self.operator == "=")
        is_number = type(found) in (int, float)  # not a length that is "variable"
        return is_number and all(compare(found, one) for one in values)

    def __str__(self) -> str:
        """As `read_conditions` takes it."""
        is_one = len(self.values) == 1
        value = as_written(self.values[0]) if is_one else as_toml(self.values)
        return f"{self.key}{self.operator}{value}"


@dataclass(frozen=True)
class Conditions:
    """Conditions that must all hold."""

    each: tuple[Condition, ...] = ()

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        return all(condition.holds(value_of) for condition in self.each)

    def matches(self, planned: Planned) -> bool:
        return self.holds(functools.partial(setting_of, *planned))

    def select(self, planned: Sequence[Planned]) -> tuple[Planned, ...]:
        """The cases that match. Raises UsageError with the existing values if none does."""
        left = tuple(planned)
        for position, condition in enumerate(self.each):
            alone = Conditions((condition,))
            matching = tuple(case for case in left if alone.matches(case))
            if not matching:
                known = dict.fromkeys(brief(setting_of(*case, condition.key)) for case in left)
                more = f", ... ({len(known):,} values)" if len(known) > MAX_LISTED else ""
                met = " and ".join(map(str, self.each[:position]))
                among = f" of those with {met}" if met else ""
                raise UsageError(
                    f"--only {cut(str(condition))}: no case{among} has this value; "
                    f"its values are {', '.join([*known][:MAX_LISTED])}{more}"
                )
            left = matching
        return left

    def __str__(self) -> str:
        return " and ".join(map(str, self.each))


EVERYTHING = Conditions()


def condition_of(key: str, sign: str, value: object, device: str) -> Condition:
    """Check the values of a condition; `device` is what `auto` means. Raises ValueError."""
    values = tuple(checked_value(key, one) for one in alternatives(key, value))
    if not values:
        raise ValueError("is empty; expected a value, or a list of them")
    if sign not in ("=", "!=") and not all(type(one) in (int, float) for one in values):
        raise ValueError(f"{brief(value)} has no order; compare it with = or !=")
    if key == "device":
        values = tuple(device if one == AUTO else one for one in values)
    return Condition(key, sign, values)


def read_conditions(texts: Iterable[str], device: str) -> Conditions:
    """Parse conditions; equalities of one key are alternatives. Raises ValueError."""
    found: list[Condition] = []
    for word, sign, written in itertools.chain.from_iterable(map(split_conditions, texts)):
        key = setting_named(word.removeprefix("grid."))
        if key not in CASE_KEYS:
            raise ValueError(f"unknown key {quoted(key)}{nearest_key(key, CASE_KEYS)}")
        found.append(condition_of(key, sign, toml_value(written), device))
    equal: dict[str, Condition] = {}
    for one in found:
        if one.operator == "=":
            before = equal[one.key].values if one.key in equal else ()
            equal[one.key] = Condition(one.key, "=", (*before, *one.values))
    return Conditions((*equal.values(), *(one for one in found if one.operator != "=")))


def parse_only(texts: Iterable[str], device: str) -> Conditions:
    """Parse the values of `--only`. Raises UsageError."""
    texts = list(texts)
    try:
        return read_conditions(texts, device)
    except ValueError as error:
        raise UsageError(f"--only {cut(printable(' '.join(texts)))}: {error}") from None


def conditions_of(planned: Planned, axes: Sequence[str]) -> list[str]:
    """The conditions that this case alone meets, as `--only` takes them; `axes` are columns."""
    keys = [key for key in CASE_KEYS if key.replace(".", "_") in axes]
    values = {key: setting_of(*planned, key) for key in keys}
    return [f"{key}={as_written(value)}" for key, value in values.items()]


def as_written(value: object) -> str:
    """A value as a condition has it: text without quotes where it needs none."""
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[\w.:/-]+", value) and toml_value(value) == value
        return value if is_plain else as_toml(value)
    if isinstance(value, tuple):  # one time stands for all stages
        is_number = len(value) == 1 and isinstance(value[0], float)
        return as_toml(value[0] if is_number else [value])
    return as_toml(value)
