"""Compares two sides case by case, and finds the spans that explain a change.

Runs are paired by case, fingerprint and measurement settings. Runs from another machine, or over
other steps, are another series: it has its own line if both sides have it, else a note.

Sides are given by name, and can be measured first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from ppbench.analysis.breakdown import Figures, Moved, breakdown, launch_figures
from ppbench.cautions import Caution
from ppbench.commits.bench import SILENT, Progress, measure_sides, read_tracked
from ppbench.commits.launches import FRESH_S, MEASURED_ALIKE, SETTINGS, Key, keys_of
from ppbench.commits.sides import WORKTREE, Places, Side, both_fresh, find_side
from ppbench.config.case import TIMES
from ppbench.config.sweep import Sweep
from ppbench.display.cases import case_text, cautions_of, varying_axes
from ppbench.display.metrics import METRICS
from ppbench.errors import UsageError, first_line, nearest
from ppbench.statistics import verdicts
from ppbench.statistics.significance import FEWEST_LAUNCHES, Ratio
from ppbench.statistics.step_times import is_outlier
from ppbench.statistics.verdicts import (
    FLOOR,
    SPEED,
    Change,
    Metric,
    Noise,
    Pair,
    Verdict,
)
from ppbench.store import Store
from ppbench.store.noise import StoredNoise, read_noise

SHOWN = ("tokens_per_s", "bubble_fraction", "peak_memory_bytes")
"""The metrics that are compared by default."""
_SPEEDS = (SPEED, "step_ns")
OUTLYING = 0.05
"""Relative distance from its side's median beyond which a launch is reported."""


@dataclass(frozen=True)
class Series:
    """The launches that may be compared: one case, machine and choice of measurement settings."""

    case_id: str
    fingerprint: str
    text: str  # the case in words, beside the others
    key: Key = ()  # of its launches


@dataclass(frozen=True)
class Line:
    """The change of one metric of one series."""

    series: Series
    metric: Metric
    change: Change
    noise: Noise | None

    def values(self) -> dict[str, object]:
        """The row of this line in `Comparison.frame`."""
        change, series = self.change, self.series
        return {
            "case_id": series.case_id,
            "case": series.text,
            "fingerprint": series.fingerprint,
            "metric": self.metric.name,
            "base": change.base,
            "head": change.head,
            **ends("ratio", change.ratio),
            **ends("difference", change.difference),
            "p": change.p,
            "verdict": str(change.verdict),
            "num_base": change.num_base,
            "num_head": change.num_head,
            "floor": change.floor,
            "noise": None if self.noise is None else self.noise.deviation,
        }


def ends(name: str, ratio: Ratio | None) -> dict[str, object]:
    """An estimate and the ends of its interval, as columns; null where it was not made."""
    values = (None,) * 3 if ratio is None else (ratio.estimate, ratio.low, ratio.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


@dataclass(frozen=True)
class Breakdown:
    """The changes of the spans of one series."""

    series: Series
    moved: tuple[Moved, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """All lines, by case and then metric, with notes that qualify them."""

    base: Side
    head: Side
    axes: tuple[str, ...]  # settings in which the cases differ
    texts: Mapping[str, str]  # of every case of either side, by its id
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        verdicts = Counter(str(line.change.verdict) for line in self.lines)
        counts = ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items())
        names = f"{self.base.name} with {self.head.name}"
        return f"<Comparison of {names}: {counts or 'no case in common'}>"

    @property
    def frame(self) -> pd.DataFrame:
        """One row of raw figures per case and metric."""
        return pd.DataFrame([line.values() for line in self.lines])

    @property
    def has_verdict(self) -> bool:
        """Whether any line has launches enough for a verdict."""
        return any(line.change.verdict is not Verdict.insufficient for line in self.lines)

    def series(self) -> list[Series]:
        return list(dict.fromkeys(line.series for line in self.lines))

    def changed(self) -> list[Series]:
        """Return the series whose throughput or step has changed, or may have.

        Unclear ones are included: a stage that moved shows in its spans even where the step, which
        has the noise of all ranks, does not.
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
    """Return the metrics with these names. Raises UsageError for an unknown one."""
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
    """Compare every case that both sides have, in the order of the head's sweep.

    `noise_folders` are the stores that may hold the machine's noise. Raises StoreError.
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
    """Name the series; measurement settings are added where one case has several."""
    named = []
    for key in keys:
        case_id, fingerprint, *_ = key
        alike = [other for other in keys if other[:2] == key[:2]]
        words = [texts[case_id], *_differing_settings(key, alike)]
        named.append(Series(case_id, fingerprint, ", ".join(words), key))
    return named


def _differing_settings(key: Key, others: Sequence[Key]) -> list[str]:
    """The settings of `measure` in which a key differs from any of the others."""
    return [
        f"{name.replace('_', '.', 1)}={value or 'unknown'}"
        for name, value, *values in zip(MEASURED_ALIKE, key, *others, strict=True)
        if name in SETTINGS and set(values) - {value}
    ]


def _machines(runs: pd.DataFrame) -> set[tuple[str, str]]:
    """Pairs of case and fingerprint."""
    return {(case_id, fingerprint) for case_id, fingerprint, *_ in keys_of(runs)}


def _texts(base: Side, head: Side) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the settings in which cases differ, and the name of each case.

    The times from a file of costs are not part of a case.
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
    """Compare a metric; None for a series without it, as emulated ranks have no peak memory."""
    pairs: list[Pair | None] = []
    for series in shared:
        base, head = (_figures(side.runs, series, metric) for side in sides)
        stored = noises.get(series)
        noise = None if stored is None else stored.of_metric(metric.name)
        pairs.append(Pair(base, head, noise, floor_of(series)) if base or head else None)
    changes = iter(verdicts.compare(metric, [pair for pair in pairs if pair]))
    return [
        Line(series, metric, next(changes), pair.noise) if pair else None
        for series, pair in zip(shared, pairs, strict=True)
    ]


def of_series(runs: pd.DataFrame, series: Series) -> pd.DataFrame:
    return runs[[key == series.key for key in keys_of(runs)]]


def _figures(runs: pd.DataFrame, series: Series, metric: Metric) -> tuple[float, ...]:
    return tuple(float(value) for value in of_series(runs, series)[metric.name].dropna())


def _noises(
    folders: Sequence[Path], shared: Sequence[Series], sides: tuple[Side, Side]
) -> tuple[dict[Series, StoredNoise], list[str]]:
    """Return the machine's noise, but not from launches that are compared: they would count twice.

    The second value is a note on the noise that was ignored.
    """
    compared = {str(run_id) for side in sides for run_id in side.runs["run_id"]}
    usable: dict[Series, StoredNoise] = {}
    unused = []
    for series in shared:
        read = [read_noise(folder, series.fingerprint, series.case_id) for folder in folders]
        stored = [noise for noise in read if noise is not None]
        others = [n for n in stored if n.run_ids is not None and compared.isdisjoint(n.run_ids)]
        if others:
            usable[series] = others[0]
        elif stored:
            unused.append(series.text)
    text = (
        f"the stored noise of {_listed(unused)} is ignored: it was measured from the launches "
        "compared here, or does not say from which; measure it with others: ppbench noise SWEEP"
    )
    return usable, [text] if unused else []


def break_down(comparison: Comparison, wanted: Iterable[Series]) -> list[Breakdown]:
    """Find the spans that changed in these series, as far as their spans are stored."""
    breakdowns = []
    for series in wanted:
        base, head = (_launches(side, series) for side in (comparison.base, comparison.head))
        if base and head:
            step_ns = float(of_series(comparison.base.runs, series)["step_ns"].median())
            breakdowns.append(Breakdown(series, tuple(breakdown(base, head, step_ns))))
    return breakdowns


def _launches(side: Side, series: Series) -> list[Figures]:
    spans = side.store.table("spans", of_series(side.runs, series)["run_id"])
    return [launch_figures(of_run) for _, of_run in spans.groupby("run_id", sort=False)]


def _notes(
    base: Side, head: Side, shared: Sequence[Series], texts: Mapping[str, str]
) -> Iterable[str]:
    yield from _one_sided(base, head, texts)
    yield from _other_machines(base, head, texts)
    yield from _other_settings(base, head, texts)
    for side, word in ((base, "base"), (head, "head")):
        yield from _failures(side, word, texts)
        yield from _outliers(side, word, shared)
    yield from _codes(base, head)
    yield from _time_between(base, head, shared)
    yield from _cautions(base, head, shared)


def _one_sided(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    ids = [set(side.runs["case_id"]) | set(side.failed["case_id"]) for side in (base, head)]
    for only, word in ((ids[0] - ids[1], "base"), (ids[1] - ids[0], "head")):
        if only:
            yield f"only {word} has {_listed(sorted(texts[str(case_id)] for case_id in only))}"


def _other_machines(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    keys = [_machines(side.runs) for side in (base, head)]
    cases = {case for case, _ in keys[0]} & {case for case, _ in keys[1]}
    for only, word in ((keys[0] - keys[1], "base"), (keys[1] - keys[0], "head")):
        prints = sorted({fingerprint for case, fingerprint in only if case in cases})
        for machine in prints:
            names = sorted(
                texts[case] for case, other in only if other == machine and case in cases
            )
            yield (
                f"only {word} was measured on the machine {machine} ({_listed(names)}): these runs "
                "are not compared, since machines differ in more than the code"
            )


def _other_settings(base: Side, head: Side, texts: Mapping[str, str]) -> Iterable[str]:
    first, last = (list(dict.fromkeys(keys_of(side.runs))) for side in (base, head))
    for mine, theirs, word in ((first, last, "base"), (last, first, "head")):
        for key in mine:
            others = [other for other in theirs if other[:2] == key[:2]]
            if others and key not in theirs:
                settings = ", ".join(_differing_settings(key, others))
                yield (
                    f"only {word} was measured with {settings} ({texts[key[0]]}): runs with "
                    "different measurement settings are not compared"
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
        old, new = (", ".join(hashes) for hashes in codes)
        yield (
            f"base was measured by another ppbench (code {old}) than head ({new}): unless ppbench "
            "itself is tracked, measure both with one version: ppbench compare --run"
        )


def _time_between(base: Side, head: Side, shared: Sequence[Series]) -> Iterable[str]:
    times = [_times_of(side.runs, shared) for side in (base, head)]
    if any(moments.empty for moments in times):
        return
    (first, last), (other_first, other_last) = ((m.min(), m.max()) for m in times)
    between_s = max(other_first - last, first - other_last).total_seconds()
    if between_s > FRESH_S:
        days, hours = between_s / 86400, between_s / 3600
        gap = f"{days:.0f} days" if days >= 2 else f"{hours:.1f} hours"
        yield (
            f"base and head were measured {gap} from each other: the difference includes drift of "
            "the machine; interleave the launches with: ppbench compare --run"
        )


def _times_of(runs: pd.DataFrame, shared: Sequence[Series]) -> pd.Series:
    keys = {series.key for series in shared}
    known = runs.loc[[key in keys for key in keys_of(runs)], "created_at"]
    return pd.to_datetime(known, utc=True, format="ISO8601", errors="coerce").dropna()


def _outliers(side: Side, word: str, shared: Sequence[Series]) -> Iterable[str]:
    """Name the launches far from the others of their case: they count, and hide changes."""
    keys = pd.Series(keys_of(side.runs), side.runs.index)
    for series in shared:
        runs = side.runs[keys == series.key]
        speeds = runs[SPEED]
        if len(runs) < FEWEST_LAUNCHES or speeds.isna().any():
            continue
        away = speeds / speeds.median() - 1
        is_far = np.array(is_outlier(speeds.tolist())) & (away.abs() > OUTLYING).to_numpy()
        for place in np.flatnonzero(is_far):
            yield (
                f"run {runs['run_id'].iloc[place]} of {word} is an outlier, "
                f"{away.iloc[place]:+.0%} from the median of its case: it counts, and may hide a "
                "change; measure more launches"
            )


def _cautions(base: Side, head: Side, shared: Sequence[Series]) -> Iterable[str]:
    runs = pd.concat(
        [of_series(side.runs, series) for side in (base, head) for series in shared] or [base.runs]
    )
    counts = Counter(name for _, row in runs.iterrows() for name in cautions_of(row))
    for name, num in counts.items():
        remedy = Caution[name].remedy if name in Caution.__members__ else "unknown to this version"
        yield f"{num} of {len(runs)} runs carry the caution {name}: {remedy}"


def _few(lines: Sequence[Line]) -> Iterable[str]:
    few = [
        line for line in lines if min(line.change.num_base, line.change.num_head) < FEWEST_LAUNCHES
    ]
    names = dict.fromkeys(
        f"{line.series.text} ({line.change.num_base} at base, {line.change.num_head} at head)"
        for line in few
    )
    if names:
        yield (
            f"a verdict needs {FEWEST_LAUNCHES} launches a side, better 5: {_listed(list(names))}; "
            "measure more with: ppbench compare BASE HEAD SWEEP --run --launches 5"
        )


def _listed(words: Sequence[str], most: int = 4) -> str:
    shown = "; ".join(words[:most])
    return shown if len(words) <= most else f"{shown}; and {len(words) - most} more"


def compare(
    base: str | None,
    head: str = WORKTREE,
    *,
    sweep: Path | str | None = None,
    metrics: Sequence[str] = (),
    launches: int | None = None,
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
) -> Comparison:
    """Compare two sides case by case.

    A side is named by a revision, a run, a sweep or a results folder. With a `sweep` file only its
    cases are compared. With `launches` both sides are measured first, so often each, and `base` may
    be None for the repository's default. Raises UsageError, NotMeasuredError, StoreError,
    LaunchError and SweepInterruptedError.
    """
    chosen, results, begun = read_metrics(metrics), Path(results), datetime.now(UTC)
    if base is None and launches is None:
        raise UsageError("BASE: is missing; name it, or measure both sides with --run")
    planned = None if sweep is None else read_tracked(sweep)
    if launches is not None:
        base, head = measure_sides(planned, base, head, launches, results, progress)
    places = places_of(planned, results)
    first, last = (of_sweep(find_side(str(name), places), planned) for name in (base, head))
    if launches is not None:
        first, last = both_fresh(first, last, begun)
    return compare_sides(first, last, chosen, noise_folders(results, first, last))


def places_of(sweep: Sweep | None, results: Path) -> Places:
    """The store, and the repository that a sweep tracks or else the one around this folder."""
    return Places(Store(results), Path.cwd() if sweep is None else sweep.track.repo)


def of_sweep(side: Side, sweep: Sweep | None) -> Side:
    """The side with the cases of a sweep only, if there is one."""
    return side if sweep is None else side.of_cases(case.case_id for case, _ in sweep.cases)


def noise_folders(results: Path, *sides: Side) -> list[Path]:
    """The stores in which the machine's noise may be kept, the named one first."""
    return list(dict.fromkeys([results, *(side.store.folder for side in sides)]))
