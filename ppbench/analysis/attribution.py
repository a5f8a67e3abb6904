"""Attributes every idle nanosecond to a cause, and finds what each computation waited for.

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
The causes of single gaps are found in `ppbench.analysis.waits`.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from engine.plan.action import CODES, OPS, Op
from engine.plan.program import Program
from engine.plan.replay import Replay, of_kinds, replay_all
from ppbench.analysis.costs import Costs, measured_costs, variation
from ppbench.analysis.metrics import compute_spans
from ppbench.analysis.transfers import messages

PARTS = ("structure_ns", "imbalance_ns", "transfer_ns", "jitter_ns", "launch_gap_ns")
PHASES = ("warmup_ns", "steady_ns", "cooldown_ns")
_NONE = -1


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
    no_message = Costs(costs.by_stage, {})
    by_kind = (Costs(costs.balanced().by_stage, {}), no_message, costs)
    means = [of_kinds(lowered, one.by_kind(lowered)) for one in by_kind]
    own = _own_times(spans, moved, lowered)
    times = [*means, *(own[int(str(step))] for step in step_ns.index)]
    ideal, unequal, modelled, *exact = replay_all(lowered, times)
    chain = [ideal.idle_ns(), unequal.idle_ns(), modelled.idle_ns()]
    by_step = {int(str(step)): of_step for step, of_step in compute_spans(spans).groupby("step")}
    rows: list[dict[str, int]] = []
    for (step, duration_ns), replayed in zip(step_ns.items(), exact, strict=True):
        number = int(str(step))
        rows += _rows(number, int(duration_ns), by_step[number], [*chain, replayed.idle_ns()])
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


def _own_times(spans: pd.DataFrame, moved: pd.DataFrame, lowered: Program) -> dict[int, array[int]]:
    """Nanoseconds of each action of a lowered program, of a SEND those of its message, by step."""
    compute, table = compute_spans(spans), lowered.table
    taken = compute.assign(ns=compute["end_ns"] - compute["start_ns"])
    sent = moved.assign(
        op="SEND_" + moved["direction"], stage=moved["source"], ns=moved["moving_ns"]
    )
    columns = ["step", "op", "stage", "microbatch", "ns"]
    timed = pd.concat([taken[columns].astype({"op": str}), sent[columns]])
    shape = len(OPS), lowered.num_stages, lowered.num_microbatches
    index = np.full(shape, _NONE)
    index[np.array(table.op), np.array(table.stage), np.array(table.microbatch)] = np.arange(
        table.num_actions
    )
    code = timed["op"].map({op.value: code for op, code in CODES.items()})
    places = np.array([code, timed["stage"], timed["microbatch"]], np.int64).T
    known = ((places >= 0) & (places < shape)).all(axis=1)  # others are of no program's action
    at = np.full(len(timed), _NONE)
    at[known] = index[tuple(places[known].T)]
    own, is_computation = {}, np.array(table.op) < CODES[Op.SEND_F]
    for step, rows in timed.groupby("step").indices.items():
        chosen = rows[at[rows] != _NONE]
        ns, is_missing = np.zeros(table.num_actions, np.int64), is_computation.copy()
        ns[at[chosen]], is_missing[at[chosen]] = timed["ns"].to_numpy()[chosen], False
        if is_missing.any():
            raise KeyError(table.at(int(is_missing.argmax())))
        own[int(str(step))] = array("q", ns.tobytes())
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
