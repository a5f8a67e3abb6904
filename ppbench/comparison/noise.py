"""The noise between launches of each case on a machine, estimated from its launches in a store.

Launches that a verdict rests on would count twice, so only others are taken: of other commits, or
made before those that are compared. Launches of a slow machine are left out, as verdicts leave
them out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ppbench.comparison.launches import COLUMNS, Key, of_keys, states_of
from ppbench.comparison.sessions import noise_in
from ppbench.comparison.slowdowns import recorded, slowdowns_by_run
from ppbench.judge.evidence import Metric, Noise
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown, is_disturbed
from ppbench.store import Store

Noises = Mapping[str, Noise]
"""The noise of each metric of a case, as far as it is known, by the metric's name."""


def slowdowns_and_launches(
    stores: Iterable[Store], fingerprints: Collection[str], metrics: Sequence[Metric]
) -> tuple[dict[str, Slowdown], pd.DataFrame]:
    """How much each run of these machines was slowed, and all that are ok, with their figures."""
    columns = [*COLUMNS, *(metric.name for metric in metrics)]
    by_folder = {store.folder: store for store in stores}
    tables = [recorded(store, fingerprints, columns) for store in by_folder.values()]
    runs = pd.concat([table for table in tables if len(table)] or tables[:1])
    is_ok = runs["status"] == "ok"
    return slowdowns_by_run(*tables), runs[is_ok].drop_duplicates("run_id")


def noises_of(
    keys: Iterable[Key],
    metrics: Sequence[Metric],
    launches: pd.DataFrame,
    slowdowns: Mapping[str, Slowdown],
    compared: pd.DataFrame | None = None,
) -> dict[Key, Noises]:
    """The noise of each of these cases, from `launches` that are not among those `compared`."""
    usable = launches[launches["case_id"].isin({key[0] for key in keys})]
    if compared is not None and len(compared):
        states, first = set(states_of(compared)), str(compared["run_id"].min())
        # Later ones of a state that is compared may be compared at the next look.
        is_compared = [
            state in states and str(run_id) >= first
            for state, run_id in zip(states_of(usable), usable["run_id"], strict=True)
        ]
        usable = usable[~np.array(is_compared, dtype=bool)]
    is_slow = [is_disturbed(slowdowns.get(str(run_id), NOT_KNOWN)) for run_id in usable["run_id"]]
    undisturbed = usable[~np.array(is_slow, dtype=bool)]
    noises: dict[Key, Noises] = {}
    for key in keys:
        alike, quiet = (of_keys(runs, key) for runs in (usable, undisturbed))
        by_metric = {
            metric.name: noise_in(quiet if metric.slow_sign else alike, metric)
            for metric in metrics
        }
        noises[key] = {name: noise for name, noise in by_metric.items() if noise is not None}
    return noises
