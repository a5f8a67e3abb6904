"""Attributes every idle nanosecond to a cause, and finds what each computation waited for.

The idle time of a step is that of all ranks: their windows (`ppbench.analysis.metrics`) less
computations and optimizer. It is split by replaying the program with ever more of the run's own
times, and taking the differences:

    1  equal stages, free transfers               idle: the schedule itself
    2  the stages' mean costs                     more: stage imbalance
    3  the channels' mean transfers               more: exposed transfer
    4  every action's and message's own time      more: jitter
    5  the step as it was measured                more: launch gaps, the host between actions
    6  the step of the running training           more: between steps, host time from one to the
                                                  next, less where neighbouring steps overlap

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
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.plan.action import Op
from engine.plan.program import Program
from engine.plan.replay import Replay, replay_all
from engine.plan.walk import of_kinds
from ppbench.analysis.collectives import collectives
from ppbench.analysis.costs import Costs, measured_costs, variation
from ppbench.analysis.job_times import times_in
from ppbench.analysis.metrics import compute_spans, step_starts
from ppbench.analysis.metrics import num_replicas as count_replicas
from ppbench.analysis.replicas import ReplicaCosts, own_as_json, replica_costs
from ppbench.analysis.transfers import messages

PARTS = (
    "structure_ns",
    "imbalance_ns",
    "transfer_ns",
    "jitter_ns",
    "launch_gap_ns",
    "between_ns",
)
REPLICA_PARTS = (*PARTS[:3], "collective_ns", "skew_ns", *PARTS[3:])
"""The parts for runs with replicas."""
PHASES = ("warmup_ns", "steady_ns", "cooldown_ns")


@dataclass(frozen=True)
class Attribution:
    """A run's idle time in parts, and the times that they were computed from.

    `rows` has a row per measured step, replica and rank: `step`, `rank`, `idle_ns`, its parts,
    `PHASES` and `replica`; parts and phases each add up to `idle_ns`.
    """

    rows: pd.DataFrame
    costs: Costs
    modelled: Replay  # with mean costs, transfers and collectives
    messages: pd.DataFrame  # see `ppbench.analysis.transfers.messages`
    collectives: pd.DataFrame  # see `ppbench.analysis.collectives.collectives`
    replicas: ReplicaCosts | None = None


def parts_in(rows: pd.DataFrame) -> tuple[str, ...]:
    """The parts that rows of an attribution have: those of replicas where there are any."""
    has_replicas = "skew_ns" in rows and rows["skew_ns"].notna().any()
    return REPLICA_PARTS if has_replicas else PARTS


def attribute(
    spans: pd.DataFrame,
    lowered: Program,
    of_ranks: pd.DataFrame,
    moved: pd.DataFrame | None = None,
) -> Attribution:
    """Split the idle time of the measured steps.

    `spans` has the columns of `engine.plan.spans.Span` for whole steps of `lowered`, the program
    with its transfers; `of_ranks` has the windows of the steps to split (`metrics.windows`).
    `moved` are the messages of the spans, if they are matched already.
    """
    moved = messages(spans) if moved is None else moved
    costs, joined = measured_costs(spans, moved, lowered.num_stages), collectives(spans)
    num_replicas = count_replicas(spans)
    no_message = Costs(costs.by_stage, {})
    chain = [
        [of_kinds(lowered, each.by_kind(lowered))] * num_replicas
        for each in (Costs(costs.balanced().by_stage, {}), no_message, costs)
    ]
    parts: Sequence[str] = PARTS
    replicas: ReplicaCosts | None = None
    if num_replicas > 1 or lowered.has_collectives:
        replicas, parts = replica_costs(costs, spans, moved, joined), REPLICA_PARTS
        chain += [replicas.alike().times(lowered), replicas.times(lowered)]
    job = times_in(spans, lowered, num_replicas)[0]
    places = {int(step): place for place, step in enumerate(sorted(spans["step"].unique()))}
    steps = of_ranks.index.unique("step")
    own = [[array("q", ns.tobytes()) for ns in job.ns[places[int(str(step))]]] for step in steps]
    replays = list(replay_all(lowered, [*chain, *own]))
    idle_ns = [each.idle_ns() for each in replays]
    by_worker = dict(iter(compute_spans(spans).groupby(["step", "replica", "rank"])))
    program = spans[spans["op"] != Op.OPT.value]
    makespans = program.groupby("step")["end_ns"].max() - step_starts(spans)
    own_window = of_ranks.to_dict("index")
    rows: list[dict[str, int]] = []
    exact_ns = idle_ns[len(chain) :]
    for step, own_idle_ns in zip(steps, exact_ns, strict=True):
        number = int(step)
        for replica, of_replica in enumerate(zip(*idle_ns[: len(chain)], own_idle_ns, strict=True)):
            for rank, replayed in enumerate(zip(*of_replica, strict=True)):
                computed = by_worker.get((number, replica, rank), spans.iloc[:0])
                window = own_window[number, replica, rank]
                rank_idle_ns = window["end_ns"] - window["begin_ns"] - window["busy_ns"]
                alone_ns = int(makespans[number]) - _total(computed)
                ends = itertools.pairwise([0, *replayed, alone_ns, rank_idle_ns])
                of_parts = (later - earlier for earlier, later in ends)
                # Before the rank's first backward, in between, and after its last forward.
                phases = rank_idle_ns, 0, 0
                is_forward = computed["op"] == Op.F.value
                forwards, backwards = computed[is_forward], computed[~is_forward]
                if len(forwards) and len(backwards):
                    first_backward = int(backwards["start_ns"].min())
                    last_forward = max(first_backward, int(forwards["end_ns"].max()))
                    before = _total(computed[computed["start_ns"] < first_backward])
                    after = _total(computed[computed["start_ns"] >= last_forward])
                    optimizer_ns = window["busy_ns"] - _total(computed)
                    warmup = first_backward - window["begin_ns"] - before
                    cooldown = window["end_ns"] - last_forward - after - optimizer_ns
                    phases = warmup, rank_idle_ns - warmup - cooldown, cooldown
                named = dict(zip((*parts, *PHASES), (*of_parts, *phases), strict=True))
                place = {"step": number, "rank": rank, "replica": replica}
                rows.append({**place, "idle_ns": rank_idle_ns, **named})
    columns = ["step", "rank", "idle_ns", *parts, *PHASES, "replica"]
    frame = pd.DataFrame(rows, columns=columns)
    return Attribution(frame, costs, replays[len(chain) - 1], moved, joined, replicas)


def figures_of(
    attribution: Attribution, spans: pd.DataFrame, of_ranks: pd.DataFrame, makespan_ns: pd.Series
) -> dict[str, object]:
    """Columns of `runs`: the parts as shares of rank-time, and the underlying prediction.

    `spans` and `of_ranks` are those that were attributed, `makespan_ns` that of each step.
    """
    rows, modelled, costs = attribution.rows, attribution.modelled, attribution.costs
    num_ranks, modelled_ns = (
        count_replicas(spans) * modelled.program.world_size,
        modelled.makespan_ns,
    )
    capacity_ns = int((of_ranks["end_ns"] - of_ranks["begin_ns"]).sum())
    own = attribution.replicas
    return {
        **{
            f"bubble_{part.removesuffix('_ns')}": rows[part].sum() / capacity_ns
            for part in parts_in(rows)
        },
        "bubble_mean": rows["idle_ns"].sum() / capacity_ns,
        "modelled_step_ns": modelled_ns,
        "modelled_bubble_fraction": sum(map(sum, modelled.idle_ns())) / (num_ranks * modelled_ns),
        "model_residual": float(makespan_ns.mean()) / modelled_ns - 1,
        "op_costs_ns": json.dumps({str(op): ns for op, ns in costs.by_stage.items()}),
        "op_variation": variation(spans, costs),
        **({} if own is None else {"replica_costs_ns": own_as_json(own)}),
    }


def _total(spans: pd.DataFrame) -> int:
    return int((spans["end_ns"] - spans["start_ns"]).sum())
