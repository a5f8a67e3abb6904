"""The program of a stored run, with its transfers and collectives, and what it is modelled from."""

from __future__ import annotations

import json
from functools import lru_cache

import pandas as pd

from engine.plan.action import Op
from engine.plan.collectives import (
    CollectivePolicy,
    NoCollectives,
    with_collectives,
    with_sums_of_copies,
)
from engine.plan.program import Program, from_json
from ppbench.analysis.costs import stored_costs
from ppbench.analysis.replicas import stored_replica_costs
from ppbench.analysis.running import stored_following
from ppbench.analysis.whatif import Modelled, Posting, posting_of, program_in
from ppbench.config.case import Case
from ppbench.config.programs import NS_PER_MS, sharding_of


def policy_of_run(run: pd.Series) -> CollectivePolicy:
    """What a run's replicas share; nothing where there is one."""
    if int(run["replicas"]) == 1:
        return NoCollectives()
    names = (name for name in Case().settings() if name.startswith("sharding_"))
    return sharding_of(Case(**{name: run[name] for name in names}))


def program_of_run(run: pd.Series) -> Program:
    """A run's lowered program, with the collectives of its replicas or of copies of stages."""
    text, posting = str(run["program"]), posting_of(run)
    policy = None if int(run["replicas"]) == 1 else policy_of_run(run)
    return _joined(text, posting, policy)


@lru_cache(maxsize=4)  # as of `program_in`
def _joined(text: str, posting: Posting, policy: CollectivePolicy | None) -> Program:
    lowered = program_in(text, posting)
    if policy is None:
        return with_sums_of_copies(lowered)
    return with_collectives(lowered, from_json(text), policy)


def modelled_run(run: pd.Series, edges: pd.DataFrame, collectives: pd.DataFrame) -> Modelled:
    """What a run's step is modelled from; the tables are its rows of those."""
    lowered, mean = program_of_run(run), stored_costs(run, edges)
    if int(run["replicas"]) == 1 and not lowered.has_collectives:
        return Modelled.alone(lowered, mean, posting_of(run), stored_following(run))
    moving: dict[tuple[Op, int], int] | None = None
    if run["device"] == "emulated":
        given = {Op.UNSHARD: "emulated_gather_ms", Op.REDUCE_GRAD: "emulated_reduce_ms"}
        moving = {}
        for op, column in given.items():
            listed = json.loads(str(run[column])) or [0]
            of_stages = listed * lowered.num_stages if len(listed) == 1 else listed
            moving |= {(op, stage): round(ms * NS_PER_MS) for stage, ms in enumerate(of_stages)}
    return Modelled(
        lowered,
        stored_replica_costs(run, mean, collectives),
        posting_of(run),
        policy_of_run(run),
        is_written=from_json(str(run["program"])).has_collectives,
        emulated=moving,
        following=stored_following(run),
    )
