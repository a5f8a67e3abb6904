"""Conditions on cases and on stored runs, in options and in tables of a sweep file.

    schedule=1f1b and world_size>=4                  in a line
    {schedule = ["1f1b", "afab"], world_size = 4}    in a table of a sweep file; a list: any of them

Values are compared as a case has them: aliases are resolved, `device = "auto"` is the device of
this machine, `stages_per_rank = "auto"` is the schedule's own number.
"""

from __future__ import annotations

import functools
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.plan.schedules.registry import CSV_PREFIX, find_schedule
from ppbench.config.case import CASE_KEYS, SETTINGS, Planned, setting_of
from ppbench.config.kinds import AUTO
from ppbench.config.toml import (
    as_toml,
    brief,
    column_named,
    cut,
    nearest_key,
    printable,
    quoted,
    setting_named,
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
_OR = re.compile(r"[^\"'\[]*\sor\s.*[=<>]", re.IGNORECASE | re.DOTALL)
_FORM = 'give KEY=VALUE, or !=, <, <=, >, >= in its place; join several with " and "'
_SETTINGS_OF_CASES = {column_named(key) for key in CASE_KEYS}


@dataclass(frozen=True)
class Condition:
    """A comparison of a setting, or of a column of `runs`; of several values, any may be equal."""

    key: str
    operator: str
    values: tuple[Any, ...]  # None is null, which only a stored run has

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot be compared so."""
        if not self.values:
            raise ValueError("is empty; expected a value, or a list of them")
        is_text_ordered = column_named(self.key) not in _SETTINGS_OF_CASES  # as ids of runs are
        for value in () if self.operator in ("=", "!=") else self.values:
            if not (type(value) in (int, float) or (type(value) is str and is_text_ordered)):
                word = "null" if value is None else brief(value)
                raise ValueError(f"{word} has no order; compare it with = or !=")

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
        """Return the text from which this condition is read."""
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
            matching = tuple(case for case in left if Conditions((condition,)).matches(case))
            if not matching:
                values = (setting_of(*case, condition.key) for case in left)
                raise UsageError(f"--only {none_has('case', self.each[: position + 1], values)}")
            left = matching
        return left

    def __str__(self) -> str:
        return " and ".join(map(str, self.each))


EVERYTHING = Conditions()


def none_has(what: str, each: Sequence[Condition], values: Iterable[object]) -> str:
    """Say that nothing meets the last condition, of what meets the others and has these values."""
    *others, last = each
    known = list(dict.fromkeys(values))
    more = f", ... ({len(known):,} values)" if len(known) > MAX_LISTED else ""
    shown = ", ".join(map(brief, known[:MAX_LISTED])) + more
    numbers = [value for value in known if isinstance(value, int | float)]
    if last.operator not in ("=", "!=") and len(numbers) > 1:
        shown = f"{min(numbers)} to {max(numbers)}"
    among = f" of those with {' and '.join(map(str, others))}" if others else ""
    return f"{cut(str(last))}: no {what}{among} has this value; its values are {shown}"


def parse_conditions(
    texts: Iterable[str], read: Callable[[str, str], tuple[str, Iterable[Any]]]
) -> tuple[Condition, ...]:
    """Parse texts of one condition, or of several joined by an `and` outside quotes and brackets.

    `read` returns the key that a word means, and the values that are written for it. Equalities of
    one key are alternatives. Raises ValueError, as `read` may.
    """
    found: dict[object, Condition] = {}
    for text in texts:
        parts = [""]
        for word in _WORD.findall(text):
            if word.strip().lower() == "and":
                parts.append("")
            else:
                parts[-1] += word
        for part in parts:
            if (match := _ONE.fullmatch(part)) is None:
                raise ValueError(f"cannot read {quoted(cut(part))}; {_FORM}")
            if _OR.match(match[3]):
                raise ValueError(
                    f'cannot read {quoted(cut(part))}; all must hold, joined with " and "; '
                    "KEY=[VALUE, VALUE] is any of these values"
                )
            sign = match[2].replace("==", "=")
            key, values = read(match[1], match[3])
            one = Condition(key, sign, tuple(values))
            if sign != "=":
                found[one] = one
            else:
                before = found[key].values if key in found else ()
                found[key] = Condition(key, sign, (*before, *one.values))
    return tuple(found.values())


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
    elements = SETTINGS[key].kind.elements
    is_one = bool(elements) and all(isinstance(inner, elements) for inner in value)
    return [value] if is_one else value


def checked_value(key: str, value: object) -> Any:
    """Check a single value, and resolve aliases. Raises ValueError with the allowed values."""
    return SETTINGS[key].kind.check(value)


def condition_on(key: str, value: object, device: str) -> Condition:
    """The condition that a setting is a value, or one of a list; `device` is what `auto` means.

    Raises ValueError.
    """
    return Condition(key, "=", _values_of(key, value, device))


def _values_of(key: str, value: object, device: str) -> tuple[Any, ...]:
    values = tuple(checked_value(key, one) for one in alternatives(key, value))
    return tuple(device if key == "device" and one == AUTO else one for one in values)


def read_conditions(texts: Iterable[str], device: str) -> Conditions:
    """Parse conditions on cases; `device` is what `auto` means. Raises ValueError."""

    def read(word: str, written: str) -> tuple[str, tuple[Any, ...]]:
        key = setting_named(word.removeprefix("grid."))
        if key not in CASE_KEYS:
            raise ValueError(f"unknown key {quoted(key)}{nearest_key(key, CASE_KEYS)}")
        return key, _values_of(key, toml_value(written), device)

    return Conditions(parse_conditions(texts, read))


def parse_only(texts: Iterable[str], device: str) -> Conditions:
    """Parse the values of `--only`. Raises UsageError."""
    texts = list(texts)
    try:
        return read_conditions(texts, device)
    except ValueError as error:
        raise UsageError(f"--only {cut(printable(' '.join(texts)))}: {error}") from None


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
    return (
        None if schedule.startswith(CSV_PREFIX) else find_schedule(schedule).stages_per_rank.default
    )


def conditions_of(planned: Planned, axes: Sequence[str]) -> list[str]:
    """The conditions that this case alone meets, as `--only` takes them; `axes` are columns."""
    keys = [key for key in CASE_KEYS if column_named(key) in axes]
    return [f"{key}={as_written(setting_of(*planned, key))}" for key in keys]


def as_written(value: object) -> str:
    """A value as a condition has it: text without quotes where it needs none."""
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[\w.:/-]+", value) and toml_value(value) == value
        return value if is_plain else as_toml(value)
    if isinstance(value, tuple):  # one time stands for all stages
        is_number = len(value) == 1 and isinstance(value[0], float)
        return as_toml(value[0] if is_number else [value])
    return as_toml(value)
