"""Attributes every idle nanosecond to a cause, and finds what each computation waited for.

The idle time of a step is that of all ranks: their windows (`ppbench.analysis.metrics`) less
computations and optimizer. It is split by walking over steps in a row with ever more of the run's
own times, and taking the differences:

    1  equal stages, free transfers               idle: the schedule itself
    2  the stages' mean costs                     more: stage imbalance
    3  the channels' mean transfers               more: exposed transfer
    4  every action's and message's own time      more: jitter
    5  the host's time from a step to the next    more: between steps
    6  the step as it was measured                more: launch gaps, the host between actions

A step in a row begins on each rank when that is done with the one before; ranks meet in between
where the training lets them. Up to 3 it is the period of steps that are all alike; from 4 on each
step follows the one that it did follow, so that what one is late by costs the next one jitter. A
step that does not begin so on all ranks, as after a pause, is walked over alone if others could
overlap it: 5 is then what its windows have more than its makespan, and comes last.

Replicas that train together are replayed together, joined at their collectives, as the two copies
of a stage are where one replica has two pipelines (which leaves out 3b). Up to 3 all are alike and
the collectives take no time; before 4 come

    3a  the collectives' mean times               more: exposed collective
    3b  each replica's own mean times             more: replica skew

So the parts add up to the measured bubble to the nanosecond, for each rank, replica and step;
whatever the model leaves out is in the launch gaps. A part can be negative: a rank with more than
its share of work idles less than the schedule alone implies.

The same idle time is split by phase: warm-up until the rank's first backward begins, cool-down from
its last forward's end (or from that first backward, if it is later), steady state in between. An
evaluation is steady throughout.
The causes of single gaps are found in `ppbench.analysis.waits`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.period import spans_in_a_row, with_end
from engine.plan.predict import WalkedStep, timed
from engine.plan.program import Program, steps_can_overlap
from engine.plan.spans import Span
from ppbench.analysis.collectives import collectives
from ppbench.analysis.costs import Costs, costs_as_json, measured_costs, variation
from ppbench.analysis.job_times import Chosen, JobTimes, ends_of, times_in
from ppbench.analysis.metrics import NEVER, Ns, compute_spans, step_starts, times_by_cell
from ppbench.analysis.metrics import num_replicas as count_replicas
from ppbench.analysis.replicas import ReplicaCosts, own_as_json, replica_costs
from ppbench.analysis.running import Following, Idle, as_step, measured_following, steps_of
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
    modelled: WalkedStep  # of one step alone, with mean costs, transfers and collectives
    modelled_step_ns: int  # of steps in a row, if those of the run are as in a row
    modelled_idle: Idle
    following: Following
    in_a_row: frozenset[int]  # the steps that are so modelled
    messages: pd.DataFrame  # see `ppbench.analysis.transfers.messages`
    collectives: pd.DataFrame  # see `ppbench.analysis.collectives.collectives`
    replicas: ReplicaCosts | None = None

    def planned(self) -> Iterator[Span]:
        """The modelled step, between one before and one after it if the run's are as in a row."""
        if not self.in_a_row:
            return self.modelled.spans()
        return spans_in_a_row(as_step(self.modelled.program, self.modelled.took_ns, self.following))


def parts_in(rows: pd.DataFrame) -> tuple[str, ...]:
    """The parts that rows of an attribution have: those of replicas where there are any."""
    known = set(PARTS) | {one for one in REPLICA_PARTS if one in rows and rows[one].notna().any()}
    return tuple(part for part in REPLICA_PARTS if part in known)


def attribute(
    spans: pd.DataFrame,
    lowered: Program,
    of_ranks: pd.DataFrame,
    moved: pd.DataFrame | None = None,
    *,
    meets: bool = False,
) -> Attribution:
    """Split the idle time of the measured steps, between which ranks meet or do not.

    `spans` has the columns of `engine.plan.spans.Span` for whole steps of `lowered`, the program
    with its transfers; `of_ranks` has the windows of the steps to split (`metrics.windows`).
    `moved` are the messages of the spans, if they are matched already.
    """
    moved = messages(spans) if moved is None else moved
    costs = measured_costs(spans, moved, lowered.num_stages, lowered)
    joined, num_replicas = collectives(spans), count_replicas(spans)
    no_message = replace(costs, by_channel={})
    each = no_message.balanced(), no_message, costs
    chain = [[one.times(lowered)] * num_replicas for one in each]
    parts: Sequence[str] = PARTS
    replicas: ReplicaCosts | None = None
    if num_replicas > 1 or lowered.has_collectives:
        replicas, parts = replica_costs(costs, spans, moved, joined), REPLICA_PARTS
        chain.append(replicas.alike().times(lowered))
    if num_replicas > 1 and replicas is not None:
        chain.append(replicas.times(lowered))
    elif replicas is not None:  # its stages are on two ranks
        parts = tuple(part for part in REPLICA_PARTS if part != "skew_ns")
    steps = [int(str(step)) for step in of_ranks.index.unique("step")]
    follows = of_ranks["follows"].groupby("step").all()
    # A step that no other can overlap is as long alone as in a row.
    is_alike = not steps_can_overlap(lowered)
    in_a_row = {step for step in steps if is_alike or follows[step]}
    some = spans[spans["step"].isin(in_a_row)] if in_a_row else spans
    following = measured_following(some, lowered.world_size, meets=meets)
    # The steps of the chain as they are modelled alone and in a row, then each step's own.
    in_rows = [following.balanced(), *[following] * (len(chain) - 1)]
    alone = steps_of(lowered, [(took, None) for took in chain])
    running = steps_of(lowered, list(zip(chain, in_rows, strict=True)))
    ended = with_end(lowered, meets=meets)
    job = times_in(spans, ended, num_replicas, [])[0]
    own_idle, idle_with_host = map(np.array, _own_idle(job, spans, of_ranks, in_a_row))
    shape = len(steps), num_replicas, lowered.world_size
    begin_ns, end_ns, busy_ns = (
        of_ranks[name].to_numpy().reshape(shape) for name in ("begin_ns", "end_ns", "busy_ns")
    )
    idle_ns = end_ns - begin_ns - busy_ns
    computed = compute_spans(spans)
    computed = computed[computed["step"].isin(steps)]
    cell, start, end = times_by_cell(computed, np.array(steps))
    is_forward = (computed["op"] == Op.F.value).to_numpy()

    def total(chosen: Chosen) -> Ns:
        """The time of the chosen computations on each rank."""
        found = np.zeros(shape, np.int64)
        np.add.at(found, tuple(at[chosen] for at in cell), (end - start)[chosen])
        return found

    computed_ns = total(np.ones(len(start), bool))
    # Before the rank's first backward, in between, and after its last forward.
    first_backward, last_forward = np.full(shape, NEVER), np.full(shape, -NEVER)
    np.minimum.at(first_backward, tuple(at[~is_forward] for at in cell), start[~is_forward])
    np.maximum.at(last_forward, tuple(at[is_forward] for at in cell), end[is_forward])
    has_both = (first_backward < NEVER) & (last_forward > -NEVER)
    last_forward = np.maximum(last_forward, first_backward)
    warmup = first_backward - begin_ns - total(start < first_backward[cell])
    optimizer_ns = busy_ns - computed_ns
    cooldown = end_ns - last_forward - total(start >= last_forward[cell]) - optimizer_ns
    without = idle_ns if lowered.has_backward else 0
    warmup, cooldown = np.where(has_both, warmup, without), np.where(has_both, cooldown, 0)
    program = spans[spans["op"] != Op.OPT.value]
    makespans = program.groupby("step")["end_ns"].max() - step_starts(spans)
    is_in_a_row = np.isin(steps, list(in_a_row))[:, None, None]
    levels = [
        np.where(is_in_a_row, np.array(of_row), np.array(of_alone))
        for (_, of_row), (_, of_alone) in zip(running, alone, strict=True)
    ]
    makespan_ns = makespans.loc[steps].to_numpy()[:, None, None]
    within_ns = np.where(is_in_a_row, idle_with_host, makespan_ns - computed_ns)
    ends = np.stack([np.zeros(shape, np.int64), *levels, own_idle, within_ns, idle_ns])
    *others, gap, between = np.diff(ends, axis=0)
    gap, between = np.where(is_in_a_row, (between, gap), (gap, between))
    of_parts = dict(zip(parts, (*others, gap, between), strict=True))
    of_phases = dict(zip(PHASES, (warmup, idle_ns - warmup - cooldown, cooldown), strict=True))
    step_of, replica_of, rank_of = np.indices(shape)
    places = {"step": np.array(steps)[step_of], "rank": rank_of, "idle_ns": idle_ns}
    columns = places | of_parts | of_phases | {"replica": replica_of}
    frame = pd.DataFrame({name: values.reshape(-1) for name, values in columns.items()})
    replayed_alone = timed(lowered, chain[-1])
    step_ns, idle = (running if in_a_row else alone)[-1]
    mean = replayed_alone, step_ns, idle, following, frozenset(in_a_row)
    return Attribution(frame, costs, *mean, moved, joined, replicas)


def _own_idle(
    job: JobTimes, spans: pd.DataFrame, of_ranks: pd.DataFrame, in_a_row: Collection[int]
) -> Iterator[list[Idle]]:
    """The idle time of each step with its own times; then with those by which ranks begin late.

    A step is walked over after the one that it followed, and the first of a row from when each rank
    was done with what came before. One that is not in a row has no optimizer.
    """
    columns, steps = job.columns, of_ranks.index.unique("step")
    last_rank = columns.program.placement.ranks[-1]
    ns = job.ns[np.searchsorted(np.sort(spans["step"].unique()), steps)]
    is_optimizer, is_in_a_row = columns.of_ops([Op.OPT]), steps.isin(list(in_a_row))
    ns = np.where(is_optimizer & ~is_in_a_row[:, None, None], 0, ns)
    work = ns * (columns.is_compute | is_optimizer)
    of_ranks_work = (work[..., columns.rank == rank] for rank in range(columns.program.world_size))
    busy = np.stack([each.sum(axis=2) for each in of_ranks_work], axis=2)
    follows = of_ranks["follows"].groupby("step").all().to_numpy()
    begin_ns = of_ranks["free_ns"].to_numpy().reshape(busy.shape)
    begun_ns = begin_ns * follows[:, None, None]
    late_ns = _begun_late(spans, steps.to_numpy(), begin_ns) * follows[:, None, None]
    is_after = follows & (np.diff(steps, prepend=-1) == 1) & np.roll(is_in_a_row, 1)
    rows = list(itertools.pairwise([0, *(np.flatnonzero(~is_after[1:]) + 1), len(steps)]))
    for late in (0 * late_ns, late_ns):
        given = []
        for first, stop in rows:
            # A step of no time, whose optimizers end when the first one begins. Whatever makes a
            # rank begin late comes after the optimizer before.
            row = np.concatenate([0 * ns[:1], ns[first:stop]])
            before = late[first:stop].copy()
            before[0] += begun_ns[first] - begun_ns[first].min()
            row[:-1, :, is_optimizer] += before[..., columns.rank[is_optimizer]]
            given.append(row)
        idle = []
        for (first, stop), done in zip(rows, ends_of(columns.program, given), strict=True):
            done[:-1] -= late[first:stop]
            # In an evaluation the windows are those of the last stage.
            own = done if columns.program.has_backward else done[..., [last_rank]]
            whole = done[1:].max(axis=(1, 2), keepdims=True)
            over = np.where(follows[first:stop, None, None], own[1:], whole)
            idle += (over - own[:-1] - busy[first:stop]).tolist()
        yield idle


def _begun_late(spans: pd.DataFrame, steps: Ns, begin_ns: Ns) -> Ns:
    """How long ranks did not begin these steps though they were free, and their first input there.

    As `begin_ns`, the begin of their windows, it is by step, replica and rank.
    """
    shape = begin_ns.shape
    spans = spans[spans["step"].isin(steps)].sort_values("start_ns", kind="stable")
    cell, start_ns, end_ns = times_by_cell(spans, steps)
    op, place = spans["op"], spans[["stage", "microbatch"]].to_numpy()
    computed = np.flatnonzero(op.isin([op.value for op in COMPUTE_OPS]))[::-1]
    first = np.full(shape, -1)
    first[tuple(at[computed] for at in cell)] = computed  # the earliest is written last
    is_of_first = place == place[first[cell]]
    ready_ns = begin_ns.copy()
    came = (op == Op.RECV_F.value).to_numpy() & is_of_first.all(axis=1)
    np.maximum.at(ready_ns, tuple(at[came] for at in cell), end_ns[came])
    gathers = (op == Op.UNSHARD.value).to_numpy() & is_of_first[:, 0]
    gathered_ns = np.full(shape, NEVER)
    np.minimum.at(gathered_ns, tuple(at[gathers] for at in cell), end_ns[gathers])
    ready_ns = np.maximum(ready_ns, np.where(gathered_ns < NEVER, gathered_ns, ready_ns))
    return np.where(first < 0, 0, np.maximum(start_ns[first] - ready_ns, 0))


def figures_of(
    attribution: Attribution, spans: pd.DataFrame, of_ranks: pd.DataFrame, makespan_ns: pd.Series
) -> dict[str, object]:
    """Columns of `runs`: the parts as shares of rank-time, and the underlying prediction.

    `spans` and `of_ranks` are those that were attributed, `makespan_ns` that of each step.
    """
    rows, costs = attribution.rows, attribution.costs
    modelled_ns = attribution.modelled_step_ns
    num_ranks = count_replicas(spans) * attribution.modelled.program.world_size
    lasted = of_ranks["end_ns"] - of_ranks["begin_ns"]
    capacity_ns = int(lasted.sum())
    in_a_row = list(attribution.in_a_row)
    measured_ns = lasted.loc[in_a_row].mean() if in_a_row else makespan_ns.mean()
    own = attribution.replicas
    return {
        **{
            f"bubble_{part.removesuffix('_ns')}": rows[part].sum() / capacity_ns
            for part in parts_in(rows)
        },
        "bubble_mean": rows["idle_ns"].sum() / capacity_ns,
        "modelled_step_ns": modelled_ns,
        "modelled_bubble_fraction": sum(map(sum, attribution.modelled_idle))
        / (num_ranks * modelled_ns),
        "model_residual": float(measured_ns) / modelled_ns - 1,
        "following": attribution.following.as_json(),
        "op_costs_ns": costs_as_json(costs),
        "op_variation": variation(spans, costs, attribution.modelled.program),
        **({} if own is None else {"replica_costs_ns": own_as_json(own)}),
    }
