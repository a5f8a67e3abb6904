"""A sweep: its cases, where they run, what it tracks, and the options that change or select cases.

    [track]
    repo   = ".."                       # the repository that is tracked; default: the file's own
    setup  = "make -C csrc"             # run in the work tree of a commit before it is measured

    [track.thresholds]                  # changes that `ppbench check` lets pass
    default = "2%"
    "schedule=zb_h1 and world_size=4" = "5%"      # the last match wins

    [[track.accept]]                    # a change for the worse that is intended
    commit = "3f2a91c07"                # which made it
    reason = "exact attention, see #41"
    cases  = "schedule=1f1b and world_size=4"     # all when left out
    metric = "tokens_per_s"             # all when left out
    up_to  = "10%"                      # however much when left out

    [plan]                              # what `ppbench plan` is asked for
    memory = "1.5 GiB"                  # of each rank

Paths are relative to the sweep file, so they do not depend on the working directory. None of this
is part of a case, nor are `[launch.torchrun]` and `[launch.slurm]`: a run's environment says where
it was measured.

`--set` and `--only` take KEY=VALUE: a dotted key of the sweep file, and a TOML value.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from engine.model.descriptions import Facts, Identity
from ppbench.config.case import (
    Case,
    Measure,
    Planned,
    PlanSettings,
    Slurm,
    Torchrun,
    setting_of,
)
from ppbench.config.schema import SweepFile, known_keys
from ppbench.config.synonyms import setting_named
from ppbench.config.toml import (
    as_toml,
    brief,
    cut,
    describe,
    line_of_long_key,
    nearest_key,
    printable,
    quoted,
)
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
            matching = tuple(case for case in left if setting_of(*case, key) in values)
            if not matching:
                asked = ", ".join(map(brief, values))
                known = list(dict.fromkeys(brief(setting_of(*case, key)) for case in left))
                more = f", ... ({len(known):,} values)" if len(known) > MAX_LISTED else ""
                met = ", ".join(
                    f"{name} = {' or '.join(map(brief, wanted))}"
                    for name, wanted in self.allowed[:position]
                )
                among = f" of those with {met}" if met else ""
                raise UsageError(
                    f"--only {key}={asked}: no case{among} has this value; "
                    f"its values are {', '.join(known[:MAX_LISTED])}{more}"
                )
            left = matching
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
            checked = [checked_value(key, element) for element in listed]
        except ValueError as error:
            raise UsageError(f"--only {cut(printable(text))}: {error}") from None
        allowed.setdefault(key, []).extend(checked)
    return Only(tuple((key, tuple(values)) for key, values in allowed.items()))


LISTS: dict[str, type | tuple[type, ...]] = {
    "model.partition": int,
    "model.split_points": str,
    "emulated.F_ms": (int, float),
    "emulated.I_ms": (int, float),
    "emulated.W_ms": (int, float),
    "emulated.link_ms": (int, float),
    "emulated.gather_ms": (int, float),
    "emulated.reduce_ms": (int, float),
    "emulated.replica_factors": (int, float),
}
"""Settings that are lists themselves, and the types of their elements."""


def parse_assignment(option: str, text: str, places: Sequence[str] = ()) -> tuple[str, object]:
    """Parse `train.microbatch_size=2`; a value that is not TOML is a string.

    The key may begin with `grid.`, unless it is one of `places`, further keys that are allowed.
    `option` names the option in the message.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        problem = "expected KEY=VALUE, such as train.microbatch_size=2"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    is_axis = key.startswith("grid.")
    bare, known = setting_named(key.removeprefix("grid.")), [*known_keys(), *places]
    key = f"grid.{bare}" if is_axis else bare
    if bare in places and bare != key:
        raise UsageError(f"{option} {cut(printable(text))}: {bare} cannot be an axis; drop grid.")
    if bare not in known:
        problem = f"unknown key {quoted(bare)}{nearest_key(bare, known)}"
        raise UsageError(f"{option} {cut(printable(text))}: {problem}")
    assigned = f"value = {value}"
    try:
        parsed = {} if line_of_long_key(assigned) else tomllib.loads(assigned)
    except (ValueError, RecursionError):
        parsed = {}
    return key, parsed["value"] if len(parsed) == 1 else value.strip()


def is_list_of_values(key: str, value: object) -> bool:
    """Whether a value lists several values of a key, which may be lists themselves."""
    if not isinstance(value, list):
        return False
    element = LISTS.get(key)
    return element is None or not all(isinstance(inner, element) for inner in value)


def checked_value(key: str, value: object) -> object:
    """Check a single value, and resolve aliases. Raises ValueError with the allowed values."""
    section, _, name = key.partition(".")
    trial = {"name": "x", section: {name: value} if name else value}
    try:
        settings = SweepFile.model_validate(trial).model_dump()
    except ValidationError as error:
        raise ValueError(describe(error.errors()[0], SweepFile)) from None
    return settings[section][name] if name else settings[section]


DEFAULT = "default"
MOST_ACCEPTED = 1000.0
"""Memory may grow to several times its size."""
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """How much worse a figure of the matching cases may get: 0.02 is 2 %."""

    only: Only
    fraction: float


@dataclass(frozen=True)
class Accepted:
    """An intended change for the worse, which passes the gate."""

    commit: str  # it came with this commit
    reason: str
    only: Only = EVERYTHING
    metric: str | None = None  # None: any
    up_to: float | None = None  # a fraction; None: however much

    def covers(self, metric: str, worse: float, planned: Planned | None) -> bool:
        """Whether it accepts that a metric of a case is worse by this fraction.

        `planned` is None for a case that the sweep file lacks; such a case meets no condition.
        """
        if self.metric not in (None, metric) or (self.up_to is not None and worse > self.up_to):
            return False
        return not self.only.allowed or (planned is not None and self.only.matches(*planned))


@dataclass(frozen=True)
class Track:
    """`[track]`, its paths resolved."""

    repo: Path = Path()  # a folder in its work tree
    setup: str = ""
    thresholds: tuple[Threshold, ...] = ()
    accept: tuple[Accepted, ...] = ()


def read_fraction(value: object, most: float = 1.0) -> float:
    """Parse `"2%"` or 0.02. Raises ValueError unless it is between 0 and `most`."""
    if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
        value = float(percent[1]) / 100
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        bounds = f"between 0 and {100 * most:.0f} %"
        raise ValueError(f'expected a fraction such as "2%" or 0.02, {bounds}')
    return float(value)


def read_share(option: str, value: str | float) -> float:
    """Parse the value of an option: 0.02, "0.02" or "2%". Raises UsageError."""
    share = value
    with contextlib.suppress(ValueError):
        share = float(value)
    try:
        return read_fraction(share)
    except ValueError as error:
        raise UsageError(f"{option} {value}: {error}") from None


def read_threshold(key: str, value: object) -> Threshold:
    """Parse `default`, or conditions on cases such as `schedule=1f1b and world_size=4`.

    Raises ValueError with the problem.
    """
    return Threshold(EVERYTHING if key == DEFAULT else read_conditions(key), read_fraction(value))


def read_conditions(text: str) -> Only:
    """Parse conditions on cases, joined by `and`. Raises ValueError with the problem."""
    try:
        return parse_only(AND.split(text.strip()))
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--only ")) from None


def conditions_of(planned: Planned, axes: Sequence[str]) -> list[str]:
    """The conditions that this case alone meets, as `--only` takes them; `axes` are columns."""
    keys = [key for key in known_keys() if key.replace(".", "_") in axes]
    values = {key: setting_of(*planned, key) for key in keys}
    return [
        f"{key}={value if isinstance(value, str) else as_toml(value)}"
        for key, value in values.items()
    ]


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
    plan: PlanSettings = field(default_factory=PlanSettings)
    facts: Mapping[Identity, Facts] = field(default_factory=dict)  # of inspected models
