"""Cases in rows: those of a row differ in one setting, those of different rows in others too."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.comparison.axes import is_of_machine, key_of
from ppbench.comparison.launches import SETTINGS as MEASURED
from ppbench.comparison.launches import Key, key_text, keys_of, without_times_of_files
from ppbench.comparison.lines import listed
from ppbench.display.cases import NOT_GIVEN, SETTINGS, axis_text, case_text, varying_axes
from ppbench.display.fields import SETTINGS as HEADED
from ppbench.display.fields import field_of
from ppbench.runtimes import ENGINE

_FOLLOWING = {"schedule": ("stages_per_rank", "program_digest")}
"""Settings that usually depend on another."""
_MACHINE = "fingerprint"
_USUAL = (
    *("schedule", "runtime", "world_size", "num_microbatches", "seq_len"),
    *("model_preset", "device"),
)


@dataclass(frozen=True)
class Row:
    """Cases that differ in the axis alone: the key of the launches of each value."""

    rest: Mapping[str, str]  # every other setting, the machine, how it was measured
    keys: Mapping[Hashable, Key]

    def differs_from(self, other: Row) -> tuple[str, ...]:
        return tuple(name for name, text in self.rest.items() if text != other.rest[name])


class Grid:
    """The cases of some runs in rows along an axis, and the words for them."""

    def __init__(self, axis: str, runs: pd.DataFrame) -> None:
        self.axis = axis
        keys = pd.Series(keys_of(runs), runs.index, dtype=object)
        cases = without_times_of_files(runs.assign(key=keys).drop_duplicates("key"))
        follow = _following(axis, cases)
        left_out = {axis, *follow, *((_MACHINE,) if is_of_machine(axis) else ())}
        self._compared = [n for n in (*SETTINGS, _MACHINE, *MEASURED) if n not in left_out]
        by_schedule = () if axis == "schedule" else _following("schedule", cases)
        self._told = [name for name in self._compared if name not in by_schedule]
        self._axes = varying_axes(cases) if len(cases) else ()
        rows: dict[tuple[str, ...], dict[Hashable, Key]] = {}
        self._texts: dict[Key, str] = {}
        self._cases: dict[Key, pd.Series] = {}
        for _, case in cases.iterrows():
            rest = tuple(key_text(case[name]) for name in self._compared)
            rows.setdefault(rest, {})[case[axis]] = case["key"]
            self._cases[case["key"]] = case
        self.rows = [
            Row(dict(zip(self._compared, rest, strict=True)), keys) for rest, keys in rows.items()
        ]

    def text_of(self, key: Key) -> str:
        """The name of a case beside all others."""
        return case_text(self._cases[key], self._axes)

    def texts(self) -> dict[str, str]:
        """The name of each case, by its id."""
        return {key[0]: self.text_of(key) for key in self._cases}

    def common_texts(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        """The settings in which each of these rows differs from some other, in words.

        The machine is not among them.
        """
        names = [name for name in self._told if name != _MACHINE]
        varying = [n for n in names if len({row.rest[n] for row in rows}) > 1]
        return [
            tuple(
                self._words(name, row)
                for name in varying  # only a program file has a digest
                if row.rest[name] != NOT_GIVEN and (name in MEASURED or row.rest[name])
            )
            for row in rows
        ]

    def _words(self, name: str, row: Row) -> str:
        if name in MEASURED:
            return f"{_name_of(name)}={row.rest[name] or 'unknown'}"
        case = self._cases[next(iter(row.keys.values()))]
        return axis_text(name, case[name])

    def shared_text(self, rows: Sequence[Row]) -> str:
        """The usual settings that all these rows have alike, but for the axis, in words."""
        alike = [
            name
            for name in _USUAL
            if name in self._told
            and len({row.rest[name] for row in rows}) == 1
            and rows[0].rest[name] != ENGINE
        ]
        return ", ".join(self._words(name, rows[0]) for name in alike) if rows else ""

    def without_partner(self, base: Hashable | None) -> Iterable[str]:
        """Say of each case that is in no pair what the nearest case with another value differs in.

        `base` is the value that every pair has; None: pairs are made of any values.
        """
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            is_paired = len(row.keys) > 1 and (base is None or base in row.keys)
            for value, key in () if is_paired else row.keys.items():
                wanted = {base} if base is not None and value != base else None
                differing = [
                    row.differs_from(other)
                    for other in self.rows
                    if other is not row and (wanted or set(other.keys) - {value}) & set(other.keys)
                ]
                which = f"another {_name_of(self.axis)}"
                if wanted:
                    which = axis_text(self.axis, base)
                elif self.axis in HEADED and HEADED[self.axis].is_number and self.axis != "seq_len":
                    which = f"another number of {_name_of(self.axis)}"
                why = f"no case with {which} was measured"
                if differing:
                    fewest = min(differing, key=len)
                    names = [_name_of(name) for name in self._told if name in fewest]
                    shown = names[:6] + ([f"{len(names) - 6} more"] if len(names) > 6 else [])
                    words = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
                    why = f"the nearest case with {which} differs in {words} too"
                reasons.setdefault(why, []).append(self.text_of(key))
        for why, texts in reasons.items():
            yield f"not compared: {listed(texts)}: {why}"


def _name_of(name: str) -> str:
    if name == _MACHINE:
        return "the machine"
    if name in MEASURED:
        return name.replace("_", ".", 1)
    return field_of(name).label if name in HEADED else key_of(name)


def _following(axis: str, cases: pd.DataFrame) -> tuple[str, ...]:
    """The settings that differ only because the axis does."""
    names = _FOLLOWING.get(axis, ())
    if cases.empty:
        return ()
    by_value = cases.groupby(axis)
    return tuple(name for name in names if by_value[name].nunique().max() <= 1)


def num_pairs(rows: Iterable[Row], base: Hashable) -> int:
    """How many other values can be compared with this one."""
    return sum(len(row.keys) - 1 for row in rows if base in row.keys)


def pairs_of(
    row: Row, values: Sequence[Hashable], base: Hashable | None
) -> list[tuple[Hashable, Hashable]]:
    """The pairs of values of a row: with the base or, if there is none, of all values in order."""
    present = [value for value in values if value in row.keys]
    if base is None:
        return list(itertools.combinations(present, 2))
    return [(base, value) for value in present if value != base and base in row.keys]
