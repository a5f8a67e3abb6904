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

Causes of single gaps are found from the spans alone. A computation needs its rank to be free, and
the output of the neighbouring stage:

    rank 0   |------ 0F1 ------|
    message                    |~~~~|
    rank 1   | 1F0 |.................  |-- 1F1 --|
                   ^ stage      ^ transfer
                                    ^ host

so the gap before it is divided at two moments: when that output was made, and when its message
arrived. The parts above differ: they show what the whole step would gain without a cause.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import CODES, OPS, RECV_OPS, Op
from engine.plan.program import Program
from engine.plan.replay import Replay, of_kinds, replay_all
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
    index = np.full(shape, NONE)
    index[np.array(table.op), np.array(table.stage), np.array(table.microbatch)] = np.arange(
        table.num_actions
    )
    code = timed["op"].map({op.value: code for op, code in CODES.items()})
    places = np.array([code, timed["stage"], timed["microbatch"]], np.int64).T
    known = ((places >= 0) & (places < shape)).all(axis=1)  # others are of no program's action
    at = np.full(len(timed), NONE)
    at[known] = index[tuple(places[known].T)]
    own, is_computation = {}, np.array(table.op) < CODES[Op.SEND_F]
    for step, rows in timed.groupby("step").indices.items():
        chosen = rows[at[rows] != NONE]
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


Ints = npt.NDArray[np.int64]
NONE = -1
_FORWARD, _BACKWARD = 0, 1


class Cause(IntEnum):
    """The cause of an idle gap."""

    STAGE = 0  # another stage has not made the input yet
    TRANSFER = 1  # the input is made, and its message is on its way
    HOST = 2  # the input is there; the rank has not begun
    NO_WORK = 3  # the rank has no action left in this step


@dataclass(frozen=True)
class Waits:
    """The computations of one step, by rank and start, and what each of them waited for.

    Arrays of one length; times in nanoseconds. `before` and `maker` are positions in these arrays:
    the rank's previous computation, and the computation on another stage that made the input (NONE
    where there is none). `made_ns` and `arrived_ns` are the start where no input is needed.
    """

    spans: pd.DataFrame
    before: Ints
    free_ns: Ints  # when the rank had finished all before; else the step's first start
    maker: Ints
    made_ns: Ints
    arrived_ns: Ints


def waits(spans: pd.DataFrame) -> Waits:
    """Find what each computation waited for, from the spans of one step with at least one F."""
    compute = compute_spans(spans).sort_values(["rank", "start_ns", "end_ns"], ignore_index=True)
    place = _Places(spans)
    rank, start, end = (compute[c].to_numpy(np.int64) for c in ("rank", "start_ns", "end_ns"))
    is_first = np.r_[True, rank[1:] != rank[:-1]]
    before = np.where(is_first, NONE, np.arange(len(compute)) - 1)
    maker = place.makers(compute)
    has_maker = maker != NONE
    made = np.where(has_maker, end[maker], start)
    arrived = np.where(has_maker, np.maximum(made, place.arrivals(compute, made)), start)
    latest = compute.groupby("rank")["end_ns"].cummax().to_numpy(np.int64)
    free = np.where(is_first, start.min(), latest[before])
    return Waits(compute, before, free, maker, made, arrived)


class _Places:
    """Numbers of the forwards and backwards of a step, by direction, stage and microbatch."""

    def __init__(self, spans: pd.DataFrame) -> None:
        self._num_stages = int(spans["stage"].max()) + 1
        self._num_microbatches = int(spans["microbatch"].max()) + 1
        received = spans[spans["op"].isin([op.value for op in RECV_OPS])]
        is_forward = received["op"].to_numpy() == Op.RECV_F.value
        self._received = np.full(self._size, NONE, np.int64)
        codes = self._codes(np.where(is_forward, _FORWARD, _BACKWARD), received)
        self._received[codes] = received["end_ns"].to_numpy(np.int64)

    @property
    def _size(self) -> int:
        return 2 * self._num_stages * self._num_microbatches

    def _codes(self, direction: Ints, spans: pd.DataFrame, hop: Ints | int = 0) -> Ints:
        stage = spans["stage"].to_numpy(np.int64) + hop
        microbatch = spans["microbatch"].to_numpy(np.int64)
        code = (direction * self._num_stages + stage) * self._num_microbatches + microbatch
        return np.where((stage >= 0) & (stage < self._num_stages), code, NONE)

    def makers(self, compute: pd.DataFrame) -> Ints:
        """Positions of the computations that make the inputs, on the neighbouring stages."""
        op = compute["op"].to_numpy()
        is_forward, is_weight = op == Op.F.value, op == Op.W.value
        direction = np.where(is_forward, _FORWARD, _BACKWARD)
        made_at = np.full(self._size + 1, NONE, np.int64)  # the last is for those without a maker
        makes = ~is_weight
        made_at[self._codes(direction, compute)[makes]] = np.flatnonzero(makes)
        made_at[NONE] = NONE
        makers = made_at[self._codes(direction, compute, np.where(is_forward, -1, 1))]
        return np.where(is_weight, NONE, makers)

    def arrivals(self, compute: pd.DataFrame, made_ns: Ints) -> Ints:
        """Times at which the inputs had been received; `made_ns` where there is no message."""
        is_forward = compute["op"].to_numpy() == Op.F.value
        codes = self._codes(np.where(is_forward, _FORWARD, _BACKWARD), compute)
        end_ns = self._received[codes]
        return np.where(end_ns == NONE, made_ns, end_ns)


def moments(waited: Waits) -> tuple[Ints, Ints, Ints, Ints]:
    """Times at which a computation's rank was free, its input made and arrived, and it began.

    Times are clipped to this order: an input made before the rank was free caused no wait.
    """
    free, is_needed = waited.free_ns, waited.maker != NONE
    start = np.maximum(waited.spans["start_ns"].to_numpy(np.int64), free)
    made = np.where(is_needed, np.clip(waited.made_ns, free, start), free)
    arrived = np.where(is_needed, np.clip(waited.arrived_ns, made, start), made)
    return free, made, arrived, start


def gaps(waited: Waits) -> pd.DataFrame:
    """Idle gaps of all ranks that compute, in pieces of one cause each.

    Columns: `rank`, `cause` (see Cause), `start_ns`, `end_ns`, `position` of the computation that
    follows (NONE after the last), ordered by rank and start. Together with the computations they
    fill each rank from the step's first start to its last computation's end.
    """
    free, made, arrived, start = moments(waited)
    rank = waited.spans["rank"].to_numpy(np.int64)
    position = np.arange(len(rank))
    pieces = [
        _pieces(rank, Cause.STAGE, free, made, position),
        _pieces(rank, Cause.TRANSFER, made, arrived, position),
        _pieces(rank, Cause.HOST, arrived, start, position),
        _after_last(waited),
    ]
    frame = pd.concat(pieces, ignore_index=True)
    return frame[frame["end_ns"] > frame["start_ns"]].sort_values(
        ["rank", "start_ns"], ignore_index=True
    )


def _pieces(rank: Ints, cause: Cause, start: Ints, end: Ints, position: Ints) -> pd.DataFrame:
    return pd.DataFrame(
        {"rank": rank, "cause": int(cause), "start_ns": start, "end_ns": end, "position": position}
    )


def _after_last(waited: Waits) -> pd.DataFrame:
    ends = waited.spans.groupby("rank")["end_ns"].max()
    none, last = np.full(len(ends), NONE), np.full(len(ends), ends.max())
    return _pieces(
        ends.index.to_numpy(np.int64), Cause.NO_WORK, ends.to_numpy(np.int64), last, none
    )


def critical_path(waited: Waits) -> Ints:
    """Positions of the computations without slack, first to last.

    The path is walked back from the computation that ended last: to the maker of its input, if that
    arrived after the rank was free, else to the rank's previous computation. Ties go to the rank's
    own, as in `engine.plan.critical_path`.
    """
    before, maker = waited.before.tolist(), waited.maker.tolist()
    free, arrived = waited.free_ns.tolist(), waited.arrived_ns.tolist()
    path = []
    at = int(waited.spans["end_ns"].to_numpy().argmax())
    while at != NONE:
        path.append(at)
        has_waited = maker[at] != NONE and (before[at] == NONE or arrived[at] > free[at])
        at = maker[at] if has_waited else before[at]
    return np.array(path[::-1], np.int64)
