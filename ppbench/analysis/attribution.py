"""Attributes every idle nanosecond to a cause.

The idle time of a step is that of all ranks: ranks x step - computation. It is split by replaying
the program with ever more of the run's own times, and taking the differences:

    1  equal stages, free transfers               idle: the schedule itself
    2  the stages' mean costs                     more: stage imbalance
    3  the channels' mean transfers               more: exposed transfer
    4  every action's and message's own time      more: jitter
    5  the step as it was measured                more: launch gaps, the host between actions

So the parts add up to the measured bubble to the nanosecond, for each rank and each step; whatever
the model leaves out is in the last part. A part can be negative: a rank with more than its share of
work idles less than the schedule alone implies.

The same idle time is split by phase: warm-up until the rank's first backward begins, cool-down from
its last forward's end (or from that first backward, if it is later), steady state in between.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.plan.action import Action, Op
from engine.plan.program import Program
from engine.plan.replay import Replay, replay
from ppbench.analysis.costs import Costs, measured_costs, variation
from ppbench.analysis.metrics import compute_spans
from ppbench.analysis.transfers import messages

PARTS = ("structure_ns", "imbalance_ns", "transfer_ns", "jitter_ns", "launch_gap_ns")
PHASES = ("warmup_ns", "steady_ns", "cooldown_ns")


@dataclass(frozen=True)
class Attribution:
    """A run's idle time in parts, and the times that they were computed from.

    `rows` has a row per measured step and rank: `step`, `rank`, `idle_ns`, `PARTS`, `PHASES`; parts
    and phases each add up to `idle_ns`.
    """

    rows: pd.DataFrame
    costs: Costs
    modelled: Replay  # with mean costs and mean transfers
    messages: pd.DataFrame  # see `ppbench.analysis.transfers.messages`


def attribute(
    spans: pd.DataFrame,
    lowered: Program,
    step_ns: pd.Series,
    moved: pd.DataFrame | None = None,
) -> Attribution:
    """Split the idle time of the measured steps.

    `spans` has the columns of `engine.plan.spans.Span` for whole steps of `lowered`, the program
    with its transfers; `step_ns` is indexed by step (see `ppbench.analysis.metrics.step_figures`).
    `moved` are the messages of the spans, if they are matched already.
    """
    moved = messages(spans) if moved is None else moved
    costs = measured_costs(spans, moved, lowered.num_stages)
    equal, moving = costs.balanced().compute_ns(lowered), costs.moving_ns(lowered)
    mean = costs.compute_ns(lowered)
    ideal, unequal = replay(lowered, equal, {}), replay(lowered, mean, {})
    modelled = replay(lowered, mean, moving)
    own = _own_times(spans, moved)
    chain = [ideal.idle_ns(), unequal.idle_ns(), modelled.idle_ns()]
    by_step = {int(str(step)): of_step for step, of_step in compute_spans(spans).groupby("step")}
    rows: list[dict[str, int]] = []
    for step, duration_ns in step_ns.items():
        number = int(str(step))
        exact = replay(lowered, *own[number]).idle_ns()
        rows += _rows(number, int(duration_ns), by_step[number], [*chain, exact])
    columns = ["step", "rank", "idle_ns", *PARTS, *PHASES]
    return Attribution(pd.DataFrame(rows, columns=columns), costs, modelled, moved)


def figures_of(
    attribution: Attribution, spans: pd.DataFrame, step_ns: pd.Series
) -> dict[str, object]:
    """Columns of `runs`: the parts as shares of rank-time, and the underlying prediction.

    `spans` and `step_ns` are those that were attributed.
    """
    rows, modelled, costs = attribution.rows, attribution.modelled, attribution.costs
    world_size, modelled_ns = modelled.program.world_size, modelled.makespan_ns
    capacity_ns = int(step_ns.sum()) * world_size
    return {
        **{f"bubble_{part.removesuffix('_ns')}": rows[part].sum() / capacity_ns for part in PARTS},
        "bubble_mean": rows["idle_ns"].sum() / capacity_ns,
        "modelled_step_ns": modelled_ns,
        "modelled_bubble_fraction": sum(modelled.idle_ns()) / (world_size * modelled_ns),
        "model_residual": float(step_ns.mean()) / modelled_ns - 1,
        "op_costs_ns": json.dumps({str(op): ns for op, ns in costs.by_stage.items()}),
        "op_variation": variation(spans, costs),
    }


OwnTimes = tuple[dict[Action, int], dict[Action, int]]


def _own_times(spans: pd.DataFrame, moved: pd.DataFrame) -> dict[int, OwnTimes]:
    """By step, the duration of each computation and the moving time of each SEND's message."""
    own: dict[int, OwnTimes] = {int(step): ({}, {}) for step in spans["step"].unique()}
    compute = compute_spans(spans)
    duration = compute["end_ns"] - compute["start_ns"]
    for step, stage, op, microbatch, ns in zip(
        *(compute[c] for c in ("step", "stage", "op", "microbatch")), duration, strict=True
    ):
        own[step][0][Action(stage, Op(op), microbatch)] = ns
    columns = ("step", "source", "direction", "microbatch", "moving_ns")
    for step, stage, direction, microbatch, ns in zip(*(moved[c] for c in columns), strict=True):
        own[step][1][Action(stage, Op(f"SEND_{direction}"), microbatch)] = ns
    return own


def _rows(
    step: int, step_ns: int, compute: pd.DataFrame, chain: Sequence[Sequence[int]]
) -> list[dict[str, int]]:
    """One row per rank; `chain` has the idle time of each replay by rank."""
    began_ns = int(compute["start_ns"].min())
    by_rank = dict(iter(compute.groupby("rank")))
    rows = []
    for rank, replayed in enumerate(zip(*chain, strict=True)):
        own = by_rank.get(rank, compute.iloc[:0])
        idle_ns = step_ns - int((own["end_ns"] - own["start_ns"]).sum())
        totals = [0, *replayed, idle_ns]
        parts = (later - earlier for earlier, later in itertools.pairwise(totals))
        phases = _phases(own, began_ns, step_ns, idle_ns)
        named = {**dict(zip(PARTS, parts, strict=True)), **dict(zip(PHASES, phases, strict=True))}
        rows.append({"step": step, "rank": rank, "idle_ns": idle_ns, **named})
    return rows


def _phases(own: pd.DataFrame, began_ns: int, step_ns: int, idle_ns: int) -> tuple[int, int, int]:
    """Idle time of a rank before its first backward, in between, and after its last forward."""
    is_forward = own["op"] == Op.F.value
    forwards, backwards = own[is_forward], own[~is_forward]
    if forwards.empty or backwards.empty:
        return idle_ns, 0, 0
    first_backward = int(backwards["start_ns"].min())
    last_forward = max(first_backward, int(forwards["end_ns"].max()))
    before = own[own["start_ns"] < first_backward]
    after = own[own["start_ns"] >= last_forward]
    warmup = first_backward - began_ns - _total(before)
    cooldown = began_ns + step_ns - last_forward - _total(after)
    return warmup, idle_ns - warmup - cooldown, cooldown


def _total(spans: pd.DataFrame) -> int:
    return int((spans["end_ns"] - spans["start_ns"]).sum())
