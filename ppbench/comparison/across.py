"""Cases that differ in one setting alone, pair by pair: throughput, bubble, memory, what moved.

    runs --- equal in all but the axis ---> Row of cases
    Row  --- base value, other value -----> Contrast, Pairing ---> Line, Breakdown

A case without a partner is named in the notes, with what the nearest one differs in.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ppbench.comparison import notes
from ppbench.comparison.axes import find_axis, key_of, ordered, value_named, work_note
from ppbench.comparison.drifts import notes_on_sessions, with_drifts
from ppbench.comparison.launches import Key, key_text, keys_of
from ppbench.comparison.lines import (
    Compared,
    Line,
    Pairing,
    lines_of,
    listed,
    of_keys,
    read_metrics,
)
from ppbench.comparison.noise import noises_of, slowdowns_and_launches
from ppbench.comparison.rows import Grid, num_pairs, pairs_of
from ppbench.comparison.runs import Chosen, choose_runs
from ppbench.display.cases import axis_text
from ppbench.errors import UsageError
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.store import Store

PROGRAM = "program_digest"
"""The setting whose values are contents of a program file."""
_OTHERS = {
    "runtime": ["engine", "torch"],
    "model_partition": ["uniform", "parameters"],
    "train_optimizer": ["adamw", "sgd"],
    "model_dtype": ["float32", "bfloat16"],
    "transfer_policy": ["early", "just_in_time"],
    "sharding_policy": ["ddp", "zero3"],
}
"""Settings of words: the usual value, and another."""


@dataclass(frozen=True)
class Contrast:
    """Two cases that differ in one setting, on one machine and measured alike."""

    axis: str
    base_value: Hashable
    head_value: Hashable
    base_key: Key  # of its launches
    head_key: Key
    common: tuple[str, ...]  # the settings in which it differs from other contrasts, in words
    has_other_pairs: bool  # whether some contrast is of other values

    @property
    def pair(self) -> str:
        """`afab -> 1f1b`."""
        values = (self.base_value, self.head_value)
        return " -> ".join(axis_text(self.axis, value) for value in values)

    @property
    def parts(self) -> tuple[str, ...]:
        """Its name beside the others, setting by setting."""
        has_pair = self.has_other_pairs or not self.common
        return (self.pair, *self.common) if has_pair else self.common

    @property
    def text(self) -> str:
        return ", ".join(self.parts)

    @property
    def fingerprint(self) -> str:
        return " / ".join(dict.fromkeys((self.base_key[1], self.head_key[1])))

    def values(self) -> dict[str, object]:
        """Its columns in `Across.frame`."""
        return {
            "axis": self.axis,
            "base_value": self.base_value,
            "head_value": self.head_value,
            "case": ", ".join(self.common),
            "base_case_id": self.base_key[0],
            "head_case_id": self.head_key[0],
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class Across(Compared[Contrast]):
    """Every pair of cases that differ in one setting: lines by pair and metric, with notes."""

    axis: str
    base: Hashable | None  # the value that others are compared with; None: all with all
    axis_values: tuple[Hashable, ...]  # in order
    title: str  # which runs were compared
    shared: str  # the usual settings that all pairs have alike, in words

    def __repr__(self) -> str:
        values = ", ".join(map(str, self.axis_values))
        return f"<Comparison across {key_of(self.axis)} ({values}): {self.counts() or 'no pair'}>"


def _runs_of(pairings: Iterable[Pairing[Contrast]]) -> pd.DataFrame:
    sides = [side for pairing in pairings for side in (pairing.base, pairing.head)]
    return pd.concat(sides).drop_duplicates("run_id").sort_values("run_id")


@dataclass(frozen=True)
class AxisQuestion:
    """The setting along which cases are compared, with which of its values, and by what."""

    axis: str
    base: object = None
    all_pairs: bool = False
    metrics: tuple[str, ...] = ()
    results: Path = Path("results")

    @property
    def setting(self) -> str:
        """The column of the setting. Raises UsageError."""
        return find_axis(self.axis)


def compare_across(
    axis: str,
    runs: Sequence[str] = (),
    *,
    base: object = None,
    all_pairs: bool = False,
    metrics: Sequence[str] = (),
    results: Path | str = Path("results"),
) -> Across:
    """Compare the cases of some runs that differ in one setting alone.

    `runs` are run ids, sweeps or sweep files; by default those of the last sweep. Each value of the
    setting is compared with `base`, or with `all_pairs` each with each. By default the base is the
    value that most others can be compared with: of several the smallest number, or the first in
    the sweep. Raises UsageError, SweepFileError and StoreError.
    """
    question = AxisQuestion(axis, base, all_pairs, tuple(metrics), Path(results))
    setting = question.setting
    read_metrics(metrics)
    chosen = choose_runs(runs, Store(question.results), has_older_programs=setting == PROGRAM)
    return compare_along(question, chosen)


def compare_along(question: AxisQuestion, chosen: Chosen, looks: Looks = ONE_LOOK) -> Across:
    """Compare the chosen runs at the last of some looks. Raises UsageError."""
    setting, chosen_metrics = question.setting, read_metrics(question.metrics)
    if question.all_pairs and question.base is not None:
        raise UsageError("--all-pairs: compares each value with each; leave --base out")
    grid = Grid(setting, chosen.runs)
    values = ordered(value for row in grid.rows for value in row.keys)
    if len(values) < 2:
        raise UsageError(_too_few_values(setting, values, chosen))
    compared_with: Hashable | None = None  # each is compared with each
    if question.base is not None:
        compared_with = value_named(question.base, grid.axis, values)
    elif not question.all_pairs:
        compared_with = max(values, key=lambda value: num_pairs(grid.rows, value))
    pairs = [(row, pair) for row in grid.rows for pair in pairs_of(row, values, compared_with)]
    paired = list({id(row): row for row, _ in pairs}.values())
    common = dict(zip(map(id, paired), grid.common_texts(paired), strict=True))
    has_other_pairs = len({pair for _, pair in pairs}) > 1
    keys_of_runs = keys_of(chosen.runs)
    pairings = []
    for row, (first, other) in pairs:
        own_keys = row.keys[first], row.keys[other]
        named = (grid.axis, first, other, *own_keys)
        base, head = (of_keys(chosen.runs, keys_of_runs, key) for key in own_keys)
        pairings.append(Pairing(Contrast(*named, common[id(row)], has_other_pairs), base, head))
    machines = set(chosen.runs["fingerprint"].dropna())
    slowdowns, launches = slowdowns_and_launches([chosen.store], machines, chosen_metrics)
    if pairings:
        keys = {key for p in pairings for key in (p.series.base_key, p.series.head_key)}
        noises = noises_of(keys, chosen_metrics, launches, slowdowns, _runs_of(pairings))
        for place, pairing in enumerate(pairings):
            # The larger noise of two cases; none where that of one is not known.
            of_both = [noises[key] for key in (pairing.series.base_key, pairing.series.head_key)]
            larger = {
                name: max((own[name] for own in of_both), key=lambda noise: noise.deviation)
                for name in of_both[0]
                if name in of_both[1]
            }
            pairings[place] = replace(pairing, noises=larger, slowdowns=slowdowns)
    pairings = with_drifts(pairings, chosen_metrics, [chosen.store])
    lines = lines_of(chosen_metrics, pairings, looks) if pairings else []
    file, num = chosen.sweep_file or "SWEEP", notes.launches_wanted(lines)
    more = f"measure more with: ppbench sweep {file} --set measure.launches={num}"
    found = [
        *_notes(grid, compared_with, pairings, chosen, lines),
        *notes.too_few(lines, ("", ""), more),
        *notes.opposed(lines),
        *notes.undecided(lines, more),
    ]
    return Across(
        axis=setting,
        base=compared_with,
        axis_values=tuple(values),
        title=chosen.title,
        shared=grid.shared_text(paired),
        stores=(chosen.store, chosen.store),
        pairings={pairing.series: pairing for pairing in pairings},
        lines=tuple(lines),
        notes=tuple(dict.fromkeys(found)),
    )


def _notes(
    grid: Grid,
    base: Hashable | None,
    pairings: Sequence[Pairing[Contrast]],
    chosen: Chosen,
    lines: Sequence[Line[Contrast]],
) -> Iterable[str]:
    if text := work_note(grid.axis):
        yield text
    yield from chosen.notes
    yield from grid.without_partner(base)
    if not chosen.failed.empty:
        texts = Grid("schedule", pd.concat([chosen.runs, chosen.failed])).texts()
        yield from notes.failures(chosen.failed, texts)
    if not pairings:
        return
    others, gaps = [], []  # pairs whose sides differ in the code or lie far apart in time
    for pairing in pairings:
        sides = (pairing.base, pairing.head)
        for column, word in (("commit", "commit"), ("changes", "changes"), ("code", "ppbench")):
            states = [set(side[column].dropna().map(key_text)) for side in sides]
            if all(states) and states[0] != states[1]:
                others.append(f"{pairing.series.text} ({word})")
                break
        if gap := notes.gap_between(*sides):
            gaps.append(f"{pairing.series.text} ({gap})")
    if others:
        yield (
            f"these pairs differ in the code that was measured too: {listed(others)}; measure both "
            "sides at one commit: ppbench sweep SWEEP"
        )
    if gaps:
        yield (
            f"these pairs were measured far apart: {listed(gaps)}: part of it is drift of the "
            "machine; measure both sides in one sweep: ppbench sweep SWEEP --rerun"
        )
    runs = _runs_of(pairings)
    known = {launch.run_id for line in lines for launch in line.discounted}
    yield from notes.outliers(runs, discounted=known)
    yield from notes.discounted(lines)
    yield from notes.cautions(runs)
    yield from notes_on_sessions(lines, pairings)


def _too_few_values(axis: str, values: Sequence[Hashable], chosen: Chosen) -> str:
    """Say that there is one value, where others are, and what would give two."""
    key, name = key_of(axis), axis_text(axis, values[0]) if values else ""
    sweep = chosen.sweep_file or "SWEEP"
    only = f"all have {name}" if values else "none of them is ok"
    lost = ordered(chosen.failed[axis])
    failed = [axis_text(axis, value) for value in lost if value not in values]
    elsewhere = ordered(chosen.store.runs([axis])[axis])
    others = [axis_text(axis, value) for value in elsewhere if value not in values]
    first = values[0] if values else None
    if axis == "schedule":
        two = f'["{first or "1f1b"}", "afab"]'
    elif axis in _OTHERS and first == _OTHERS[axis][0]:
        two = json.dumps(_OTHERS[axis])
    elif isinstance(first, bool):
        two = "[false, true]"
    else:
        two = f"[{first}, {2 * first}]" if isinstance(first, int) else f'["{first}", ...]'
    hints = [
        f"runs with {', '.join(failed)} failed: ppbench ls --where status!=ok" if failed else "",
        f"{chosen.store.folder} has runs with {', '.join(others[:4])}: name their sweeps"
        if others and not failed
        else "",
        f"two values come from: ppbench sweep {sweep} --set '{key}={two}'",
    ]
    return f"--across {key}: {chosen.title}, {only}; {'; '.join(filter(None, hints))}"
