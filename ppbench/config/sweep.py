"""A sweep: its cases, where they run, and the repository whose commits it tracks.

    [track]
    repo   = ".."                       # the repository that is tracked; default: the file's own
    setup  = "make -C csrc"             # run in the work tree of a commit before it is measured
    accept = "accept.toml"              # intended changes

    [track.thresholds]                  # changes that `ppbench check` lets pass; the last match
    wins default = "2%" "schedule=zb_h1 and world_size=4" = "5%"

Paths are relative to the sweep file, so they do not depend on the working directory. None of this
is part of a case, nor are `[launch.torchrun]` and `[launch.slurm]`: a run's environment says where
it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.model.descriptions import Facts, Identity
from ppbench.config.case import Case, Measure, Slurm, Torchrun
from ppbench.config.overrides import AND, Only, parse_only
from ppbench.errors import UsageError

DEFAULT = "default"
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """How much worse a figure of the matching cases may get: 0.02 is 2 %."""

    only: Only
    fraction: float


@dataclass(frozen=True)
class Track:
    """`[track]`, its paths resolved."""

    repo: Path = Path()  # a folder in its work tree
    accept: Path | None = None
    setup: str = ""
    thresholds: tuple[Threshold, ...] = ()

    def threshold_of(self, case: Case, measure: Measure, default: float) -> float:
        """The last threshold that matches the case, else `default`."""
        fitting = [one.fraction for one in self.thresholds if one.only.matches(case, measure)]
        return fitting[-1] if fitting else default


def read_fraction(value: object, most: float = 1.0) -> float:
    """Parse `"2%"` or 0.02. Raises ValueError unless it is between 0 and `most`."""
    if isinstance(value, str) and (found := _PERCENT.fullmatch(value)):
        value = float(found[1]) / 100
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        bounds = f"between 0 and {100 * most:.0f} %"
        raise ValueError(f'expected a fraction such as "2%" or 0.02, {bounds}')
    return float(value)


def read_threshold(key: str, value: object) -> Threshold:
    """Parse `default`, or conditions on cases such as `schedule=1f1b and world_size=4`.

    Raises ValueError with the problem.
    """
    try:
        only = parse_only([] if key == DEFAULT else AND.split(key))
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--only ")) from None
    return Threshold(only, read_fraction(value))


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded into cases."""

    name: str
    file: str
    cases: tuple[tuple[Case, Measure], ...]
    axes: tuple[str, ...]  # columns that vary, in the file's order
    torchrun: Torchrun = field(default_factory=Torchrun)
    slurm: Slurm = field(default_factory=Slurm)
    track: Track = field(default_factory=Track)
    facts: Mapping[Identity, Facts] = field(default_factory=dict)  # of inspected models
