"""Two commits launched in turns until the verdicts are reached, with what their store knows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ppbench.commits.bench import Rounds
from ppbench.commits.launches import fingerprint_of
from ppbench.comparison.lines import Compared
from ppbench.comparison.measurement import Known, measure_until_decided
from ppbench.config.sweep import Sweep
from ppbench.errors import UsageError
from ppbench.statistics.until_decided import Look, Looks, planned_looks
from ppbench.statistics.verdicts import SPEED, Noise
from ppbench.store import Store
from ppbench.store.noise import read_noise

Result = TypeVar("Result")
_RUN_ID_TIME = "%Y%m%dT%H%M%S"


def judge_until_decided(
    rounds: Rounds,
    most_launches: int,
    judged: Callable[[Look], Result],
    compared_of: Callable[[Result], Compared[Any]],
    metrics: Collection[str],
) -> tuple[Result, Looks]:
    """Launch two commits until the verdicts of these metrics are decided. Raises UsageError."""
    bench = rounds.bench
    known = known_of(bench.sweep, bench.results)
    planned = looks_of(most_launches)
    say = bench.progress.say
    return measure_until_decided(planned, rounds.bring_to, judged, compared_of, metrics, known, say)


def looks_of(most_launches: int) -> tuple[int, ...]:
    """The looks that are planned. Raises UsageError for too few launches."""
    try:
        return planned_looks(most_launches)
    except ValueError as error:
        raise UsageError(f"--max-launches {error}") from None


def known_of(sweep: Sweep, results: Path) -> Known:
    """The noise of a sweep's noisiest case and the time of its launches, as far as stored."""
    fingerprints = {case.case_id: fingerprint_of(case) for case, _ in sweep.cases}
    stored = [read_noise(results, print_, case_id) for case_id, print_ in fingerprints.items()]
    noises = [noise.of_metric(SPEED) for noise in stored if noise is not None]
    noisiest: Noise | None = max(
        (noise for noise in noises if noise is not None),
        key=lambda noise: noise.deviation,
        default=None,
    )
    launch_s = _launch_s(Store(results), fingerprints)
    return Known(len(fingerprints), noisiest, None if launch_s is None else 2 * launch_s)


def _launch_s(store: Store, fingerprints: dict[str, str]) -> float | None:
    """Seconds of a launch of all these cases on this machine; None if one was never launched.

    A run's id has the time when it began. The start of the ranks is not included.
    """
    if not store.folder.exists():
        return None
    runs = store.runs(["run_id", "case_id", "fingerprint", "status", "created_at"])
    runs = runs[
        (runs["status"] == "ok") & (runs["case_id"].map(fingerprints) == runs["fingerprint"])
    ]
    if set(runs["case_id"]) != set(fingerprints):
        return None
    ended = pd.to_datetime(runs["created_at"], utc=True, format="ISO8601")
    begun = [
        datetime.strptime(run_id[:15], _RUN_ID_TIME).replace(tzinfo=UTC)
        for run_id in runs["run_id"]
    ]
    took_s = (ended - pd.Series(begun, runs.index)).dt.total_seconds()
    return float(took_s.groupby(runs["case_id"]).median().clip(lower=0).sum())
