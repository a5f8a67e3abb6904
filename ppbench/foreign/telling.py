"""What its owner tells of a run's workload, in the words of the sweep file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ppbench.config.assignment import checked_value, parse_assignment
from ppbench.config.case import Case
from ppbench.errors import UsageError

_OF_CASES = frozenset(one.name for one in dataclasses.fields(Case))
_SEEN = ("schedule", "world_size", "num_microbatches", "stages_per_rank", "device", "runtime")
_NAMES = ("model.preset", "data.source")
"""What others call theirs need not be what ppbench knows."""


def settings_from_text(assignments: Sequence[str]) -> dict[str, object]:
    """`model.preset=llama-8b` and the like, as fields of a case. Raises UsageError."""
    return _fields("--set", (parse_assignment("--set", text) for text in assignments))


def settings_from(told: Mapping[str, object]) -> dict[str, object]:
    """The same from a dict: `{"model.preset": "llama-8b"}`. Raises UsageError."""
    for key in told:
        parse_assignment("settings", f"{key}=0")  # whether there is such a key
    return _fields("settings", told.items())


def _fields(where: str, told: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in told:
        name = key.replace(".", "_")
        if name not in _OF_CASES or name in _SEEN:
            raise UsageError(
                f"{where} {key}: is not for you to tell; expected a setting of the model, the data "
                "or the training, or seq_len"
            )
        try:
            given = str(value) if key in _NAMES else checked_value(key, value)
        except ValueError as error:
            raise UsageError(f"{where} {key}={value}: {error}") from None
        found[name] = tuple(given) if isinstance(given, list) else given
    return found
