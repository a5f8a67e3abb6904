"""Collectives: how long each rank waited for the other replicas, and how long bytes moved.

A collective is one only once all replicas have come to it:

    replica 0   REDUCE_GRAD |..........=======|
    replica 1             REDUCE_GRAD |=======|
                                      ^ ready: the latest start of all replicas

Where one replica has each stage on two ranks, its copies stand for the replicas.

Where a rank does several of one stage and op in a step, their order in time tells them apart: ranks
do their collectives one after the other, in the same order on all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from engine.plan.action import JOINING_OPS, Op

_SAME = ["step", "rank", "op", "stage", "number"]
"""Columns that a collective has in common at all ends."""

Moving = Mapping[tuple[Op, int], int]
"""Mean nanoseconds in which the bytes of a collective move, by op and stage."""


def collectives(spans: pd.DataFrame) -> pd.DataFrame:
    """One row per collective and end of it, indexed like `spans`, which are of all replicas.

    Columns: those of `spans`, `number` (from 0, among those of its rank, stage and op in a step),
    `ready_ns`, `waiting_ns` and `moving_ns`, which add up to the span.
    """
    taking_part = spans[spans["op"].isin([op.value for op in JOINING_OPS])].sort_values(
        "start_ns", kind="stable"
    )
    own = ["step", "replica", "rank", "op", "stage"]
    numbered = taking_part.assign(number=taking_part.groupby(own, observed=True).cumcount())
    same = numbered
    if len(numbered) and (spans["replica"] == spans["replica"].iloc[0]).all():
        depth = (int(spans["stage"].max()) + 1) // 2
        same = numbered.assign(rank=0, stage=numbered["stage"] % max(1, depth))
    latest = same.groupby(_SAME, observed=True)["start_ns"].transform("max")
    ready = latest.clip(upper=numbered["end_ns"])  # clocks agree up to an error
    return numbered.assign(
        ready_ns=ready,
        waiting_ns=ready - numbered["start_ns"],
        moving_ns=numbered["end_ns"] - ready,
    )


def collective_figures(joined: pd.DataFrame) -> pd.DataFrame:
    """One row per stage, op and replica of the `collectives` of some steps.

    Columns: `rank`, `stage`, `op`, `replica`, `num_collectives` (of a step), `num_bytes`,
    `moving_ns`, `waiting_ns` (of one, means), `bytes_per_s` (all bytes over all the time in which
    they moved; null where their number is not known).
    """
    groups = joined.groupby(["rank", "stage", "op", "replica"], observed=True)
    means = groups[["num_bytes", "moving_ns", "waiting_ns"]].mean()
    means.insert(0, "num_collectives", groups.size() // max(1, joined["step"].nunique()))
    moving_s, moved = groups["moving_ns"].sum() / 1e9, groups["num_bytes"].sum()
    means["bytes_per_s"] = (moved / moving_s).where((moving_s > 0) & (moved > 0))
    return means.reset_index()


def mean_moving(joined: pd.DataFrame) -> Moving:
    """The mean moving times of `collectives`, or of stored `collective_figures`."""
    means = joined.groupby(["op", "stage"], observed=True)["moving_ns"].mean()
    frame = means.reset_index()
    rows = zip(frame["op"], frame["stage"], frame["moving_ns"], strict=True)
    return {(Op(str(op)), int(stage)): round(ns) for op, stage, ns in rows}
