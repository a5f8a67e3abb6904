"""Chrome's trace events as JSON, for Perfetto, `chrome://tracing` and other viewers.

The format: Duan and others, *Trace Event Format*, 2016, the object form. Times in it are
microseconds; they are written as decimals of whole nanoseconds, never as rounded floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from engine.plan.action import RECV_OPS, SEND_OPS, Op
from ppbench.export.trace import Trace

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


def chrome_trace(trace: Trace) -> Iterator[str]:
    """The file piece by piece, one event on each line; the same bytes for the same run."""
    yield f'{{"displayTimeUnit":"ms","otherData":{_json(trace.facts)},"traceEvents":[\n'
    events = _events(trace)
    yield next(events)
    yield from (f",\n{event}" for event in events)
    yield "\n]}\n"


def _events(trace: Trace) -> Iterator[str]:
    # A rank's first track is its main thread, which has the process's id.
    firsts = {track.rank: track.number for track in reversed(trace.tracks)}
    others = len(trace.processes) + 1
    threads = {
        track.number: _process_id(track.rank)
        if firsts[track.rank] == track.number
        else others + track.number
        for track in trace.tracks
    }
    for rank, name in trace.processes.items():
        yield _metadata(rank, _process_id(rank), "process_name", {"name": name})
        yield _metadata(rank, _process_id(rank), "process_sort_index", {"sort_index": rank})
    for track in trace.tracks:
        thread = threads[track.number]
        yield _metadata(track.rank, thread, "thread_name", {"name": track.name})
        yield _metadata(track.rank, thread, "thread_sort_index", {"sort_index": track.number})
    for row in trace.slices():
        place = f'"pid":{_process_id(row.rank)},"tid":{threads[row.track]}'
        times = f'"ts":{_us(row.start_ns)},"dur":{_us(row.end_ns - row.start_ns)}'
        what = f'"name":"{row.name}","cat":"{row.op}","cname":"{_COLORS[row.op]}"'
        yield f'{{"ph":"X",{place},{times},{what},"args":{_json(row.details())}}}'
    # An arrow joins the send's start to the receive's last nanosecond: a point inside each slice.
    for ops in (SEND_OPS, RECV_OPS):  # viewers read events of one time in the file's order
        for row in trace.slices():
            if row.has_flow and row.op in ops:
                kind, time_ns = '"ph":"s"', row.start_ns
                if ops is RECV_OPS:
                    kind, time_ns = '"ph":"f","bp":"e"', max(row.start_ns, row.end_ns - 1)
                what = f'"id":{row.flow},"name":"message","cat":"message"'
                place = f'"pid":{_process_id(row.rank)},"tid":{threads[row.track]}'
                yield f'{{{kind},{what},{place},"ts":{_us(time_ns)}}}'
    for level in trace.levels():
        where = f'"pid":{_process_id(level.rank)},"ts":{_us(level.time_ns)}'
        yield f'{{"ph":"C",{where},"name":"memory","args":{{"bytes":{level.num_bytes}}}}}'


def _metadata(rank: int, thread: int, name: str, arguments: Mapping[str, object]) -> str:
    where = {"pid": _process_id(rank), "tid": thread}
    return _json({"ph": "M", **where, "name": name, "args": arguments})


def _process_id(rank: int) -> int:
    """Process ids count from 1: to viewers process 0 is the idle task."""
    return rank + 1


def _us(time_ns: int) -> str:
    sign, size = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def _json(value: object) -> str:
    # Unescaped: of an escape like \u00fc Perfetto 52 shows the six characters.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
