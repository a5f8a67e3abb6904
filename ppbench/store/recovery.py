"""Tables of a run that follow from its spans: read from the store, else recomputed.

So a damaged file of them costs no figure as long as the spans are readable.
"""

from __future__ import annotations

from functools import lru_cache

import pandas as pd

from engine.plan.action import SEND_OPS, Op
from ppbench.analysis.attribution import Attribution, attribute
from ppbench.analysis.collectives import collective_figures, collectives
from ppbench.analysis.metrics import step_figures
from ppbench.analysis.transfers import edges, messages
from ppbench.analysis.whatif import Posting, posting_of, program_in
from ppbench.store import Store
from ppbench.store.programs import program_of_run

_ENDS = ["source", "target"]


def steps_of_run(store: Store, run: pd.Series) -> pd.DataFrame:
    """The measured steps of a run; recomputed steps have no tokens and losses."""
    stored = store.table("steps", [run["run_id"]])
    if len(stored):
        return stored
    spans = store.table("spans", [run["run_id"]])
    if not _has_computed(spans):
        return stored
    numbers = {int(number): None for number in spans["step"].unique()}
    made = step_figures(spans, int(run["world_size"]), numbers).assign(run_id=run["run_id"])
    return made.reindex(columns=stored.columns)


def edges_of_run(store: Store, run: pd.Series) -> pd.DataFrame:
    """The channels of a run; empty if it has none or they cannot be recovered."""
    stored = store.table("edges", [run["run_id"]])
    if is_complete(run, stored):
        return stored
    spans = store.table("spans", [run["run_id"]])
    made = edges(messages(spans)).assign(run_id=run["run_id"]).reindex(columns=stored.columns)
    return made if is_complete(run, made) else stored.head(0)


def collectives_of_run(store: Store, run: pd.Series) -> pd.DataFrame:
    """The collectives of a run; empty if it has none or they cannot be recovered."""
    stored = store.table("collectives", [run["run_id"]])
    if len(stored) or int(run["replicas"]) == 1:
        return stored
    made = collective_figures(collectives(store.table("spans", [run["run_id"]])))
    return made.assign(run_id=run["run_id"]).reindex(columns=stored.columns)


def is_complete(run: pd.Series, found: pd.DataFrame) -> bool:
    """Whether the edges have every channel of the run's program, each with its time."""
    if len(found) != int(found["moving_ns"].notna().sum()):
        return False
    there = set(found[_ENDS].itertuples(index=False, name=None))
    return _channels(str(run["program"]), posting_of(run)) <= there


@lru_cache(maxsize=256)  # programs of a sweep, each of which several runs have
def _channels(program: str, posting: Posting) -> frozenset[tuple[int, int]]:
    """Sending and receiving stages of a program's messages."""
    lowered = program_in(program, posting)
    sends = [action for row in lowered.actions for action in row if action.op in SEND_OPS]
    return frozenset(
        (action.stage, action.stage + (1 if action.op is Op.SEND_F else -1)) for action in sends
    )


def attribution_of_run(store: Store, run: pd.Series) -> Attribution | None:
    """Recompute the attribution of idle time; None without spans."""
    spans, steps = store.table("spans", [run["run_id"]]), steps_of_run(store, run)
    if not _has_computed(spans) or steps["step_ns"].isna().any():
        return None
    of_steps = spans[spans["step"].isin(steps["step"])]
    step_ns = steps.set_index("step")["step_ns"]
    return attribute(of_steps, program_of_run(run), step_ns)


def _has_computed(spans: pd.DataFrame) -> bool:
    return bool(spans["lane"].eq("compute").any())
