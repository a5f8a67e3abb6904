"""Attributes every idle nanosecond to a cause, and finds what each computation waited for.

The idle time of a step is that of all ranks: ranks x step - computation. It is split by replaying
the program with ever more of the run's own times, and taking the differences:

    1  equal stages, free transfers               idle: the schedule itself
    2  the stages' mean costs                     more: stage imbalance
    3  the channels' mean transfers               more: exposed transfer
    4  every action's and message's own time      more: jitter
    5  the step as it was measured                more: launch gaps, the host between actions

Replicas that train together are replayed together, joined at their collectives. Up to 3 all are
alike and the collectives take no time; before 4 come

    3a  the collectives' mean times               more: exposed collective
    3b  each replica's own mean times             more: replica skew

So the parts add up to the measured bubble to the nanosecond, for each rank, replica and step;
whatever the model leaves out is in the last part. A part can be negative: a rank with more than its
share of work idles less than the schedule alone implies.

The same idle time is split by phase: warm-up until the rank's first backward begins, cool-down from
its last forward's end (or from that first backward, if it is later), steady state in between.
The causes of single gaps are found in `ppbench.analysis.waits`.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from engine.plan.action import CODES, OPS, Op
from engine.plan.joined import JoinedReplay, ReplicaTimes, replay_joined_all
from engine.plan.program import Program
from engine.plan.replay import Replay, of_kinds, replay_all
from engine.plan.spans import Span
from ppbench.analysis.collectives import collectives
from ppbench.analysis.costs import Costs, measured_costs, variation
from ppbench.analysis.metrics import compute_spans, num_replicas, step_starts
from ppbench.analysis.replicas import (
    ReplicaCosts,
    joined_spans,
    no_moving,
    own_moving,
    replica_costs,
)
from ppbench.analysis.transfers import messages

PARTS = ("structure_ns", "imbalance_ns", "transfer_ns", "jitter_ns", "launch_gap_ns")
REPLICA_PARTS = (*PARTS[:3], "collective_ns", "skew_ns", *PARTS[3:])
"""The parts for runs with replicas."""
PHASES = ("warmup_ns", "steady_ns", "cooldown_ns")
_NONE = -1


@dataclass(frozen=True)
class Attribution:
    """A run's idle time in parts, and the times that they were computed from.

    `rows` has a row per measured step, replica and rank: `step`, `rank`, `idle_ns`, its parts,
    `PHASES` and `replica`; parts and phases each add up to `idle_ns`.
    """

    rows: pd.DataFrame
    costs: Costs
    modelled: Replay | JoinedReplay  # with mean costs, transfers and collectives
    messages: pd.DataFrame  # see `ppbench.analysis.transfers.messages`
    collectives: pd.DataFrame  # see `ppbench.analysis.collectives.collectives`
    replicas: ReplicaCosts | None = None

    def modelled_spans(self) -> Iterator[Span]:
        """The spans of the modelled step."""
        modelled = self.modelled
        return modelled.spans() if isinstance(modelled, Replay) else joined_spans(modelled)


def parts_in(rows: pd.DataFrame) -> tuple[str, ...]:
    """The parts that rows of an attribution have: those of replicas where there are any."""
    has_replicas = "skew_ns" in rows and rows["skew_ns"].notna().any()
    return REPLICA_PARTS if has_replicas else PARTS


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
    costs, joined = measured_costs(spans, moved, lowered.num_stages), collectives(spans)
    own, steps = _own_times(spans, moved, lowered), [int(str(step)) for step in step_ns.index]
    chain = _chain(costs, lowered)
    if num_replicas(spans) == 1 and not lowered.has_collectives:
        alone = list(replay_all(lowered, [*chain, *(own[step, 0] for step in steps)]))
        rows = _rows_of_steps(spans, step_ns, PARTS, [[each.idle_ns()] for each in alone])
        return Attribution(rows, costs, alone[len(chain) - 1], moved, joined)
    replicas = replica_costs(costs, spans, moved, joined)
    moving, nothing = own_moving(joined, lowered), no_moving(lowered)
    count = range(len(replicas.own))
    times = [
        *([ReplicaTimes(took, nothing) for _ in count] for took in chain),
        replicas.alike().times(lowered),
        replicas.times(lowered),
        *(
            [ReplicaTimes(own[step, d], moving.get((step, d), nothing)) for d in count]
            for step in steps
        ),
    ]
    replays = list(replay_joined_all(lowered, times))
    idle_ns = [each.idle_ns() for each in replays]
    rows = _rows_of_steps(spans, step_ns, REPLICA_PARTS, idle_ns)
    return Attribution(rows, costs, replays[-len(steps) - 1], moved, joined, replicas)


def _chain(costs: Costs, lowered: Program) -> list[array[int]]:
    """The times of actions that lead from equal stages to the mean costs."""
    no_message = Costs(costs.by_stage, {})
    by_kind = (Costs(costs.balanced().by_stage, {}), no_message, costs)
    return [of_kinds(lowered, one.by_kind(lowered)) for one in by_kind]


def _idle_ns(replayed: Replay | JoinedReplay) -> list[list[int]]:
    """Idle time by replica and rank."""
    return [replayed.idle_ns()] if isinstance(replayed, Replay) else replayed.idle_ns()


def _rows_of_steps(
    spans: pd.DataFrame,
    step_ns: pd.Series,
    parts: Sequence[str],
    idle_ns: Sequence[Sequence[Sequence[int]]],
) -> pd.DataFrame:
    """One row per step, replica and rank.

    `idle_ns` has the idle times of replays, by replica and rank: first of those before the parts
    but the last two, then of each step.
    """
    by_step = {int(str(step)): of_step for step, of_step in compute_spans(spans).groupby("step")}
    began = step_starts(spans)
    chain, exact = idle_ns[: len(parts) - 2], idle_ns[len(parts) - 2 :]
    rows: list[dict[str, int]] = []
    for (step, duration_ns), own in zip(step_ns.items(), exact, strict=True):
        number = int(str(step))
        bounds = int(began[number]), int(duration_ns)
        rows += _rows(number, bounds, by_step[number], parts, [*chain, own])
    return pd.DataFrame(rows, columns=["step", "rank", "idle_ns", *parts, *PHASES, "replica"])


def figures_of(
    attribution: Attribution, spans: pd.DataFrame, step_ns: pd.Series
) -> dict[str, object]:
    """Columns of `runs`: the parts as shares of rank-time, and the underlying prediction.

    `spans` and `step_ns` are those that were attributed.
    """
    rows, modelled, costs = attribution.rows, attribution.modelled, attribution.costs
    num_ranks, modelled_ns = num_replicas(spans) * modelled.program.world_size, modelled.makespan_ns
    capacity_ns = int(step_ns.sum()) * num_ranks
    own = attribution.replicas
    return {
        **{
            f"bubble_{part.removesuffix('_ns')}": rows[part].sum() / capacity_ns
            for part in parts_in(rows)
        },
        "bubble_mean": rows["idle_ns"].sum() / capacity_ns,
        "modelled_step_ns": modelled_ns,
        "modelled_bubble_fraction": sum(map(sum, _idle_ns(modelled))) / (num_ranks * modelled_ns),
        "model_residual": float(step_ns.mean()) / modelled_ns - 1,
        "op_costs_ns": json.dumps({str(op): ns for op, ns in costs.by_stage.items()}),
        "op_variation": variation(spans, costs),
        **({} if own is None else {"replica_costs_ns": own.own_as_json()}),
    }


def _own_times(
    spans: pd.DataFrame, moved: pd.DataFrame, lowered: Program
) -> dict[tuple[int, int], array[int]]:
    """Nanoseconds of each action, of a SEND those of its message, by step and replica."""
    compute, table = compute_spans(spans), lowered.table
    taken = compute.assign(ns=compute["end_ns"] - compute["start_ns"])
    sent = moved.assign(
        op="SEND_" + moved["direction"], stage=moved["source"], ns=moved["moving_ns"]
    )
    columns = ["step", "replica", "op", "stage", "microbatch", "ns"]
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
    for place, rows in timed.groupby(["step", "replica"]).indices.items():
        step, replica = map(int, np.array(place))
        chosen = rows[at[rows] != _NONE]
        ns, is_missing = np.zeros(table.num_actions, np.int64), is_computation.copy()
        ns[at[chosen]], is_missing[at[chosen]] = timed["ns"].to_numpy()[chosen], False
        if is_missing.any():
            raise KeyError(table.at(int(is_missing.argmax())))
        own[step, replica] = array("q", ns.tobytes())
    return own


def _rows(
    step: int,
    bounds: tuple[int, int],
    compute: pd.DataFrame,
    names: Sequence[str],
    chain: Sequence[Sequence[Sequence[int]]],
) -> list[dict[str, int]]:
    """One row per replica and rank; `chain` has the idle time of each replay by both.

    `bounds`: when the step began, and how long it took.
    """
    began_ns, step_ns = bounds
    by_rank = dict(iter(compute.groupby(["replica", "rank"])))
    rows = []
    for replica, of_replica in enumerate(zip(*chain, strict=True)):
        for rank, replayed in enumerate(zip(*of_replica, strict=True)):
            own = by_rank.get((replica, rank), compute.iloc[:0])
            idle_ns = step_ns - int((own["end_ns"] - own["start_ns"]).sum())
            totals = [0, *replayed, idle_ns]
            parts = (later - earlier for earlier, later in itertools.pairwise(totals))
            phases = _phases(own, began_ns, step_ns, idle_ns)
            named = dict(zip((*names, *PHASES), (*parts, *phases), strict=True))
            place = {"step": step, "rank": rank, "replica": replica}
            rows.append({**place, "idle_ns": idle_ns, **named})
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
