"""Perfetto's own protobuf, which its viewer and its SQL read without loss.

Unlike Chrome's JSON it counts in nanoseconds, has counters with units, and states the order of
tracks. A message's arrow is attached to the beginning of its send and the end of its receive:
events are read in order of time, and a receive may begin before the arrow does.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from engine.plan.action import SEND_OPS
from ppbench.errors import UsageError
from ppbench.export.trace import Level, Slice, Trace

_SEQUENCE = 1


def perfetto_trace(trace: Trace) -> Iterator[bytes]:
    """The file piece by piece; the same bytes for the same run.

    Raises UsageError if the package perfetto is not installed.
    """
    return _packets(_protobuf(), trace)


def _protobuf() -> ModuleType:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise UsageError(
            "--perfetto: needs the package perfetto; install it with, in ppbench's folder: "
            "pip install -e '.[perfetto]', or write Chrome's JSON without --perfetto"
        ) from error
    definitions: ModuleType = perfetto_trace_pb2
    return definitions


def _packets(pb: ModuleType, trace: Trace) -> Iterator[bytes]:
    yield from _descriptors(pb, trace)
    for row in trace.slices():
        yield from _slice(pb, trace, row)
    for level in trace.levels():
        yield _level(pb, trace, level)


def _descriptors(pb: ModuleType, trace: Trace) -> Iterator[bytes]:
    for rank, name in trace.processes.items():
        descriptor = pb.TrackDescriptor(uuid=_process_uuid(rank))
        descriptor.process.pid = _process_uuid(rank)
        descriptor.process.process_name = name
        descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
        yield _written(pb, pb.TracePacket(track_descriptor=descriptor))
    for track in trace.tracks:
        descriptor = pb.TrackDescriptor(uuid=_track_uuid(trace, track.number), name=track.name)
        descriptor.parent_uuid = _process_uuid(track.rank)
        descriptor.sibling_order_rank = track.number
        yield _written(pb, pb.TracePacket(track_descriptor=descriptor))
    for rank in sorted({level.rank for level in trace.levels()}):
        descriptor = pb.TrackDescriptor(uuid=_memory_uuid(trace, rank), name="memory")
        descriptor.parent_uuid = _process_uuid(rank)
        descriptor.counter.unit = pb.CounterDescriptor.UNIT_SIZE_BYTES
        descriptor.sibling_order_rank = len(trace.tracks)
        yield _written(pb, pb.TracePacket(track_descriptor=descriptor))


def _slice(pb: ModuleType, trace: Trace, row: Slice) -> Iterator[bytes]:
    uuid = _track_uuid(trace, row.track)
    begin = _event(pb, uuid, row.start_ns, pb.TrackEvent.TYPE_SLICE_BEGIN)
    begin.track_event.name = row.name
    begin.track_event.categories.append(row.op)
    for name, value in row.details().items():
        kind = "string_value" if isinstance(value, str) else "int_value"
        begin.track_event.debug_annotations.add(name=name, **{kind: value})
    end = _event(pb, uuid, row.end_ns, pb.TrackEvent.TYPE_SLICE_END)
    if row.has_flow and row.op in SEND_OPS:
        begin.track_event.flow_ids.append(_flow_id(row))
    elif row.has_flow:
        end.track_event.terminating_flow_ids.append(_flow_id(row))
    yield _written(pb, begin)
    yield _written(pb, end)


def _level(pb: ModuleType, trace: Trace, level: Level) -> bytes:
    uuid = _memory_uuid(trace, level.rank)
    packet = _event(pb, uuid, level.time_ns, pb.TrackEvent.TYPE_COUNTER)
    packet.track_event.counter_value = level.num_bytes
    return _written(pb, packet)


def _event(pb: ModuleType, uuid: int, time_ns: int, kind: int) -> Any:
    packet = pb.TracePacket(timestamp=time_ns, trusted_packet_sequence_id=_SEQUENCE)
    packet.track_event.type = kind
    packet.track_event.track_uuid = uuid
    return packet


def _written(pb: ModuleType, packet: object) -> bytes:
    """The bytes of a trace of one packet: the bytes of several, joined, are one trace."""
    written: bytes = pb.Trace(packet=[packet]).SerializeToString(deterministic=True)
    return written


def _flow_id(row: Slice) -> int:
    """Number of the flow, from 1: 0 means none."""
    return row.flow + 1


def _process_uuid(rank: int) -> int:
    """Id of a rank's track and of its process, from 1: process 0 is the idle task."""
    return rank + 1


def _track_uuid(trace: Trace, number: int) -> int:
    return len(trace.processes) + 1 + number


def _memory_uuid(trace: Trace, rank: int) -> int:
    return len(trace.processes) + len(trace.tracks) + 1 + rank
