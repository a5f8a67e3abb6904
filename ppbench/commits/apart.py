"""Sides that were not measured in the same sessions: what that adds to their difference, in words.

The drift between sessions is estimated from all launches of a case in the stores, on its machine,
of whatever commit; see `comparison.sessions.drift_in`. Sides that share their sessions need none of
it, and no file is read for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ppbench.comparison.launches import COLUMNS, MEASURED_ALIKE, keys_of
from ppbench.comparison.lines import Line, Pairing, S, listed, of_keys
from ppbench.comparison.notes import one_session
from ppbench.comparison.sessions import (
    UNKNOWN,
    are_shared,
    drift_in,
    moments_of,
    number_sessions,
    shares_apart,
)
from ppbench.display.metrics import METRICS
from ppbench.statistics.drift import with_drift, without_drift
from ppbench.statistics.sessions import Drift
from ppbench.statistics.verdicts import SPEED, Metric
from ppbench.store import Condition, Store


@dataclass(frozen=True)
class _Sessions:
    """The numbers of the sessions of both sides of a pairing, launch by launch."""

    base: tuple[int, ...]
    head: tuple[int, ...]

    @property
    def is_known(self) -> bool:
        return bool(self.base and self.head) and UNKNOWN not in (*self.base, *self.head)

    @property
    def apart(self) -> float:
        return shares_apart(self.base, self.head) if self.is_known else 0.0

    @property
    def are_never_shared(self) -> bool:
        return self.is_known and not set(self.base) & set(self.head)


def on_one_level(pairings: Sequence[Pairing[S]], metrics: Sequence[Metric]) -> list[Pairing[S]]:
    """The pairings with the figures of shared sessions moved to one level, for their verdicts."""
    moved = []
    for pairing in pairings:
        sessions = _sessions(pairing)
        if len(set(sessions.base)) < 2 or not are_shared(sessions.base, sessions.head):
            moved.append(pairing)
            continue
        base, head = pairing.base.copy(), pairing.head.copy()
        numbers = (sessions.base, sessions.head)
        for metric in metrics:
            figures = (base[metric.name].tolist(), head[metric.name].tolist())
            base[metric.name], head[metric.name] = without_drift(metric, figures, numbers)
        moved.append(replace(pairing, base=base, head=head))
    return moved


def include_drift(
    lines: Sequence[Line[S]], pairings: Sequence[Pairing[S]], stores: Iterable[Store]
) -> tuple[list[Line[S]], list[str]]:
    """Put the drift between sessions into lines whose sides share none; return notes too.

    The lines may be those of figures on one level: their medians become those that were measured.
    """
    by_pairing = {pairing.series: pairing for pairing in pairings}
    own = []
    for line in lines:
        pairing, name = by_pairing[line.series], line.metric.name
        base, head = (
            float(figures.median()) if len(figures) else None
            for figures in (pairing.base[name].dropna(), pairing.head[name].dropna())
        )
        own.append(replace(line, change=replace(line.change, base=base, head=head)))
    lines = own
    by_series = {pairing.series: _sessions(pairing) for pairing in pairings}
    apart = {series: one for series, one in by_series.items() if one.apart}
    if not apart:
        return list(lines), list(one_session(lines, pairings))
    # The drift of each metric of the series whose sides share no sessions, or not alike.
    known_stores = list(dict.fromkeys(stores))
    launches = {
        series: _launches_like(by_pairing[series].base.iloc[:1], known_stores) for series in apart
    }
    drifts = {
        (line.series, line.metric): drift_in(launches[line.series], line.metric)
        for line in lines
        if line.series in apart
    }
    wider = []
    for line in lines:
        drift = drifts.get((line.series, line.metric))
        change = line.change
        if drift is not None:
            share = by_series[line.series].apart
            change = with_drift(line.metric, change, drift, share, len(pairings))
        wider.append(replace(line, change=change))
    alone = [series for series, sessions in apart.items() if sessions.are_never_shared]
    begin = "base and head were never measured in one session, so the drift between sessions is in "
    unknown = [
        series.text
        for series in alone
        if not any(drift for (other, _), drift in drifts.items() if other == series)
    ]
    texts = []
    if known := [series.text for series in alone if series.text not in unknown]:
        found = [
            f"{metric.name} {drift.deviation * 100:.2g} {'points' if metric.in_points else '%'} in "
            f"{drift.num_sessions} sessions"
            for (series, metric), drift in drifts.items()
            if drift is not None and apart[series].are_never_shared
        ]
        sizes = "; ".join(dict.fromkeys(found))
        texts.append(f"{begin}their difference and in its interval ({sizes}): {listed(known)}")
    if unknown:
        texts.append(
            f"{begin}their difference, and its size is not known: {listed(unknown)}; it takes "
            "launches of one commit in two sessions, or measure both sides in turn: ppbench "
            "compare --run"
        )
    return wider, texts


def _sessions(pairing: Pairing[S]) -> _Sessions:
    base, head = moments_of(pairing.base), moments_of(pairing.head)
    numbers = number_sessions([*base, *head])
    return _Sessions(tuple(numbers[: len(base)]), tuple(numbers[len(base) :]))


def drift_like(row: Mapping[Hashable, object], store: Store) -> Drift | None:
    """The drift of throughput between the sessions in a store, for the case of a row of `runs`."""
    return drift_in(_launches_like(pd.DataFrame([row]), [store]), METRICS[SPEED])


def _launches_like(launch: pd.DataFrame, stores: Sequence[Store]) -> pd.DataFrame:
    """All launches in the stores that compare with the given one, whatever their commit."""
    row, key = launch.iloc[0], keys_of(launch)[0]
    columns = [*COLUMNS, *METRICS]
    same = [Condition(name, "=", str(row[name])) for name in MEASURED_ALIKE[:2]]
    rows = pd.concat([store.runs(columns, same) for store in stores])
    rows = rows[rows["status"] == "ok"].drop_duplicates("run_id")
    return of_keys(rows, keys_of(rows), key)
