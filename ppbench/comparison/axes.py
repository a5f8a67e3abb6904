"""The settings along which cases are compared: their names, and their values in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Sequence

from engine.plan.schedules.registry import UnknownScheduleError, find_schedule
from ppbench.config.case import CASE_KEYS
from ppbench.display.cases import KNOBS, SETTINGS
from ppbench.errors import UsageError, nearest

SYNONYMS = {"ranks": "world_size", "microbatches": "num_microbatches", "model": "model_preset"}
_OF_A_COMMIT = ("commit", "branch", "code", "changes")
_OF_THE_MACHINE = ("device", "launch_threads_per_rank")
_LISTED = ("schedule", "runtime", "ranks", "microbatches", "seq_len", "stages_per_rank")


def find_axis(name: str, option: str = "--across") -> str:
    """Return the setting with this name: a column, a key of a sweep file, or the end of one.

    Raises UsageError for the name of no setting, or of several.
    """
    plain = name.strip().removeprefix("grid.").replace(".", "_").replace("-", "_")
    plain = SYNONYMS.get(plain, plain)
    if plain in SETTINGS:
        return plain
    ends = [setting for setting in SETTINGS if setting.endswith(f"_{plain}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        named = ", ".join(map(key_of, ends))
        raise UsageError(f"{option} {name}: could be any of {named}; write one of them")
    if plain in _OF_A_COMMIT:
        raise UsageError(
            f"{option} {name}: not a setting of a case; commits are compared by: ppbench compare "
            "BASE HEAD"
        )
    keys = [key_of(setting) for setting in SETTINGS]  # and each without its section
    known = [*SYNONYMS, *(word for key in keys for word in (key, key.rpartition(".")[2]))]
    hint = nearest(plain, dict.fromkeys(known), [*_LISTED, "or any other key of a sweep file"])
    raise UsageError(f'{option} {name}: unknown axis "{name}"{hint}')


def key_of(setting: str) -> str:
    """The key of a sweep file: `train.recompute` for `train_recompute`."""
    return next((key for key in CASE_KEYS if key.replace(".", "_") == setting), setting)


def is_of_machine(axis: str) -> bool:
    """Whether the fingerprint of a machine contains the setting."""
    return axis in _OF_THE_MACHINE


def ordered(values: Iterable[Hashable]) -> list[Hashable]:
    """Return the different values: numbers by size, others as they first come."""
    distinct = list(dict.fromkeys(values))
    sizes = {value: _size(value) for value in distinct}
    if any(size is None for size in sizes.values()):
        return distinct
    return sorted(distinct, key=lambda value: sizes[value] or 0.0)


def _size(value: object) -> float | None:
    try:
        return float(str(int(value) if isinstance(value, bool) else value))
    except ValueError:
        return None


def value_named(text: object, axis: str, values: Sequence[Hashable]) -> Hashable:
    """Return the value with this text. Raises UsageError, with the values, if there is none."""
    asked = str(text).strip()
    if axis == "schedule":
        with contextlib.suppress(UnknownScheduleError):
            asked = find_schedule(asked).name
    size = _size(asked)
    for value in values:
        own = _size(value)
        if asked.lower() == str(value).lower() or (
            size is not None and own is not None and math.isclose(size, own)
        ):
            return value
    hint = nearest(asked, map(str, values))
    raise UsageError(
        f"--base {text}: no run that could be compared has {key_of(axis)} {asked}{hint}"
    )


def work_note(axis: str) -> str:
    """Say what is compared along an axis that changes a step's work or devices; else empty."""
    if axis in ("world_size", "replicas"):
        return f"{key_of(axis)} changes the number of devices: tokens/s are those of all together"
    if axis in KNOBS and axis not in ("num_microbatches", "train_microbatch_size", "seq_len"):
        return ""
    return f"{key_of(axis)} changes the work of a step: tokens/s are compared, not steps"
