"""The types of settings: which values each may have, and the message for others.

Pydantic checks them, in text from outside (`config.schema`); it is slow to import, so commands that
read no sweep file do without. Outside this package, all settings are frozen dataclasses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from engine.model.presets import PRESETS
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    UnknownScheduleError,
    find_schedule,
    known_names,
)
from engine.plan.sizes import bytes_of, exact_text
from ppbench.config.toml import brief
from ppbench.errors import nearest
from ppbench.runtimes import is_known, known_runtimes

AUTO: Final = "auto"
"""Value of a setting that the schedule or the machine decides."""
VARIABLE: Final = "variable"
"""A `seq_len` that differs between microbatches: each is as long as its documents."""
MAX_STAGES_PER_RANK = 1024
MIN_MS, MAX_MS = 0.001, 3_600_000
MOST_FACTOR = 1000
_PARTITIONS = ("uniform", "parameters", "measured")
_SOURCES = ("stdlib", "synthetic", "text:PATH", "files:PATH", "hf:DATASET")
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_BUDGET = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh])")
_HOST_AND_PORT = re.compile(r"[\w.-]+:[1-9]\d{0,4}|\[[0-9a-fA-F:.]+\]:[1-9]\d{0,4}", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", re.ASCII)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MAX_SEQ_LEN = 16_777_216


class Kind(NamedTuple):
    """A type, with a function that checks or converts values for it, or with bounds."""

    type: object
    check: Callable[[object], object] | None = None
    bounds: Mapping[str, Any] = MappingProxyType({})


def _known_schedule(value: object) -> object:
    """Resolve aliases to the registered name."""
    if (
        not isinstance(value, str)
        or value == AUTO
        or value.removeprefix(CSV_PREFIX) not in ("", value)
    ):
        return value
    try:
        return find_schedule(value).name
    except UnknownScheduleError:
        if value.endswith(".csv") and Path(value).is_file():
            raise ValueError(
                f"unknown schedule {brief(value)}; for the program in this file write "
                f'"{CSV_PREFIX}{value}"'
            ) from None
        raise ValueError(
            f"unknown schedule {brief(value)}{nearest(value, [*known_names(), AUTO])}"
        ) from None


def _known_runtime(value: object) -> object:
    if isinstance(value, str) and not is_known(value):
        raise ValueError(f"unknown runtime {brief(value)}{nearest(value, known_runtimes())}")
    return value


def _model(value: object) -> object:
    """Check the form of the name; all models are looked up together later.

    A folder has one name, `./my-model`: without the `./` its case would have another id.
    """
    if not isinstance(value, str) or value in PRESETS or _HUB_ID.fullmatch(value):
        return value
    if _is_folder(value) and "/" not in value and value not in (".", ".."):
        return f"./{value}"
    if _FACTORY.fullmatch(value) or _is_folder(value):
        return value
    if "/" in value or value in (".", ".."):
        raise ValueError(f"no such folder: {brief(value)} (relative to the working directory)")
    others = 'a hub id "owner/name", a checkpoint folder, "package.module:factory"'
    raise ValueError(f"unknown preset {brief(value)}{nearest(value, PRESETS)}; or {others}")


def _is_folder(name: str) -> bool:
    try:
        return name != "" and Path(name).is_dir()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _memory_limit(value: object) -> object:
    """Check bytes of real stages, or activations of emulated ones; one text for equal limits."""
    if value == "none":
        return value
    if type(value) is int and value > 0:
        return str(value)
    if isinstance(value, str) and (num_bytes := _bytes_in(value)) > 0:
        return exact_text(num_bytes)
    raise ValueError(
        'expected "none", a size above 0 such as "1.5 GiB" or, of emulated stages, a number of '
        "activations"
    )


def _partition(value: object) -> object:
    if isinstance(value, list | tuple):
        if value and all(type(count) is int and count >= 0 for count in value):
            return tuple(value)
    elif isinstance(value, str) and value in _PARTITIONS:
        return value
    known = ", ".join(f'"{name}"' for name in _PARTITIONS)
    raise ValueError(f"expected {known} or the number of layers of each stage, such as [3, 5]")


def _split_points(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
        raise ValueError('expected a list of module names, such as ["blocks.4", "blocks.8"]')
    if (twice := first_twice(value)) is not None:
        raise ValueError(f"module {brief(value[twice])} is listed twice")
    return tuple(value)


def first_twice(values: Sequence[Hashable]) -> int | None:
    """The index of the first value that occurs earlier in the list too."""
    seen: set[Hashable] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None


def _recompute(value: object) -> object:
    """Check `true` or `false` for all stages, or a list with one for each; a tuple then."""
    if isinstance(value, list | tuple) and value and all(type(one) is bool for one in value):
        return tuple(value)
    if type(value) is bool:
        return value
    raise ValueError("expected true, false or a list with one for each stage, as in [true, false]")


def _source(value: object) -> object:
    if isinstance(value, str) and value not in ("stdlib", "synthetic"):
        kind, _, name = value.partition(":")
        if kind not in ("text", "files", "hf") or not name:
            raise ValueError(f"unknown data source {brief(value)}{nearest(value, _SOURCES)}")
    return value


def _seq_len(value: object) -> object:
    if value == VARIABLE or (type(value) is int and 1 <= value <= MAX_SEQ_LEN):
        return value
    raise ValueError(f'expected 1 to {MAX_SEQ_LEN:,} tokens, or "{VARIABLE}"')


def _stages_per_rank(value: object) -> object:
    if value == AUTO or (type(value) is int and 1 <= value <= MAX_STAGES_PER_RANK):
        return value
    raise ValueError(f'expected 1 to {MAX_STAGES_PER_RANK} stages, or "{AUTO}"')


def _milliseconds(value: object) -> object:
    """One number for all ranks, or a list with one for each stage; a tuple either way."""
    if isinstance(value, list) and len(value) < 2:
        raise ValueError("a list needs one time per stage; give one number for all ranks")
    return _times(value, "stage")


def _factors(value: object) -> object:
    factors = _numbers(value, lambda factor: 0 < factor <= MOST_FACTOR)
    if factors is not None:
        return factors
    raise ValueError(
        f"expected a list with a factor above 0 and up to {MOST_FACTOR:,} for each replica, such "
        "as [1, 1.2]"
    )


def _times(value: object, each: str) -> tuple[float, ...]:
    """One number for all, or a list with one for each; a tuple either way."""
    if times := _numbers(value, lambda ms: ms == 0 or MIN_MS <= ms <= MAX_MS):
        return times
    raise ValueError(
        f"expected milliseconds, 0 or {MIN_MS} to {MAX_MS:,}: one number, or a list with one for "
        f"each {each}"
    )


def _numbers(value: object, is_allowed: Callable[[float], bool]) -> tuple[float, ...] | None:
    """A number or a list of them as floats; None if any is none, or is not allowed.

    Integers too large for a float are compared before they are converted.
    """
    listed: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if all(type(number) in (int, float) and is_allowed(number) for number in listed):
        return tuple(map(float, listed))
    return None


def _slurm_time(value: object) -> object:
    """A time limit; a bare number is minutes, as in Slurm."""
    text = str(value) if type(value) is int else value
    if isinstance(text, str) and minutes_of(text):
        return text
    raise ValueError('expected minutes, or a time such as "90", "1:30:00" or "2-12:00:00"')


def _slurm_options(value: object) -> object:
    """Options by the names that `sbatch` has for them: strings, integers and true."""
    if not isinstance(value, dict) or not all(map(_OPTION.fullmatch, value)):
        raise ValueError('expected options of sbatch without dashes, such as {exclude = "node7"}')
    for name, option in value.items():
        if not isinstance(option, str | int) or option is False:
            raise ValueError(f"{name}: expected a string, an integer or true")
    return value


def _rendezvous(value: object) -> object:
    if isinstance(value, str) and (value == "" or _HOST_AND_PORT.fullmatch(value)):
        return value
    raise ValueError('expected the name of a node and a free port on it, such as "node1:29400"')


def minutes_of(time: str) -> int:
    """Minutes, rounded up, of a time in Slurm's notation; 0 if it is invalid.

    The notation is `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        return 0
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return -(-(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 60)


def _bytes_in(text: str) -> int:
    """The bytes of a size; 0 if the text is none."""
    try:
        return bytes_of(text)
    except ValueError:
        return 0


def _memory(value: object) -> object:
    if not isinstance(value, str) or (value and _bytes_in(value) < 1):
        raise ValueError('expected a size with its unit, such as "1.5 GiB" or "80 GB"')
    return value


def _counts(value: object) -> object:
    """One whole number from 1 on, or a list of different ones."""
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list | tuple) or not all(
        type(one) is int and 1 <= one <= MAX_STAGES_PER_RANK**2 for one in listed
    ):
        raise ValueError("expected a whole number of at least 1, or a list of them, as in [1, 2]")
    if (twice := first_twice(listed)) is not None:
        raise ValueError(f"{brief(listed[twice])} is listed twice")
    return tuple(listed)


def _some_counts(value: object) -> object:
    if value in ([], ()):
        raise ValueError("is empty; expected numbers such as [1, 2]")
    return _counts(value)


def _schedules(value: object) -> object:
    """Names of schedules, `auto` among them; no file, since a plan makes programs itself."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f'expected a list of schedules, such as ["1f1b", "{AUTO}"]')
    named = []
    for name in value:
        try:
            named.append(name if name == AUTO else find_schedule(name).name)
        except UnknownScheduleError:
            known = [*(each for each in known_names() if not each.startswith(CSV_PREFIX)), AUTO]
            raise ValueError(f"unknown schedule {brief(name)}{nearest(name, known)}") from None
    if (twice := first_twice(named)) is not None:
        raise ValueError(f"{brief(value[twice])} is listed twice")
    return tuple(named)


def _costs_origin(value: object) -> object:
    if isinstance(value, str):
        kind, _, name = value.partition(":")
        if value == "measure" or (kind == "file" and name):
            return value
    raise ValueError('expected "measure" or "file:PATH"')


def _budget(value: object) -> object:
    if isinstance(value, str) and (value == "" or seconds_of(value)):
        return value
    raise ValueError('expected a time with its unit, such as "90s", "10m" or "1.5h"')


def seconds_of(budget: str) -> float:
    """Seconds of a time such as `90s`, `10m` or `1.5h`; 0 if it is none."""
    match = _BUDGET.fullmatch(budget)
    return 0.0 if match is None else float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


Schedule = Kind(str, _known_schedule)
Budget = Kind(str, _budget)
Memory = Kind(str, _memory)
Ranks = Kind(tuple[int, ...], _counts)
Counts = Ranks
StagesToChoose = Kind(tuple[int, ...], _some_counts)
Schedules = Kind(tuple[str, ...], _schedules)
CostsOrigin = Kind(str, _costs_origin)
RuntimeName = Kind(str, _known_runtime)
MemoryLimit = Kind(str, _memory_limit)
Model = Kind(str, _model)
Partition = Kind(str | tuple[int, ...], _partition)
Recompute = Kind(bool | tuple[bool, ...], _recompute)
SplitPoints = Kind(tuple[str, ...], _split_points)
Source = Kind(str, _source)
StagesPerRank = Kind(int | str, _stages_per_rank)
Milliseconds = Kind(tuple[float, ...], _milliseconds)
StageMilliseconds = Kind(tuple[float, ...], lambda value: _times(value, "stage"))
Factors = Kind(tuple[float, ...], _factors)
LinkMilliseconds = Kind(
    tuple[float, ...], lambda value: _times(value, "link from a stage to the next")
)
SeqLen = Kind(int | str, _seq_len)
Rendezvous = Kind(str, _rendezvous)
SlurmTime = Kind(str, _slurm_time)
SlurmOptions = Kind(dict[str, str | int | bool], _slurm_options)
Name = Kind(str, bounds={"min_length": 1})
Seed = Kind(int, bounds={"ge": 0, "lt": 2**63})
Positive = Kind(float, bounds={"gt": 0, "allow_inf_nan": False})
NotNegative = Kind(float, bounds={"ge": 0, "allow_inf_nan": False})
BelowOne = Kind(float, bounds={"ge": 0, "lt": 1})
Resolution = Kind(float, bounds={"ge": 0.001, "le": 0.5})


def whole(least: int, most: int) -> Kind:
    """Integers between two bounds, both included."""
    return Kind(int, bounds={"ge": least, "le": most})


def number(most: int) -> Kind:
    """Numbers from 0 to a bound, both included."""
    return Kind(float, bounds={"ge": 0, "le": most})
