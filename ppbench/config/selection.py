"""`--only KEY=VALUE`: which cases of a sweep are to be run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.config.assignment import checked_value, is_list_of_values, parse_assignment
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.problems import brief, cut, printable
from ppbench.errors import UsageError

Planned = tuple[Case, Measure]
MAX_LISTED = 20
AND = re.compile(r"\s+and\s+", re.IGNORECASE)
"""Between conditions that are written in one line."""


@dataclass(frozen=True)
class Only:
    """Dotted keys with the values that a case may have; every key must hold."""

    allowed: tuple[tuple[str, tuple[object, ...]], ...]

    def matches(self, case: Case, measure: Measure) -> bool:
        return all(setting_of(case, measure, key) in values for key, values in self.allowed)

    def select(self, planned: Sequence[Planned]) -> tuple[Planned, ...]:
        """The cases that match. Raises UsageError if none does, with the values that there are."""
        left = tuple(planned)
        for position, (key, values) in enumerate(self.allowed):
            found = tuple(one for one in left if setting_of(*one, key) in values)
            if not found:
                raise UsageError(_none_left(left, self.allowed[: position + 1]))
            left = found
        return left


EVERYTHING = Only(())


def parse_only(texts: Sequence[str]) -> Only:
    """One key several times means any of its values, as does a list of them.

    Raises UsageError for a key that is not known or a value that it cannot have.
    """
    allowed: dict[str, list[object]] = {}
    for text in texts:
        key, value = parse_assignment("--only", text)
        key = key.removeprefix("grid.")
        if key == "name":
            raise UsageError(
                f"--only {cut(printable(text))}: is no setting of a case; name a key of one"
            )
        listed = value if isinstance(value, list) and is_list_of_values(key, value) else [value]
        try:
            checked = [checked_value(key, one) for one in listed]
        except ValueError as error:
            raise UsageError(f"--only {cut(printable(text))}: {error}") from None
        allowed.setdefault(key, []).extend(checked)
    return Only(tuple((key, tuple(values)) for key, values in allowed.items()))


def _none_left(left: Sequence[Planned], allowed: Sequence[tuple[str, tuple[object, ...]]]) -> str:
    """`left` are the cases that all but the last key allow."""
    *others, (key, values) = allowed
    asked = ", ".join(brief(value) for value in values)
    there = list(dict.fromkeys(brief(setting_of(*one, key)) for one in left))
    more = f", ... ({len(there):,} values)" if len(there) > MAX_LISTED else ""
    among = f" of those with {_alternatives(others)}" if others else ""
    return (
        f"--only {key}={asked}: no case{among} has this; "
        f"{key} is {', '.join(there[:MAX_LISTED])}{more} in them"
    )


def _alternatives(allowed: Sequence[tuple[str, tuple[object, ...]]]) -> str:
    texts = [f"{key} = {' or '.join(map(brief, values))}" for key, values in allowed]
    return ", ".join(texts)
