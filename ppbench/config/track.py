"""What a sweep says of its history: `[track]`. None of it is part of a case.

    [track]
    repo   = ".."                       # whose commits are measured; beside this: around the file
    setup  = "make -C csrc"             # run in the work tree of a commit before it is measured
    accept = "accept.toml"              # changes that are intended

    [track.thresholds]                  # what `ppbench check` lets pass; the last that fits
    default = "2%"
    "schedule=zb_h1 and world_size=4" = "5%"

Paths are relative to the sweep file: they do not depend on where a command is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ppbench.config.case import Case, Measure
from ppbench.config.selection import AND, Only, parse_only
from ppbench.errors import UsageError

DEFAULT = "default"
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """How much worse a figure of some cases may get: 0.02 is 2 %."""

    only: Only
    fraction: float


@dataclass(frozen=True)
class Track:
    """`[track]`, its paths resolved."""

    repo: Path = Path()  # any folder in its work tree
    accept: Path | None = None
    setup: str = ""
    thresholds: tuple[Threshold, ...] = ()

    def threshold_of(self, case: Case, measure: Measure, default: float) -> float:
        """The last that fits the case; `default` where none does."""
        fitting = [one.fraction for one in self.thresholds if one.only.matches(case, measure)]
        return fitting[-1] if fitting else default


def read_fraction(value: object, most: float = 1.0) -> float:
    """`"2%"` or 0.02. Raises ValueError for what is neither, or not between 0 and `most`."""
    if isinstance(value, str) and (found := _PERCENT.fullmatch(value)):
        value = float(found[1]) / 100
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f'expected a share such as "2%" or 0.02, between 0 and {100 * most:.0f} %')
    return float(value)


def read_threshold(key: str, value: object) -> Threshold:
    """`default`, or conditions on cases as in `schedule=1f1b and world_size=4`.

    Raises ValueError that says what is wrong.
    """
    try:
        only = parse_only([] if key == DEFAULT else AND.split(key))
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--only ")) from None
    return Threshold(only, read_fraction(value))
