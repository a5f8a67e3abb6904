"""Sides that were not measured in the same sessions: what that adds to their difference, in words.

The drift between sessions is estimated from all launches of a case in the stores, on its machine,
of whatever commit; see `comparison.sessions.drift_in`. Sides that share their sessions need none of
it, and no file is read for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from ppbench.comparison.launches import COLUMNS, MEASURED_ALIKE, keys_of
from ppbench.comparison.lines import Line, Pairing, S, listed, of_keys
from ppbench.comparison.notes import one_session
from ppbench.comparison.sessions import drift_in
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Metric
from ppbench.judge.noise import Drift
from ppbench.judge.verdicts import SPEED
from ppbench.store import Condition, Store


def with_drifts(
    pairings: Sequence[Pairing[S]], metrics: Sequence[Metric], stores: Iterable[Store]
) -> list[Pairing[S]]:
    """The pairings with the drifts of those whose sides share no sessions, or not alike."""
    known_stores, found = list(dict.fromkeys(stores)), []
    for pairing in pairings:
        of_sides = pairing.evidence(metrics[0]) if metrics else None
        if of_sides is None or not of_sides.sessions_apart:
            found.append(pairing)
            continue
        launches = _launches_like(pairing.base.iloc[:1], known_stores)
        drifts = {metric.name: drift_in(launches, metric) for metric in metrics}
        known = {name: drift for name, drift in drifts.items() if drift is not None}
        found.append(replace(pairing, drifts=known))
    return found


def notes_on_sessions(lines: Sequence[Line[S]], pairings: Sequence[Pairing[S]]) -> Iterator[str]:
    """Say which sides share no session, and whether it is known what that adds."""
    metrics = list(dict.fromkeys(line.metric for line in lines))
    evidences = [pairing.evidence(metrics[0]) for pairing in pairings] if metrics else []
    if not any(evidence.sessions_apart for evidence in evidences):
        yield from one_session(lines, pairings)
        return
    alone = [
        pairing
        for pairing, evidence in zip(pairings, evidences, strict=True)
        if evidence.never_share_a_session
    ]
    begin = "base and head were never measured in one session, so the drift between sessions is in "
    if known := [pairing for pairing in alone if pairing.drifts]:
        sizes = dict.fromkeys(
            f"{name} {drift.deviation * 100:.2g} {'points' if METRICS[name].in_points else '%'} in "
            f"{drift.num_sessions} sessions"
            for pairing in known
            for name, drift in pairing.drifts.items()
        )
        names = listed([pairing.series.text for pairing in known])
        yield f"{begin}their difference and in its interval ({'; '.join(sizes)}): {names}"
    if unknown := [pairing.series.text for pairing in alone if not pairing.drifts]:
        yield (
            f"{begin}their difference, and its size is not known: {listed(unknown)}; it takes "
            "launches of one commit in two sessions, or measure both sides in turn: ppbench "
            "compare --run"
        )


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
