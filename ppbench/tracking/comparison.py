"""Two sides beside each other: what became of each case, and which spans made it so.

Pairs are made by case, fingerprint and how it was measured. What was measured on another machine,
or over other steps, is another series: it is a line of its own where both sides have it, and a
note where one has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ppbench.analysis.breakdown import Figures, Moved, breakdown, launch_figures
from ppbench.analysis.compare import (
    FLOOR,
    METRICS,
    SPEED,
    Change,
    Metric,
    Noise,
    Pair,
    Verdict,
    compare,
)
from ppbench.analysis.ratios import FEWEST_LAUNCHES
from ppbench.analysis.stats import is_outlier
from ppbench.cautions import Caution
from ppbench.config.costs import TIMES
from ppbench.errors import UsageError, first_line, nearest
from ppbench.report.cases import case_text, cautions_of, varying_axes
from ppbench.store.noise import StoredNoise, read_noise
from ppbench.tracking.replicates import FRESH_S, MEASURED_ALIKE, SETTINGS, Key, keys_of
from ppbench.tracking.sides import Side

SHOWN = ("tokens_per_s", "bubble_fraction", "peak_memory_bytes")
"""The metrics that are compared unless others are asked for."""
_SPEEDS = (SPEED, "step_ns")
FAR_APART = 0.05
"""Of a launch from the median of its side, so that it is told."""


@dataclass(frozen=True)
class Series:
    """One case on one fingerprint, measured in one way: what may be compared."""

    case_id: str
    fingerprint: str
    text: str  # the case in words, beside the others
    key: Key = ()  # of its launches


@dataclass(frozen=True)
class Line:
    """What became of one figure of one case on one fingerprint."""

    series: Series
    metric: Metric
    change: Change
    noise: Noise | None


@dataclass(frozen=True)
class Breakdown:
    """The spans of one case on both sides."""

    series: Series
    moved: tuple[Moved, ...]


@dataclass(frozen=True)
class Comparison:
    """All lines, by case and then metric, and what a reader must know beside them."""

    base: Side
    head: Side
    axes: tuple[str, ...]  # settings in which the cases differ
    texts: Mapping[str, str]  # of every case of either side, by its id
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def series(self) -> list[Series]:
        return list(dict.fromkeys(line.series for line in self.lines))

    def changed(self) -> list[Series]:
        """The cases whose throughput, or step, is not what it was, or seems not to be.

        Of what is unclear, too: a stage that moved is seen in its spans where the step, which has
        the noise of all ranks, tells nothing.
        """
        changed = [
            line.series
            for line in self.lines
            if line.metric.name in _SPEEDS and _may_have_changed(line.change)
        ]
        return list(dict.fromkeys(changed))


def _may_have_changed(change: Change) -> bool:
    if change.verdict is Verdict.unclear and change.ratio is not None:
        return abs(math.log(change.ratio.estimate)) > math.log1p(change.floor)
    return change.verdict in (Verdict.faster, Verdict.slower)


def read_metrics(names: Sequence[str], default: Sequence[str] = SHOWN) -> list[Metric]:
    """Raises UsageError for a name that is none."""
    for name in names:
        if name not in METRICS:
            raise UsageError(f'--metric: unknown metric "{name}"{nearest(name, METRICS)}')
    return [METRICS[name] for name in dict.fromkeys(names or default)]


FloorOf = Callable[[Series], float]


def compare_sides(
    base: Side,
    head: Side,
    metrics: Sequence[Metric],
    noise_folders: Sequence[Path],
    floor_of: FloorOf = lambda _: FLOOR,
) -> Comparison:
    """Every case that both sides have, in the order of the head's sweep.

    `noise_folders` are the stores in which the machine's noise is looked for. Raises StoreError.
    """
    axes, texts = _texts(base, head)
    in_order = head.runs.sort_values("position", kind="stable")
    known = set(keys_of(base.runs))
    shared = _series([key for key in dict.fromkeys(keys_of(in_order)) if key in known], texts)
    noises, unused = _noises(noise_folders, shared, (base, head))
    by_metric = [_lines(metric, shared, (base, head), noises, floor_of) for metric in metrics]
    lines = [line for of_series in zip(*by_metric, strict=True) for line in of_series if line]
    notes = [*base.notes, *head.notes, *_notes(base, head, shared, texts), *unused, *_few(lines)]
    return Comparison(base, head, axes, texts, tuple(lines), tuple(dict.fromkeys(notes)))


def _series(keys: Sequence[Key], texts: Mapping[str, str]) -> list[Series]:
    """In words, with how it was measured where one case was in several ways."""
    found = []
    for key in keys:
        case_id, fingerprint, *_ = key
        alike = [one for one in keys if one[:2] == key[:2]]
        told = [texts[case_id], *_ways(key, alike)]
        found.append(Series(case_id, fingerprint, ", ".join(told), key))
    return found


def _ways(key: Key, others: Sequence[Key]) -> list[str]:
    """The settings of `measure` in which it differs from any of the others."""
    return [
        f"{name.replace('_', '.', 1)}={value or 'unknown'}"
        for name, value, *its in zip(MEASURED_ALIKE, key, *others, strict=True)
        if name in SETTINGS and set(its) - {value}
    ]


def _keys(runs: pd.DataFrame) -> set[tuple[str, str]]:
    """Cases and their fingerprints."""
    return {(case_id, fingerprint) for case_id, fingerprint, *_ in keys_of(runs)}


def _texts(base: Side, head: Side) -> tuple[tuple[str, ...], dict[str, str]]:
    """In which settings cases differ, and what each is called.

    The times of a file of costs are no part of the case.
    """
    every = pd.concat([head.runs, head.failed, base.runs, base.failed])
    cases = every.drop_duplicates("case_id").copy()
    cases.loc[cases["emulated_costs"].fillna("") != "", list(TIMES)] = "[]"
    axes = varying_axes(cases) if len(cases) else ()
    return axes, {str(row["case_id"]): case_text(row, axes) for _, row in cases.iterrows()}


def _lines(
    metric: Metric,
    shared: Sequence[Series],
    sides: tuple[Side, Side],
    noises: Mapping[Series, StoredNoise],
    floor_of: FloorOf,
) -> list[Line | None]:
    """None for a series that has no such figure on either side, as emulated ranks have no peak."""
    pairs: list[Pair | None] = []
    for one in shared:
        base, head = (_figures(side.runs, one, metric) for side in sides)
        noise = _noise(noises.get(one), metric)
        pairs.append(Pair(base, head, noise, floor_of(one)) if base or head else None)
    changes = iter(compare(metric, [pair for pair in pairs if pair]))
    return [
        Line(one, metric, next(changes), pair.noise) if pair else None
        for one, pair in zip(shared, pairs, strict=True)
    ]


def of_series(runs: pd.DataFrame, one: Series) -> pd.DataFrame:
    return runs[[key == one.key for key in keys_of(runs)]]


def _figures(runs: pd.DataFrame, one: Series, metric: Metric) -> tuple[float, ...]:
    return tuple(float(value) for value in of_series(runs, one)[metric.name].dropna())


def _noises(
    folders: Sequence[Path], shared: Sequence[Series], sides: tuple[Side, Side]
) -> tuple[dict[Series, StoredNoise], list[str]]:
    """The machine's noise, from launches that are not compared: those would count twice."""
    compared = {str(run_id) for side in sides for run_id in side.runs["run_id"]}
    usable: dict[Series, StoredNoise] = {}
    unused = []
    for one in shared:
        read = [read_noise(folder, one.fingerprint, one.case_id) for folder in folders]
        found = [noise for noise in read if noise is not None]
        apart = [n for n in found if n.run_ids is not None and compared.isdisjoint(n.run_ids)]
        if apart:
            usable[one] = apart[0]
        elif found:
            unused.append(one.text)
    told = (
        f"stored noise is not used of {_listed(unused)}: it is from launches that are compared "
        "here, or does not tell from which; measure it with others: ppbench noise SWEEP"
    )
    return usable, [told] if unused else []


def _noise(stored: StoredNoise | None, metric: Metric) -> Noise | None:
    if stored is None or metric.name not in stored.deviations:
        return None
    return Noise(stored.deviations[metric.name], stored.num_launches)


def break_down(comparison: Comparison, wanted: Iterable[Series]) -> list[Breakdown]:
    """Which spans moved in these cases; one whose spans are not stored is left out."""
    found = []
    for one in wanted:
        base, head = (_launches(side, one) for side in (comparison.base, comparison.head))
        if base and head:
            step_ns = float(of_series(comparison.base.runs, one)["step_ns"].median())
            found.append(Breakdown(one, tuple(breakdown(base, head, step_ns))))
    return found


def _launches(side: Side, one: Series) -> list[Figures]:
    spans = side.store.table("spans", of_series(side.runs, one)["run_id"])
    return [launch_figures(of_run) for _, of_run in spans.groupby("run_id", sort=False)]


def _notes(
    base: Side, head: Side, shared: Sequence[Series], texts: Mapping[str, str]
) -> Iterable[str]:
    yield from _one_sided(base, head, texts)
    yield from _other_machines(base, head, texts)
    yield from _other_ways(base, head, texts)
    for side, word in ((base, "base"), (head, "head")):
        yield from _failures(side, word, texts)
        yield from _disturbed(side, word, shared)
    yield from _codes(base, head)
    yield from _apart(base, head, shared)
    yield from _cautions(base, head, shared)


def _one_sided(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    ids = [set(side.runs["case_id"]) | set(side.failed["case_id"]) for side in (base, head)]
    for only, word in ((ids[0] - ids[1], "base"), (ids[1] - ids[0], "head")):
        if only:
            yield f"only {word} has {_listed(sorted(texts[str(one)] for one in only))}"


def _other_machines(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    """Of cases that both sides have."""
    keys = [_keys(side.runs) for side in (base, head)]
    cases = {case for case, _ in keys[0]} & {case for case, _ in keys[1]}
    for only, word in ((keys[0] - keys[1], "base"), (keys[1] - keys[0], "head")):
        prints = sorted({fingerprint for case, fingerprint in only if case in cases})
        for one in prints:
            told = sorted(texts[case] for case, its in only if its == one and case in cases)
            yield (
                f"only {word} was measured on the machine {one} ({_listed(told)}): what machines "
                "differ in is no change of the code, so these runs are not compared"
            )


def _other_ways(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    """Of cases that both sides have on the same machine."""
    first, last = (list(dict.fromkeys(keys_of(side.runs))) for side in (base, head))
    for mine, theirs, word in ((first, last, "base"), (last, first, "head")):
        for key in mine:
            others = [one for one in theirs if one[:2] == key[:2]]
            if others and key not in theirs:
                told = ", ".join(_ways(key, others))
                yield (
                    f"only {word} was measured with {told} ({texts[key[0]]}): runs that were "
                    "measured otherwise are not compared"
                )


def _failures(side: Side, word: str, texts: Mapping[str, str]) -> Iterable[str]:
    for case_id, rows in side.failed.groupby("case_id", sort=False):
        last = rows.iloc[-1]
        launches = "launch" if len(rows) == 1 else "launches"
        yield (
            f"{texts[str(case_id)]}: {len(rows)} {launches} failed at {word}, {last['status']}: "
            f"{first_line(last['error'] or 'no error was recorded')} (ppbench show "
            f"{last['run_id']})"
        )


def _codes(base: Side, head: Side) -> Iterable[str]:
    codes = [sorted(set(side.runs["code"].dropna())) for side in (base, head)]
    if all(codes) and codes[0] != codes[1]:
        old, new = (", ".join(one) for one in codes)
        yield (
            f"base was measured by another ppbench (code {old}) than head ({new}): unless ppbench "
            "itself is what is tracked, measure both with one: ppbench compare --run"
        )


def _apart(base: Side, head: Side, shared: Sequence[Series]) -> Iterable[str]:
    """By how long the times differ between which the sides were measured."""
    times = [_times_of(side.runs, shared) for side in (base, head)]
    if any(one.empty for one in times):
        return
    (first, last), (other_first, other_last) = ((one.min(), one.max()) for one in times)
    apart_s = max(other_first - last, first - other_last).total_seconds()
    if apart_s > FRESH_S:
        days, hours = apart_s / 86400, apart_s / 3600
        told = f"{days:.0f} days" if days >= 2 else f"{hours:.1f} hours"
        yield (
            f"measured {told} apart: what drifted since is in the difference; ppbench compare "
            "--run interleaves"
        )


def _times_of(runs: pd.DataFrame, shared: Sequence[Series]) -> pd.Series:
    keys = {one.key for one in shared}
    known = runs.loc[[key in keys for key in keys_of(runs)], "created_at"]
    return pd.to_datetime(known, utc=True, format="ISO8601", errors="coerce").dropna()


def _disturbed(side: Side, word: str, shared: Sequence[Series]) -> Iterable[str]:
    """Launches that stand apart from the others of their case: they count, and hide changes."""
    keys = pd.Series(keys_of(side.runs), side.runs.index)
    for one in shared:
        runs = side.runs[keys == one.key]
        speeds = runs[SPEED]
        if len(runs) < FEWEST_LAUNCHES or speeds.isna().any():
            continue
        away = speeds / speeds.median() - 1
        is_apart = np.array(is_outlier(speeds.tolist())) & (away.abs() > FAR_APART).to_numpy()
        for place in np.flatnonzero(is_apart):
            yield (
                f"run {runs['run_id'].iloc[place]} of {word} stands apart from the others of its "
                f"case, by {away.iloc[place]:+.0%} of their median: it counts, and may hide a "
                "change; measure more launches"
            )


def _cautions(base: Side, head: Side, shared: Sequence[Series]) -> Iterable[str]:
    runs = pd.concat(
        [of_series(s.runs, one) for s in (base, head) for one in shared] or [base.runs]
    )
    told: dict[str, int] = {}
    for _, row in runs.iterrows():
        for name in cautions_of(row):
            told[name] = told.get(name, 0) + 1
    for name, num in told.items():
        remedy = Caution[name].remedy if name in Caution.__members__ else "unknown to this version"
        yield f"{num} of {len(runs)} runs carry the caution {name}: {remedy}"


def _few(lines: Sequence[Line]) -> Iterable[str]:
    few = [
        line for line in lines if min(line.change.num_base, line.change.num_head) < FEWEST_LAUNCHES
    ]
    told = dict.fromkeys(
        f"{line.series.text} ({line.change.num_base} at base, {line.change.num_head} at head)"
        for line in few
    )
    if told:
        yield (
            f"a verdict takes {FEWEST_LAUNCHES} launches a side, better 5: {_listed(list(told))}; "
            "measure more with: ppbench compare BASE HEAD SWEEP --run --launches 5"
        )


def _listed(words: Sequence[str], most: int = 4) -> str:
    shown = "; ".join(words[:most])
    return shown if len(words) <= most else f"{shown}; and {len(words) - most} more"
