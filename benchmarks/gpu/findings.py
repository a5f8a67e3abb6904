"""A finding: a figure, the bound that it is to keep, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.outcome import number


class Verdict(StrEnum):
    """Whether a figure keeps its bound."""

    HELD = "held"
    MISSED = "missed"
    NOT_DECIDED = "not decided"  # the figure is not known well enough, or has nothing to be held to
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Bound:
    """The values that a figure may have."""

    at_least: float | None = None
    at_most: float | None = None

    def judge(self, value: float, error: float = 0.0) -> Verdict:
        """Not decided where the value is known to within `error` only, and a bound is in there."""
        low, high = value - error, value + error
        if self._is_kept(low) and self._is_kept(high):
            return Verdict.HELD
        is_beyond = (self.at_least is not None and high < self.at_least) or (
            self.at_most is not None and low > self.at_most
        )
        return Verdict.MISSED if is_beyond or error == 0 or value != value else Verdict.NOT_DECIDED  # noqa: PLR0124  # NaN

    def _is_kept(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        words = {"≥": self.at_least, "≤": self.at_most}
        return ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


@dataclass(frozen=True)
class Finding:
    """A line of the page."""

    check: str
    name: str
    verdict: Verdict
    value: float | None = None
    unit: str = ""
    error: float = 0.0
    bound: Bound | None = None
    note: str = ""

    @classmethod
    def of(
        cls,
        check: str,
        name: str,
        value: float,
        bound: Bound | None,
        *,
        unit: str = "",
        error: float = 0.0,
        note: str = "",
    ) -> Finding:
        """A figure held to its bound; without a bound nothing is decided."""
        verdict = Verdict.NOT_DECIDED if bound is None else bound.judge(value, error)
        return cls(check, name, verdict, value, unit, error, bound, note)

    @classmethod
    def not_run(cls, check: str, why: str) -> Finding:
        return cls(check, check, Verdict.NOT_RUN, note=why)

    @classmethod
    def undecided(cls, check: str, name: str, why: str) -> Finding:
        return cls(check, name, Verdict.NOT_DECIDED, note=why)

    @property
    def amount(self) -> str:
        """The value with its error and unit; empty without one."""
        if self.value is None:
            return ""
        error = f" ± {number(self.error)}" if self.error else ""
        return f"{number(self.value)}{error} {self.unit}".rstrip()

    def in_words(self) -> str:
        """The finding as a line of a terminal."""
        bound = f"({self.bound})" if self.bound else ""
        words = [f"{self.check}: {self.name}:", self.amount, bound, self.verdict, self.note]
        return " ".join(filter(None, words))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of `dataclasses.asdict`."""
        bound = None if values["bound"] is None else Bound(**values["bound"])
        return cls(**{**values, "verdict": Verdict(values["verdict"]), "bound": bound})
