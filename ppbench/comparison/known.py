"""What a store says of cases before they are launched: their noise, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ppbench.comparison.launches import FRESH_S, fingerprint_of, key_of
from ppbench.comparison.sessions import noises_of, slowdowns_and_launches
from ppbench.config.sweep import Sweep
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Noise
from ppbench.judge.verdicts import SPEED
from ppbench.store import Store

_RUN_ID_TIME = "%Y%m%dT%H%M%S"


@dataclass(frozen=True)
class Known:
    """What is known of the cases before they are launched."""

    num_cases: int
    noise: Noise | None = None  # of the noisiest case
    round_s: float | None = None  # seconds of one launch of each side


def known_of(sweep: Sweep, results: Path, num_sides: int) -> Known:
    """The noise of a sweep's noisiest case and the time of its launches, as far as stored.

    In a round all cases are launched, so often each as there are sides to them.
    """
    fingerprints = {case.case_id: fingerprint_of(case) for case, _ in sweep.cases}
    if not results.exists():
        return Known(len(fingerprints))
    store, metrics = Store(results), [METRICS[SPEED]]
    slowdowns, launches = slowdowns_and_launches([store], set(fingerprints.values()), metrics)
    keys = [key_of(*planned) for planned in sweep.cases]
    noises = noises_of(keys, metrics, launches, slowdowns).values()
    noisiest = max(
        (by_metric[SPEED] for by_metric in noises if SPEED in by_metric),
        key=lambda noise: noise.deviation,
        default=None,
    )
    # A launch of all cases takes the time from the end of one launch to that of the next, where it
    # followed within the hour, and at least the time of the runs alone, without the start of their
    # ranks. A run's id has the time when it began.
    runs = store.runs(["run_id", "case_id", "fingerprint", "status", "created_at"])
    is_here = runs["case_id"].map(fingerprints) == runs["fingerprint"]
    runs = runs[(runs["status"] == "ok") & is_here].sort_values("run_id")
    if set(runs["case_id"]) != set(fingerprints):
        return Known(len(fingerprints), noisiest)  # one was never launched
    ended = pd.to_datetime(runs["created_at"], utc=True, format="ISO8601")
    begun = [
        datetime.strptime(one[:15], _RUN_ID_TIME).replace(tzinfo=UTC) for one in runs["run_id"]
    ]
    took_s = (ended - pd.Series(begun, runs.index)).dt.total_seconds().clip(lower=0)
    alone_s = float(took_s.groupby(runs["case_id"]).median().sum())
    is_first = runs["case_id"] == runs["case_id"].iloc[0]  # once in each launch
    gaps_s = ended[is_first].diff().dt.total_seconds()
    gaps_s = gaps_s[gaps_s.between(0, FRESH_S)]
    launch_s = alone_s if gaps_s.empty else max(alone_s, float(gaps_s.median()))
    return Known(len(fingerprints), noisiest, num_sides * launch_s)
