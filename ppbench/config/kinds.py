"""The kinds of settings: which values each may have, in words and as a check.

    MICROBATCHES = whole(1, 65_536)
    MICROBATCHES.values          "a whole number from 1 to 65,536"
    MICROBATCHES.check(8)        8
    MICROBATCHES.check(0)        ValueError: expected a whole number from 1 to 65,536; got 0 (...)

The check returns the value as it is kept: aliases are resolved, lists are tuples.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.model.presets import PRESETS
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    UnknownScheduleError,
    find_schedule,
    known_names,
)
from engine.plan.sizes import bytes_of, exact_text
from ppbench.config.toml import brief, shown
from ppbench.errors import nearest
from ppbench.runtimes import is_known, known_runtimes

AUTO: Final = "auto"
"""Value of a setting that the schedule or the machine decides."""
VARIABLE: Final = "variable"
"""A `seq_len` that differs between microbatches: each is as long as its documents."""
MAX_STAGES_PER_RANK = 1024
MAX_SEQ_LEN = 16_777_216
MIN_MS, MAX_MS = 0.001, 3_600_000
MOST_FACTOR = 1000
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_BUDGET = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh])")
_HOST_AND_PORT = re.compile(r"[\w.-]+:[1-9]\d{0,4}|\[[0-9a-fA-F:.]+\]:[1-9]\d{0,4}", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TIME = re.compile(r"(?:\d{1,4}-)?\d{1,6}(?::\d{1,6}){0,2}", re.ASCII)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DATA = re.compile(r"stdlib|synthetic|(?:text|files|hf):.+", re.DOTALL)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


class Kind(NamedTuple):
    """The values that a setting may have."""

    values: str  # in words, after "expected"
    read: Callable[[object], object | None]
    """Returns the value as it is kept, or None for one that is not allowed. Raises ValueError
    where a word of its own says more."""
    elements: tuple[type, ...] = ()
    """Types of the elements where one value may be a list."""

    def check(self, value: object) -> object:
        """Return the value as it is kept. Raises ValueError with the problem."""
        kept = self.read(value)
        if kept is None:
            raise ValueError(f"expected {self.values}; got {shown(value)}")
        return kept


def matching(values: str, is_allowed: Callable[[str], object]) -> Kind:
    """Texts for which a function holds."""
    return Kind(values, lambda value: value if type(value) is str and is_allowed(value) else None)


def whole(least: int, most: int) -> Kind:
    """Whole numbers between two bounds, both included."""
    return Kind(
        f"a whole number from {least:,} to {most:,}",
        lambda value: value if type(value) is int and least <= value <= most else None,
    )


def number(values: str, is_allowed: Callable[[float], bool]) -> Kind:
    """Finite numbers for which a function holds; integers become floats."""

    def read(value: object) -> float | None:
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
            return None
        return float(value) if is_allowed(value) else None  # type: ignore[arg-type]

    return Kind(f"a number {values}", read)


def up_to(most: int) -> Kind:
    """Numbers from 0 to a bound, both included."""
    return number(f"from 0 to {most:,}", lambda value: 0 <= value <= most)


def named(
    what: str, values: str, known: Callable[[], Iterable[str]], read: Callable[[str], str | None]
) -> Kind:
    """Names that a function knows: it returns each as it is kept, and None for one it does not."""

    def check(value: object) -> str | None:
        if not isinstance(value, str):
            return None
        if (kept := read(value)) is None:
            raise ValueError(f"unknown {what} {brief(value)}{nearest(value, known())}")
        return kept

    return Kind(values, check)


def choice(*words: str) -> Kind:
    """One of some words."""
    values = ", ".join(f'"{word}"' for word in words)
    return named("value", values, lambda: words, lambda word: word if word in words else None)


def each(value: object, element: Kind) -> tuple[object, ...] | None:
    """The values of a list, or the one value, as they are kept; None if one is not allowed."""
    kept = tuple(map(element.read, value if isinstance(value, list | tuple) else [value]))
    return None if None in kept else kept


def some(value: object, element: Kind) -> tuple[object, ...] | None:
    """The values of a list that is not empty, as they are kept; None for any other value."""
    return (each(value, element) or None) if isinstance(value, list | tuple) else None


def listed(values: str, element: Kind, *elements: type, may_be_one: bool) -> Kind:
    """Lists of different values; a tuple then."""

    def read(value: Any) -> tuple[object, ...] | None:
        kept = each(value, element) if may_be_one or isinstance(value, list | tuple) else None
        if kept is not None and (twice := first_twice(kept)) is not None:
            raise ValueError(f"{brief(value[twice])} is listed twice")
        return kept

    return Kind(values, read, elements)


def name_from(stem: str) -> str:
    """The name of a sweep whose file has this name without its end."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "mine"


def first_twice(values: Sequence[Hashable]) -> int | None:
    """The index of the first value that occurs earlier in the list too."""
    seen: set[Hashable] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None


def _schedule(name: str) -> str | None:
    """Resolve aliases to the registered name."""
    if name == AUTO or name.removeprefix(CSV_PREFIX) not in ("", name):
        return name
    try:
        return find_schedule(name).name
    except UnknownScheduleError:
        if name.endswith(".csv") and Path(name).is_file():
            fix = f'for the program in this file write "{CSV_PREFIX}{name}"'
            raise ValueError(f"unknown schedule {brief(name)}; {fix}") from None
        return None


def _schedule_to_choose(value: object) -> object | None:
    """Check a schedule that is no file, since a plan makes programs itself."""
    if isinstance(value, str) and value.startswith(CSV_PREFIX):
        raise ValueError(f"{brief(value)} is a file; a plan makes programs itself")
    return SCHEDULE.read(value)


def _model(value: str) -> str | None:
    """Check the form of the name; all models are looked up together later.

    A folder has one name, `./my-model`: without the `./` its case would have another id.
    """
    if value in PRESETS or _HUB_ID.fullmatch(value):
        return value
    if _is_folder(value) and "/" not in value and value not in (".", ".."):
        return f"./{value}"
    if _FACTORY.fullmatch(value) or _is_folder(value):
        return value
    if _is_there(f"{value}.py", Path.is_file):
        fix = f'for a function of this folder\'s {value}.py write "{value}:FUNCTION"'
        raise ValueError(f"unknown model {brief(value)}; {fix}")
    if "/" in value or value in (".", ".."):
        raise ValueError(f"no such folder: {brief(value)} (relative to the working directory)")
    return None


def _is_folder(name: str) -> bool:
    return name != "" and _is_there(name, Path.is_dir)


def _is_there(name: str, is_such: Callable[[Path], bool]) -> bool:
    try:
        return is_such(Path(name))
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _memory_limit(value: object) -> str | None:
    """Check bytes of real stages, or activations of emulated ones; one text for equal limits."""
    if type(value) is int and value > 0:
        return str(value)
    if isinstance(value, str) and (num_bytes := _bytes_in(value)) > 0:
        return exact_text(num_bytes)
    return "none" if value == "none" else None


def _bytes_in(text: str) -> int:
    """The bytes of a size; 0 if the text is none."""
    try:
        return bytes_of(text)
    except ValueError:
        return 0


def whole_or(word: str, most: int, what: str) -> Kind:
    """Whole numbers from 1 on, or a word."""

    def read(value: object) -> object | None:
        is_right = value == word or (type(value) is int and 1 <= value <= most)
        return value if is_right else None

    return Kind(f'1 to {most:,} {what}, or "{word}"', read)


def times(place: str, fewest: int = 0) -> Kind:
    """Milliseconds: one number for all, or a list with one for each; a tuple either way."""
    values = f"milliseconds, 0 or {MIN_MS} to {MAX_MS:,}: one number, or a list with one for each "
    milliseconds = number("", lambda ms: ms == 0 or MIN_MS <= ms <= MAX_MS)

    def read(value: object) -> tuple[object, ...] | None:
        if isinstance(value, list) and len(value) < fewest:
            raise ValueError(f"a list needs one time per {place}; give one number for all ranks")
        return each(value, milliseconds) or None

    return Kind(values + place, read, (int, float))


def _slurm_options(value: object) -> object | None:
    """Options by the names that `sbatch` has for them: strings, integers and true."""
    if not isinstance(value, Mapping) or not all(map(_OPTION.fullmatch, value)):
        return None
    for name, option in value.items():
        if not isinstance(option, str | int) or option is False:
            raise ValueError(f"{name}: expected a string, an integer or true; got {shown(option)}")
    return dict(value)


def minutes_of(time: str) -> int:
    """Minutes, rounded up, of a time in Slurm's notation; 0 if it is invalid.

    The notation is `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`.
    """
    if _TIME.fullmatch(time) is None:
        return 0
    days, has_days, rest = time.rpartition("-")
    numbers = list(map(int, rest.split(":")))
    if not has_days and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return -(-(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 60)


def _slurm_time(value: object) -> str | None:
    """Check a time limit; a bare number is minutes, as in Slurm."""
    text = str(value) if type(value) is int else value
    return text if isinstance(text, str) and minutes_of(text) else None


def seconds_of(budget: str) -> float:
    """Seconds of a time such as `90s`, `10m` or `1.5h`; 0 if it is none."""
    match = _BUDGET.fullmatch(budget)
    return 0.0 if match is None else float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def share(most: float, least: float = 0.0) -> Kind:
    """Fractions between two bounds, or percentages such as "2%"; a fraction then."""

    def read(value: object) -> float | None:
        percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
        fraction = float(percent[1]) / 100 if percent else value
        is_right = type(fraction) in (int, float) and least <= fraction <= most  # type: ignore[operator]
        return float(fraction) if is_right else None  # type: ignore[arg-type]

    bounds = f"between {100 * least:g} and {100 * most:g} %"
    return Kind(f'a fraction such as "2%" or 0.02, {bounds}', read)


NO_KEY = Kind("no key of a sweep file", lambda _: None)
FLAG = Kind("true or false", lambda value: value if type(value) is bool else None)
TEXT = matching("text", lambda _: True)
NAME = matching("text that is not empty", bool)
MODULE = matching('the name of a module, such as "transformer.h"', lambda _: True)
SWEEP_NAME = matching("at most 100 letters, digits and . _ -", _NAME.fullmatch)
SEED = whole(0, 2**63 - 1)
POSITIVE = number("above 0", lambda value: value > 0)
NOT_NEGATIVE = number("of at least 0", lambda value: value >= 0)
BELOW_ONE = number("from 0 to below 1", lambda value: 0 <= value < 1)
RESOLUTION = share(0.5, least=0.001)
SCHEDULE = named(
    "schedule",
    f'the name of a schedule, "{AUTO}" or "{CSV_PREFIX}PATH"',
    lambda: [*known_names(), AUTO],
    _schedule,
)
RUNTIME = named(
    "runtime",
    "the name of a runtime",
    known_runtimes,
    lambda name: name if is_known(name) else None,
)
MODEL = named(
    "model",
    "a preset, a hub id, a checkpoint folder or a factory",
    lambda: [*PRESETS, 'a hub id "owner/name"', "a checkpoint folder", '"package.module:factory"'],
    _model,
)
SOURCE = named(
    "data source",
    '"stdlib", "synthetic", "text:PATH", "files:PATH" or "hf:DATASET"',
    lambda: ("stdlib", "synthetic", "text:PATH", "files:PATH", "hf:DATASET"),
    lambda name: name if _DATA.fullmatch(name) else None,
)
SEQ_LEN = whole_or(VARIABLE, MAX_SEQ_LEN, "tokens")
STAGES_PER_RANK = whole_or(AUTO, MAX_STAGES_PER_RANK, "stages")
MEMORY_LIMIT = Kind(
    '"none", a size above 0 such as "1.5 GiB" or, of emulated stages, a number of activations',
    _memory_limit,
)
PARTITION = Kind(
    '"uniform", "parameters", "measured" or the number of layers of each stage, such as [3, 5]',
    lambda value: (
        value if value in ("uniform", "parameters", "measured") else some(value, whole(0, 2**31))
    ),
    (int,),
)
SLICE_LENGTHS = Kind(
    '"even", "balanced" or the number of tokens of each slice, such as [40, 32, 28, 28]',
    lambda value: value if value in ("even", "balanced") else some(value, whole(1, MAX_SEQ_LEN)),
    (int,),
)
RECOMPUTE = Kind(
    "true, false or a list with one for each stage, as in [true, false]",
    lambda value: some(value, FLAG) if isinstance(value, list | tuple) else FLAG.read(value),
)
MODULES = listed(
    'a list of module names, such as ["blocks.4", "blocks.8"]', NAME, str, may_be_one=False
)
STAGE_MS = times("stage")
OP_MS = times("stage", fewest=2)
LINK_MS = times("link from a stage to the next")
FACTORS = Kind(
    f"a list with a factor above 0 and up to {MOST_FACTOR:,} for each replica, such as [1, 1.2]",
    lambda value: each(value, number("", lambda factor: 0 < factor <= MOST_FACTOR)),
    (int, float),
)
BUDGET = matching(
    'a time with its unit, such as "90s", "10m" or "1.5h"',
    lambda text: text == "" or seconds_of(text),
)
RENDEZVOUS = matching(
    'the name of a node and a free port on it, such as "node1:29400"',
    lambda text: text == "" or _HOST_AND_PORT.fullmatch(text),
)
SLURM_TIME = Kind('minutes, or a time such as "90", "1:30:00" or "2-12:00:00"', _slurm_time)
SLURM_OPTIONS = Kind(
    'options of sbatch without dashes, such as {exclude = "node7"}', _slurm_options
)
MEMORY = matching(
    'a size with its unit, such as "1.5 GiB" or "80 GB"',
    lambda text: text == "" or _bytes_in(text) > 0,
)
COUNTS = listed(
    "a whole number of at least 1, or a list of them, as in [1, 2]",
    whole(1, MAX_STAGES_PER_RANK**2),
    int,
    may_be_one=True,
)
SOME_COUNTS = Kind(COUNTS.values, lambda value: COUNTS.read(value) or None, (int,))
SCHEDULES = listed(
    f'a list of schedules, such as ["1f1b", "{AUTO}"]',
    Kind("a schedule that is no file", _schedule_to_choose),
    str,
    may_be_one=False,
)
COSTS_ORIGIN = matching(
    '"measure" or "file:PATH"', lambda text: text == "measure" or text[:5] == "file:" != text
)
SHARE = share(1)
TABLE = Kind("a table", lambda value: value if isinstance(value, dict) else None)
TABLES = Kind("tables in double brackets", lambda value: value if isinstance(value, list) else None)
