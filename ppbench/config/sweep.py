"""A sweep: its cases, where they run, what it tracks, and the text that it was read from.

`[track]` has what is tracked over commits: thresholds of `ppbench check`, where the last that
matches a case wins, and changes for the worse that are accepted. Paths are relative to the sweep
file. None of this is part of a case: a run's environment says where it was measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.descriptions import Facts, Identity
from ppbench.config import kinds
from ppbench.config.case import (
    SETTINGS,
    Case,
    Measure,
    Planned,
    PlanSettings,
    Slurm,
    Supervision,
    Torchrun,
    required,
    setting,
)
from ppbench.config.conditions import EVERYTHING, Conditions, checked_value
from ppbench.config.toml import Place, Source, holds, text_of
from ppbench.console import note
from ppbench.errors import SweepFileError, UsageError

MOST_ACCEPTED = 1000.0
"""Memory may grow to several times its size."""


@dataclass(frozen=True)
class Threshold:
    """How much worse a figure of the matching cases may get: 0.02 is 2 %."""

    only: Conditions
    fraction: float


@dataclass(frozen=True)
class Accepted:
    """An intended change for the worse, which passes the gate: a table of `[[track.accept]]`."""

    commit: str = required(kinds.NAME)  # that made it
    reason: str = required(kinds.NAME)  # why it is intended
    cases: str = setting("", kinds.TEXT)  # conditions on its cases; empty: all
    metric: str | None = setting(None, kinds.TEXT)  # None: any
    up_to: float | None = setting(None, kinds.share(MOST_ACCEPTED))  # the most that passes
    only: Conditions = EVERYTHING  # `cases`, read

    def covers(self, metric: str, worse: float, planned: Planned | None) -> bool:
        """Whether it accepts that a metric of a case is worse by this fraction.

        `planned` is None for a case that the sweep file lacks; such a case meets no condition.
        """
        if self.metric not in (None, metric) or (self.up_to is not None and worse > self.up_to):
            return False
        return not self.only.each or (planned is not None and self.only.matches(planned))


@dataclass(frozen=True)
class Track:
    """`[track]`, its paths resolved."""

    repo: Path = Path()  # a folder in its work tree
    setup: str = ""
    thresholds: tuple[Threshold, ...] = ()
    accept: tuple[Accepted, ...] = ()


def read_share(option: str, value: str | float) -> float:
    """Parse the value of an option: 0.02, "0.02" or "2%". Raises UsageError."""
    share = value
    with contextlib.suppress(ValueError):
        share = float(value)
    try:
        checked: Any = kinds.SHARE.check(share)
    except ValueError as error:
        raise UsageError(f"{option} {value}: {error}") from None
    return float(checked)


@dataclass(frozen=True)
class Given:
    """A value that a file gives for a key, and where; or that an option gives."""

    value: object
    place: Place
    is_set_here: bool = False


def _option_of(given: Given) -> str:
    """The option that set a value: `--set`, or the one that is short for it."""
    key = next(step for step in reversed(given.place) if isinstance(step, str))
    declared = SETTINGS[key]
    return f"--{declared.field.replace('_', '-')}" if declared.metavar else "--set"


@dataclass(frozen=True)
class SweepText:
    """What a sweep file and `--set` say: each key once in every table, with its place."""

    source: Source = field(default_factory=lambda: Source("", ""))
    device: str = "cpu"  # the meaning of `auto`
    top: dict[str, Given] = field(default_factory=dict)
    grid: dict[str, Given] = field(default_factory=dict)
    sets: list[dict[str, Given]] = field(default_factory=list)  # of overrides

    def error(self, given: Given, problem: str) -> SweepFileError:
        if given.is_set_here:
            return SweepFileError(_option_of(given), None, text_of(given.place), problem)
        return self.source.error(given.place, problem)

    def checked(self, key: str, given: Given) -> Any:
        """Check one value; a list for all cases is told to go into the grid.

        Raises SweepFileError.
        """
        try:
            return checked_value(key, given.value)
        except ValueError as error:
            is_list = isinstance(given.value, list) and given is self.top.get(key)
            is_axis = is_list and not SETTINGS[key].shared
            hint = "; several values of a key go into [grid]" if is_axis else ""
            raise self.error(given, f"{error}{hint}") from None

    def find(self, key: str) -> Given | None:
        """Where a key is set: as an axis, for all cases, or else by an override."""
        return next(
            (table[key] for table in (self.grid, self.top, *self.sets) if key in table), None
        )

    def error_of(self, key: str, others: Sequence[str], problem: str) -> SweepFileError:
        """An error about a key that may be absent; the line is then that of one of the `others`."""
        if (given := self.find(key)) is not None:
            return self.error(given, problem)
        place = tuple(key.split("."))
        if holds(self.source.tree, place[:1]):
            return self.source.error(place, problem)
        decisive = [given for other in others if (given := self.find(other)) is not None]
        in_file = next((given.place for given in decisive if not given.is_set_here), None)
        if in_file is None and decisive:
            return SweepFileError(_option_of(decisive[0]), None, key, problem)
        line = None if in_file is None else self.source.line_of(in_file)
        return SweepFileError(self.source.file, line, key, problem)


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded into cases."""

    name: str
    file: str
    cases: tuple[tuple[Case, Measure], ...]
    axes: tuple[str, ...]  # columns that vary, in the file's order
    torchrun: Torchrun = field(default_factory=Torchrun)
    slurm: Slurm = field(default_factory=Slurm)
    supervision: Supervision = field(default_factory=Supervision)
    track: Track = field(default_factory=Track)
    plan: PlanSettings = field(default_factory=PlanSettings)
    facts: Mapping[Identity, Facts] = field(default_factory=dict)  # of inspected models
    said: SweepText = field(default_factory=SweepText)  # the file as it was read
    notes: tuple[str, ...] = ()  # conditions that match no case


def note_unmet(sweep: Sweep) -> None:
    """Note a sweep file without settings, and its conditions that match none of its cases."""
    for text in sweep.notes:
        note(f"note: {text}")
