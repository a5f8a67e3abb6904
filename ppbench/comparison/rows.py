"""Cases in rows: those of a row differ in one setting, those of different rows in others too.

The axis is a setting, or the commit: then the values are `base` and `head`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from ppbench.comparison.axes import is_of_machine, key_of
from ppbench.comparison.launches import SETTINGS as MEASURED
from ppbench.comparison.launches import Key, key_text, keys_of, without_times_of_files
from ppbench.comparison.lines import COMMIT, listed
from ppbench.display.cases import (
    FOLLOW_SCHEDULE,
    NOT_GIVEN,
    SETTINGS,
    axis_text,
    case_text,
    varying_axes,
)
from ppbench.display.fields import field_of
from ppbench.runtimes import ENGINE
from ppbench.store.columns import SETTINGS as HEADED

Arm = tuple[Hashable, Key]
"""A value and the key of its launches."""
SIDE = "side"
"""The column that says `base` or `head` where the axis is the commit."""
_FOLLOWING = {"schedule": FOLLOW_SCHEDULE}
"""Settings that usually depend on another."""
_MACHINE, _CASE = "fingerprint", "case_id"
_USUAL = (
    *("schedule", "runtime", "world_size", "num_microbatches", "seq_len"),
    *("model_preset", "device"),
)


@dataclass(frozen=True)
class Row:
    """Cases that differ in the axis alone: the key of the launches of each value."""

    rest: Mapping[str, str]  # every other setting, the machine, how it was measured
    keys: dict[Hashable, Key] = field(default_factory=dict)  # of launches that are ok
    failed: dict[Hashable, Key] = field(default_factory=dict)  # of all others


class Grid:
    """The cases of some runs in rows along an axis, and the words for them."""

    def __init__(self, axis: str, runs: pd.DataFrame, failed: pd.DataFrame) -> None:
        """`runs` are those that are ok; along the commit all have a column `SIDE`."""
        self.axis = axis
        column = SIDE if axis == COMMIT else axis
        every = pd.concat([runs, failed]).copy()  # in one piece
        every = every.assign(key=pd.Series(keys_of(every), every.index, dtype=object))
        cases = without_times_of_files(every.drop_duplicates(["key", column]))
        follow = _following(axis, cases)
        left_out = {axis, *follow, *((_MACHINE,) if is_of_machine(axis) else ())}
        self._compared = [n for n in (*SETTINGS, _MACHINE, *MEASURED) if n not in left_out]
        by_schedule = () if axis == "schedule" else _following("schedule", cases)
        self._told = [name for name in self._compared if name not in by_schedule]
        if axis == COMMIT:  # scripts of one name may be different cases
            self._compared.append(_CASE)
        self.axes = varying_axes(cases) if len(cases) else ()
        """The settings in which cases differ."""
        self.arms: dict[Arm, pd.DataFrame] = {}
        """The launches of each value and key, those that are ok."""
        keys = pd.Series(keys_of(runs), runs.index, dtype=object)
        for key, own in runs.groupby(keys, sort=False):
            for value in own[column].unique():
                self.arms[value, key] = own[own[column] == value]
        rows: dict[tuple[str, ...], Row] = {}
        self._cases: dict[Key, pd.Series] = {}
        for _, case in cases.iterrows():
            rest = tuple(key_text(case[name]) for name in self._compared)
            row = rows.setdefault(rest, Row(dict(zip(self._compared, rest, strict=True))))
            is_ok = (case[column], case["key"]) in self.arms
            (row.keys if is_ok else row.failed)[case[column]] = case["key"]
            self._cases[case["key"]] = case
        self.rows = list(rows.values())

    def texts(self) -> dict[str, str]:
        """The name of each case beside all others, by its id."""
        return {key[0]: self._text_of(key) for key in self._cases}

    def _text_of(self, key: Key) -> str:
        return case_text(self._cases[key], self.axes)

    def common_texts(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        """The settings in which each of these rows differs from some other, in words.

        The machine is not among them. Along the commit it is the whole name of the case, and how it
        was measured where that was done in several ways.
        """
        if self.axis == COMMIT:
            return [self._whole_name(row, rows) for row in rows]
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

    def _whole_name(self, row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
        alike = [one for one in rows if all(one.rest[n] == row.rest[n] for n in (_CASE, _MACHINE))]
        ways = [name for name in MEASURED if len({one.rest[name] for one in alike}) > 1]
        return self._text_of(_any_key(row)), *(self._words(name, row) for name in ways)

    def _words(self, name: str, row: Row) -> str:
        if name in MEASURED:
            return f"{_name_of(name)}={row.rest[name] or 'unknown'}"
        return axis_text(name, self._cases[_any_key(row)][name])

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

        `base` is the value that every pair has; None: pairs are made of any values. What failed is
        told elsewhere.
        """
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            known = {**row.keys, **row.failed}
            if len(known) > 1 and (base is None or base in known):
                continue
            for value, key in row.keys.items():
                has_base = base is not None and value != base
                who, partner = "not compared:", f"with another {_name_of(self.axis)}"
                if self.axis == COMMIT:
                    who = f"only {value} has"
                    partner = f"of {'head' if value == 'base' else 'base'}"
                elif has_base:
                    partner = f"with {axis_text(self.axis, base)}"
                others = [
                    other
                    for other in self.rows
                    if other is not row
                    and (base in other.keys if has_base else set(other.keys) - {value})
                ]
                why = f"no case {partner} was measured"
                if others:
                    names = [_name_of(name) for name in self._nearest(row, others)]
                    words = " and ".join(names or ["the script"])
                    why = f"the nearest case {partner} differs in {words} too"
                reasons.setdefault(f"{who} {{}}: {why}", []).append(self._text_of(key))
        for why, texts in reasons.items():
            yield why.replace("{}", listed(list(dict.fromkeys(texts))), 1)

    def _nearest(self, row: Row, others: Iterable[Row]) -> list[str]:
        """The settings in which the nearest of other rows differs."""
        differing = (
            [name for name, text in row.rest.items() if text != other.rest[name]]
            for other in others
        )
        fewest = min(differing, key=len)
        return [name for name in self._told if name in fewest]

    def setting_between(self) -> str | None:
        """The setting in which all rows without a partner differ from the nearest other one.

        None if it is another one for some, several, or none of a case.
        """
        found = set[tuple[str, ...]]()
        for row in self.rows:
            others = [other for other in self.rows if set(other.keys) - set(row.keys)]
            if others and row.keys:
                found.add(tuple(self._nearest(row, others)))
        names = found.pop() if len(found) == 1 else ()
        return names[0] if len(names) == 1 and names[0] in SETTINGS else None


def _any_key(row: Row) -> Key:
    return next(iter({**row.failed, **row.keys}.values()))


def _name_of(name: str) -> str:
    if name == _MACHINE:
        return "the machine"
    if name in MEASURED:
        return name.replace("_", ".", 1)
    return field_of(name).label if name in HEADED else key_of(name)


def _following(axis: str, cases: pd.DataFrame) -> tuple[str, ...]:
    """The settings that differ only because the axis does."""
    names = _FOLLOWING.get(axis, ())
    if cases.empty or not names:
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
