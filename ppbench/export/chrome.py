"""A run as Chrome's trace events, for Perfetto, `chrome://tracing` and other viewers.

The format: Duan and others, *Trace Event Format*, 2016, the object form. Times in it are
microseconds; they are written as decimals of whole nanoseconds, never as rounded floats.

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

import json
from collections.abc import Iterator
from typing import Any

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
_COLORS: dict[str, str] = {  # names that viewers reserve, nearest to ppbench's palette
    Op.F: "rail_response",
    Op.B: "rail_idle",
    Op.I: "rail_animation",
    Op.W: "startup",
    Op.OPT: "rail_load",
    Op.SEND_F: "thread_state_runnable",
    Op.RECV_F: "thread_state_runnable",
    Op.SEND_B: "thread_state_uninterruptible",
    Op.RECV_B: "thread_state_uninterruptible",
    Op.UNSHARD: "thread_state_iowait",
    Op.RESHARD: "thread_state_sleeping",
    Op.REDUCE_GRAD: "thread_state_iowait",
}


_TRANSFERS = frozenset(op.value for op in SEND_OPS | RECV_OPS | {*JOINING_OPS})
_NO_FLOW = -1


def trace_of_run(store: Store, run: pd.Series, step: str) -> Iterator[str]:
    """Return the trace of a run's steps: `all`, `median`, `slowest` or a number.

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
) -> Iterator[str]:
    """Yield the file piece by piece, one event on each line; the same bytes for the same run.

    The frames are rows of the store's tables, `spans` of some steps of one run, not empty. `memory`
    is of an extra step; its levels begin where the first of these steps does.
    """
    yield f'{{"displayTimeUnit":"ms","otherData":{_json(facts)},"traceEvents":[\n'
    yield ",\n".join(_names(rows := _slices(spans), spans, ranks))
    for event in _events(rows, memory, int(spans["rank"].max()) + 1):
        yield f",\n{event}"
    yield "\n]}\n"


def _slices(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the spans track by track, with the `process`, `track` and `thread` of each.

    A slice is named by its action as text, `2F0`; the optimizer belongs to no stage. `flow` is the
    number of its message, if that is drawn as an arrow.
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
    rows = spans.assign(
        waiting_ns=stored.where(stored.notna(), waits).astype("int64"),
        name=names,
        flow=flows,
        kind=spans["op"].map({op.value: _ORDER.index(name) for op, name in _TRACK_NAMES.items()}),
        # Processes count from 1, over all replicas: to viewers process 0 is the idle task.
        process=spans["replica"] * size + spans["rank"] + 1,
    )
    rows = rows.sort_values(["process", "kind", "start_ns", "end_ns"], kind="stable")
    # A span takes the first track of its kind whose last span is over.
    tracks: list[int] = []
    number_of_first = 0
    labels: list[str] = []
    for _, group in rows.groupby(["process", "kind"], sort=False):
        lane = _ORDER[int(group["kind"].iloc[0])]
        ends: list[int] = []  # of each track
        for start_ns, end_ns in zip(group["start_ns"], group["end_ns"], strict=True):
            row = next((n for n, end in enumerate(ends) if end <= start_ns), len(ends))
            ends[row : row + 1] = [end_ns]
            tracks.append(number_of_first + row)
            labels.append(f"{lane} {row + 1}" if row else lane)
        number_of_first += len(ends)
    rows = rows.assign(track=np.array(tracks, "int64"), label=labels)
    rows = rows.sort_values("track", kind="stable", ignore_index=True)
    # A process's first track is its main thread, which has the process's number.
    is_first = rows["track"] == rows.groupby("process")["track"].transform("min")
    num_processes = rows["process"].nunique()
    others = rows["track"] + num_processes + 1
    return rows.assign(thread=rows["process"].where(is_first, others))


def _names(rows: pd.DataFrame, spans: pd.DataFrame, ranks: pd.DataFrame) -> Iterator[str]:
    """Yield the names of processes, as far as they are known, and of tracks."""

    def named(process: int, thread: int, what: str, name: str, order: int) -> Iterator[str]:
        where = {"ph": "M", "pid": process, "tid": thread}
        yield _json({**where, "name": f"{what}_name", "args": {"name": name}})
        yield _json({**where, "name": f"{what}_sort_index", "args": {"sort_index": order}})

    has_replicas = bool(spans["replica"].any())
    places = rows.drop_duplicates("process")[["process", "replica", "rank"]]
    for process, replica, rank in _each(places):
        is_own = (ranks["rank"] == rank) & (ranks["replica"] == replica)
        places = ranks.loc[is_own, ["hostname", "device"]].to_numpy().ravel()
        known = [str(value) for value in places if not pd.isna(value)]
        name = f"rank {rank} of replica {replica}" if has_replicas else f"rank {rank}"
        name = f"{name} ({', '.join(known)})" if known else name
        yield from named(process, process, "process", name, process - 1)
    tracks = rows.drop_duplicates("track")[["process", "thread", "label", "track"]]
    for process, thread, label, track in _each(tracks):
        yield from named(process, thread, "thread", label, track)


def _events(rows: pd.DataFrame, memory: pd.DataFrame, size: int) -> Iterator[str]:
    """Yield slices with what a viewer shows of the selected one, arrows, and levels of memory."""
    for row in _each(rows):
        details: dict[str, object] = {"step": row.step, "op": row.op}
        if row.stage != NO_INDEX:
            details["stage"] = row.stage
        if row.microbatch != NO_INDEX:
            details["microbatch"] = row.microbatch
        if row.op in _TRANSFERS:
            details |= {"bytes": row.num_bytes, "waiting_ns": row.waiting_ns}
        place = f'"pid":{row.process},"tid":{row.thread}'
        times = f'"ts":{_us(row.start_ns)},"dur":{_us(row.end_ns - row.start_ns)}'
        what = f'"name":"{row.name}","cat":"{row.op}","cname":"{_COLORS[row.op]}"'
        yield f'{{"ph":"X",{place},{times},{what},"args":{_json(details)}}}'
    # An arrow joins the send's start to the receive's last nanosecond: a point inside each slice.
    for ops in (SEND_OPS, RECV_OPS):  # viewers read events of one time in the file's order
        ends = rows[(rows["flow"] != _NO_FLOW) & rows["op"].isin([op.value for op in ops])]
        for row in _each(ends):
            kind, time_ns = '"ph":"s"', row.start_ns
            if ops is RECV_OPS:
                kind, time_ns = '"ph":"f","bp":"e"', max(row.start_ns, row.end_ns - 1)
            what = f'"id":{row.flow},"name":"message","cat":"message"'
            place = f'"pid":{row.process},"tid":{row.thread}'
            yield f'{{{kind},{what},{place},"ts":{_us(time_ns)}}}'
    levels = memory.assign(process=memory["replica"] * size + memory["rank"] + 1)
    begin_ns = int(rows["start_ns"].min())
    for row in _each(levels.sort_values(["process", "time_ns"], kind="stable")):
        where = f'"pid":{row.process},"ts":{_us(begin_ns + row.time_ns)}'
        yield f'{{"ph":"C",{where},"name":"memory","args":{{"bytes":{row.num_bytes}}}}}'


def _each(rows: pd.DataFrame) -> Iterator[Any]:
    return rows.itertuples(index=False)


def _us(time_ns: int) -> str:
    sign, size = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def _json(value: object) -> str:
    # Unescaped: of an escape like \u00fc Perfetto 52 shows the six characters.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
