"""A run as trace viewers show it: processes, tracks, slices, arrows, counters.

    rank 0 (node, cpu)            a process for each rank
      compute                     |  0F0  |  0F1  |      |  0B0  |
      send activations                    |-|     |-|
      receive gradients              |---------------|              from when it was posted
      collectives                 |0UNSHARD|      |0REDUCE_GRAD|
      memory                      ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~

Of replicas each rank is a process of its own, `rank 0 of replica 1`, with the number that it has in
the whole job.

Viewers nest the slices of a track, and drop or misdraw those that overlap without nesting. Receives
are posted ahead, so several are open at once: activations and gradients have tracks of their own,
and slices that still overlap go to a further track, `receive activations 2`. The first word of a
track's name is its lane.

An arrow leads from each send to its receive. Perfetto draws it from the slice that begins first,
however it is written, so from a receive that was posted ahead. Only another slice within the
receive would turn the arrow round, and slices are exactly the spans: their number and their sums
are compared with the store's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from engine.plan.action import JOINING_OPS, NO_INDEX, RECV_OPS, SEND_OPS, Action, Op
from ppbench.analysis.metrics import chosen_step
from ppbench.analysis.transfers import message_numbers, waiting_ns
from ppbench.store import Store, check_ok, missing_spans

ALL_STEPS = "all"
_FACTS = (
    *("run_id", "sweep_name", "device", "model_preset", "schedule", "world_size", "replicas"),
    *("stages_per_rank", "num_microbatches", "seq_len", "commit", "ppbench_version"),
)
_MEMORY_NOTE = "of an extra step that was not timed, drawn from the start of the first step"

_TRACK_NAMES: dict[Op, str] = {
    **dict.fromkeys((Op.F, Op.B, Op.I, Op.W, Op.OPT), "compute"),
    Op.SEND_F: "send activations",
    Op.SEND_B: "send gradients",
    Op.RECV_F: "receive activations",
    Op.RECV_B: "receive gradients",
    **dict.fromkeys((Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD), "collectives"),
}
_ORDER = tuple(dict.fromkeys(_TRACK_NAMES.values()))
_TRANSFERS = frozenset(op.value for op in SEND_OPS | RECV_OPS | {*JOINING_OPS})
_NO_FLOW = -1


@dataclass(frozen=True)
class Track:
    """A row of slices that do not overlap; `number` counts from 0 over all ranks."""

    number: int
    rank: int  # in the whole job, as everywhere in a trace
    name: str


class Slice(NamedTuple):
    """A span with its place. `track` is a track's number; `flow` is the number of its message."""

    track: int
    rank: int
    op: str
    name: str
    step: int
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    num_bytes: int
    waiting_ns: int
    flow: int  # the same at both ends of a message; -1 without a message

    @property
    def has_flow(self) -> bool:
        return self.flow != _NO_FLOW

    def details(self) -> dict[str, int | str]:
        """Details that a viewer shows of the selected slice."""
        known: dict[str, int | str] = {"step": self.step, "op": self.op}
        if self.stage != NO_INDEX:
            known["stage"] = self.stage
        if self.microbatch != NO_INDEX:
            known["microbatch"] = self.microbatch
        if self.op in _TRANSFERS:
            known |= {"bytes": self.num_bytes, "waiting_ns": self.waiting_ns}
        return known


class Level(NamedTuple):
    """Bytes that a rank had allocated from a moment on."""

    rank: int
    time_ns: int
    num_bytes: int


@dataclass(frozen=True)
class Trace:
    """A run's slices and counters. Times are the store's, in ns.

    `slice_rows` has a column for each field of `Slice`, track by track in order of time;
    `level_rows` for each of `Level`, rank by rank.
    """

    facts: dict[str, str]
    processes: dict[int, str]  # rank -> name
    tracks: tuple[Track, ...]
    slice_rows: pd.DataFrame
    level_rows: pd.DataFrame

    def slices(self) -> Iterator[Slice]:
        columns = (self.slice_rows[name].to_list() for name in Slice._fields)
        return map(Slice._make, zip(*columns, strict=True))

    def levels(self) -> Iterator[Level]:
        columns = (self.level_rows[name].to_list() for name in Level._fields)
        return map(Level._make, zip(*columns, strict=True))


def trace_of_run(store: Store, run: pd.Series, step: str) -> Trace:
    """The trace of a run's steps: `all`, `median`, `slowest` or a number.

    Raises UsageError for a run that is not ok or has no such step, StoreError without spans.
    """
    check_ok(run, "spans")
    ids = [run["run_id"]]
    names = ("spans", "ranks", "memory", "steps")
    spans, ranks, memory, steps = (store.table(name, ids) for name in names)
    if spans.empty or steps.empty:
        raise missing_spans(run)
    every = [int(number) for number in steps["step"]]
    chosen = every if step == ALL_STEPS else [chosen_step(steps, step, ALL_STEPS)]
    shown = spans[spans["step"].isin(chosen)]
    if shown.empty:
        raise missing_spans(run)
    facts = {name: str(run[name]) for name in _FACTS if not pd.isna(run[name])}
    facts["steps"] = ", ".join(map(str, chosen))
    if not memory.empty:
        facts["memory"] = _MEMORY_NOTE
    return trace_of(facts, shown, ranks, memory)


def trace_of(
    facts: dict[str, str], spans: pd.DataFrame, ranks: pd.DataFrame, memory: pd.DataFrame
) -> Trace:
    """The trace of some steps of one run: rows of the store's tables, `spans` not empty.

    `memory` is of an extra step; its levels begin where the first of these steps does. Slices are
    named by their actions as text, `2F0`; the optimizer belongs to no stage.
    """
    size, spans = int(spans["rank"].max()) + 1, spans.reset_index(drop=True)
    columns = (spans["stage"], spans["op"], spans["microbatch"])
    names = [
        op if op == Op.OPT else str(Action(stage, Op(op), microbatch))
        for stage, op, microbatch in zip(*columns, strict=True)
    ]
    # Arrows are those of messages that have two ends and arrive after they are sent. The clocks of
    # two machines agree up to an error; no viewer draws an arrow back in time.
    numbers = message_numbers(spans)
    is_send = spans["op"].isin([op.value for op in SEND_OPS]).reindex(numbers.index)
    begun = spans["start_ns"].reindex(numbers.index).where(is_send).groupby(numbers)
    ended = spans["end_ns"].reindex(numbers.index).mask(is_send).groupby(numbers)
    is_drawn = ended.transform("max") > begun.transform("max")
    flows = numbers.where(is_drawn, _NO_FLOW).reindex(spans.index, fill_value=_NO_FLOW)
    waits = waiting_ns(spans)
    stored = spans["waiting_ns"] if "waiting_ns" in spans else pd.Series(index=spans.index)
    complete = spans.assign(
        waiting_ns=stored.where(stored.notna(), waits).astype("int64"),
        name=names,
        flow=flows,
        kind=spans["op"].map({op.value: _ORDER.index(name) for op, name in _TRACK_NAMES.items()}),
    )
    in_job = _in_job(complete, size)
    # A span takes the first track of its kind whose last span is over.
    ordered = in_job.sort_values(["rank", "kind", "start_ns", "end_ns"], kind="stable")
    tracks: list[Track] = []
    places: list[int] = []
    for _, group in ordered.groupby(["rank", "kind"], sort=False):
        rank, lane = int(group["rank"].iloc[0]), _ORDER[int(group["kind"].iloc[0])]
        number_of_first = len(tracks)
        ends: list[int] = []  # of each track
        for start_ns, end_ns in zip(group["start_ns"], group["end_ns"], strict=True):
            row = next((n for n, end in enumerate(ends) if end <= start_ns), len(ends))
            if row == len(ends):
                tracks.append(Track(len(tracks), rank, f"{lane} {row + 1}" if row else lane))
                ends.append(end_ns)
            ends[row] = end_ns
            places.append(number_of_first + row)
    slices = ordered.assign(track=np.array(places, "int64")).drop(columns="kind")
    slices = slices.sort_values("track", kind="stable", ignore_index=True)
    levels = _in_job(memory, size)[list(Level._fields)]
    levels = levels.sort_values(["rank", "time_ns"], kind="stable")
    levels["time_ns"] += int(slices["start_ns"].min())
    # Processes are named as `rank 0 (node, cuda:0)`, as far as host and device are stored.
    processes, has_replicas = {}, bool(spans["replica"].any())
    for number in sorted(in_job["rank"].unique().tolist()):
        replica, rank = divmod(number, size)
        is_own = (ranks["rank"] == rank) & (ranks["replica"] == replica)
        places = ranks.loc[is_own, ["hostname", "device"]].to_numpy().ravel()
        known = [str(value) for value in places if not pd.isna(value)]
        name = f"rank {rank} of replica {replica}" if has_replicas else f"rank {rank}"
        processes[number] = f"{name} ({', '.join(known)})" if known else name
    return Trace(facts, processes, tuple(tracks), slices, levels)


def _in_job(rows: pd.DataFrame, size: int) -> pd.DataFrame:
    """The rows with the numbers that ranks have in the whole job; replicas have `size` of them."""
    return rows.assign(rank=rows["replica"] * size + rows["rank"])
