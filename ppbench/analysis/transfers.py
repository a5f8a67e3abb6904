"""Transfers: how long each end of a message waited, and how long its bytes moved.

A receive is posted long before its message exists, and a send may be queued, so a transfer's span
alone says little. Matching the two ends of each message says more:

    SEND      |======================|
    RECV  |==============================|      posted early: it waits
              ^ moving: both ends are ready, and the channel's previous message is over

The bytes move from the later of the two starts (or the end of the previous message, if that is
later: a channel keeps order) to the end of the receive. Where the send was over before the receive
began (through memory), they moved during the send.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import RECV_OPS, SEND_OPS
from ppbench.analysis.collectives import collectives
from ppbench.analysis.metrics import TIMES, Ns

Receive = tuple[int, int, str, int] | tuple[int, int, str, int, int]
"""A receive: step, stage, op, microbatch, and its replica where that is not 0."""
CHANNEL = ["step", "replica", "direction", "source"]
MESSAGE = [*CHANNEL, "microbatch"]
"""Columns that identify a message at both of its ends; direction is `F` or `B`."""
_DIRECTIONS = ("F", "B")


def messages(spans: pd.DataFrame) -> pd.DataFrame:
    """One row per message, in the order in which each channel moved them.

    Columns: `MESSAGE`, `target` (the receiving stage), `source_rank`, `target_rank`, `num_bytes`,
    `send_start_ns`, `recv_start_ns`, `send_end_ns`, `moving_start_ns`, `end_ns` (of the receive),
    `moving_ns`, and `send` and `receive`, the labels of both ends in `spans`. These have the
    columns of `engine.plan.spans.Span` and both ends of each message.
    """
    at, is_send, of_ends = _ends(spans)
    key = _number_of(of_ends)
    # The first of a label alone: there is one.
    _, sends, receives = np.intersect1d(key[is_send], key[~is_send], return_indices=True)
    send, receive = np.flatnonzero(is_send)[sends], np.flatnonzero(~is_send)[receives]
    start_ns, end_ns = (spans[name].to_numpy(np.int64)[at] for name in TIMES)
    direction, source = of_ends["direction"], of_ends["source"]
    by_channel = [of_ends[name][send] for name in reversed(CHANNEL)]
    order = np.lexsort((send, start_ns[send], *by_channel))
    send, receive = send[order], receive[order]
    channel = _number_of({name: of_ends[name][send] for name in CHANNEL})
    ready = np.maximum(start_ns[send], start_ns[receive])
    is_early = np.maximum(end_ns[send], end_ns[receive]) <= start_ns[receive]
    over = np.where(is_early, end_ns[send], end_ns[receive])
    is_after = np.diff(channel, prepend=-1) == 0
    began = np.where(is_after, np.maximum(ready, np.roll(over, 1)), ready)
    began = np.minimum(np.where(is_early, start_ns[send], began), over)
    labels, rank = spans.index.to_numpy()[at], spans["rank"].to_numpy()[at]
    moved = {name: of_ends[name][send] for name in MESSAGE}
    moved["direction"] = np.array(_DIRECTIONS, dtype=object)[direction[send]]
    return pd.DataFrame(
        {
            **moved,
            "target": source[send] + np.where(direction[send] == 0, 1, -1),
            "source_rank": rank[send],
            "target_rank": rank[receive],
            "num_bytes": spans["num_bytes"].to_numpy()[at][send],
            "send_start_ns": start_ns[send],
            "recv_start_ns": start_ns[receive],
            "send_end_ns": end_ns[send],
            "end_ns": end_ns[receive],
            "moving_start_ns": began,
            "moving_ns": over - began,
            "send": labels[send],
            "receive": labels[receive],
        }
    )


def _ends(spans: pd.DataFrame) -> tuple[Ns, npt.NDArray[np.bool_], dict[str, Ns]]:
    """The places of transfers in spans, which of them are sends, and their `MESSAGE`.

    A direction is its place in `_DIRECTIONS`.
    """
    ops = spans["op"].astype("category")
    names, code = [str(op) for op in ops.cat.categories], ops.cat.codes.to_numpy()
    is_end = np.array([name in SEND_OPS | RECV_OPS for name in names], dtype=bool)
    at = np.flatnonzero(is_end[code]) if names else np.zeros(0, int)
    code = code[at]
    is_send = np.array([name in SEND_OPS for name in names], dtype=bool)[code]
    direction = np.array([int(name.endswith("B")) for name in names], dtype=int)[code]
    step, replica, stage, microbatch = (
        spans[name].to_numpy(np.int64)[at] for name in ("step", "replica", "stage", "microbatch")
    )
    source = np.where(is_send, stage, stage + np.where(direction == 0, -1, 1))
    found = dict(zip(MESSAGE, (step, replica, direction, source, microbatch), strict=True))
    return at, is_send, found


def _number_of(columns: Mapping[str, Ns]) -> Ns:
    """A number of each row, equal for equal rows, in their order."""
    own = [column - column.min(initial=0) for column in columns.values()]
    return np.asarray(np.ravel_multi_index(own, [column.max(initial=0) + 1 for column in own]))


def waiting_ns(
    spans: pd.DataFrame, moved: pd.DataFrame | None = None, joined: pd.DataFrame | None = None
) -> pd.Series:
    """The part of each span spent waiting for a peer or the channel; 0 for computations.

    In the rest of the span of a transfer or collective its bytes move. `moved` and
    `joined` are the spans' `messages` and `collectives`, where they are known already. Collectives
    need the spans of all replicas. Indexed like `spans`.
    """
    moved = messages(spans) if moved is None else moved
    moving = _of_each_end(spans, moved, "moving_start_ns").clip(lower=spans["start_ns"])
    joined = collectives(spans) if joined is None else joined
    if len(joined):
        moving = moving.fillna(joined["ready_ns"])
    began = spans["start_ns"].mask(moving.notna(), moving).astype(spans["start_ns"].dtype)
    return (began.clip(upper=spans["end_ns"]) - spans["start_ns"]).clip(lower=0)


def reconciled_end_ns(spans: pd.DataFrame, *, completion_seen_on_wait: bool) -> pd.Series:
    """The latest possible end of each span, by both ends of its message.

    A message that has been received has been sent, however late the sender's thread woke up; so a
    send ends no later than its receive. With `completion_seen_on_wait` (gloo), a rank sees that a
    receive is complete only when it waits for it; a receive that was not waited for was complete
    when its send was, and gloo completes no send before the receive is posted.

    Indexed like `spans`.
    """
    moved = messages(spans)
    if completion_seen_on_wait:
        ready = moved[["send_start_ns", "recv_start_ns"]].max(axis=1)
        sent = moved["send_end_ns"].clip(lower=ready)
        moved["end_ns"] = moved["end_ns"].where(moved["end_ns"] < sent, sent)
    arrived = _of_each_end(spans, moved, "end_ns").clip(lower=spans["start_ns"])
    return spans["end_ns"].mask(arrived < spans["end_ns"], arrived).astype(spans["end_ns"].dtype)


def corrected_end_ns(spans: pd.DataFrame, early: Collection[Receive]) -> pd.Series:
    """The end of each span, corrected where a receive's completion is seen only on waiting.

    `early` are the receives that were complete when their rank waited for them; that wait is their
    end in `spans`. Their arrival was not observed: each is assumed to have moved as fast as the
    fastest of its channel in all steps. Indexed like `spans`.
    """
    if not early:
        return spans["end_ns"]
    columns = (spans[name] for name in ("step", "stage", "op", "microbatch", "replica"))
    known = {(*receive, 0)[:5] for receive in early}
    is_known = [key in known for key in zip(*columns, strict=True)]
    was_early = pd.Series(is_known, spans.index, dtype=bool)
    moved = messages(spans)
    ready = moved[["send_start_ns", "recv_start_ns"]].max(axis=1)
    took = (moved["end_ns"] - ready).clip(lower=0)
    least = took.groupby([moved["replica"], moved["direction"], moved["source"]]).transform("min")
    arrived = _of_each_end(spans, moved.assign(end_ns=ready + least), "end_ns")
    end_ns = spans["end_ns"]
    return end_ns.mask(was_early & (arrived < end_ns), arrived).astype(end_ns.dtype)


def message_numbers(spans: pd.DataFrame) -> pd.Series:
    """The number of each transfer's message, from 0, the same at both ends.

    Indexed as `spans`, without computations.
    """
    at, _, of_ends = _ends(spans)
    return pd.Series(pd.factorize(_number_of(of_ends))[0], spans.index[at])


def _of_each_end(spans: pd.DataFrame, moved: pd.DataFrame, column: str) -> pd.Series:
    """A column of the messages, at both ends of each; null for spans other than transfers."""
    ends = np.concatenate([moved["send"], moved["receive"]])
    return pd.Series(np.tile(moved[column], 2), ends).reindex(spans.index)


def edges(moved: pd.DataFrame) -> pd.DataFrame:
    """One row per channel of the `messages` of some steps.

    Columns: `source`, `target` (stages), `source_rank`, `target_rank`, `replica`, `num_messages`,
    (of a step), `num_bytes` (of a message, mean), `moving_ns` (mean), `bytes_per_s` (all bytes over
    all the time in which they moved), `sender_waiting_ns` and `receiver_waiting_ns` (of a message,
    mean).
    """
    waits = moved.assign(
        sender_waiting_ns=(moved["moving_start_ns"] - moved["send_start_ns"]).clip(lower=0),
        receiver_waiting_ns=(moved["moving_start_ns"] - moved["recv_start_ns"]).clip(lower=0),
    )
    groups = waits.groupby(["source", "target", "source_rank", "target_rank", "replica"])
    means = groups[["num_bytes", "moving_ns", "sender_waiting_ns", "receiver_waiting_ns"]].mean()
    means.insert(0, "num_messages", groups.size() // max(1, moved["step"].nunique()))
    moving_s = groups["moving_ns"].sum() / 1e9
    means.insert(3, "bytes_per_s", (groups["num_bytes"].sum() / moving_s).where(moving_s > 0))
    return means.reset_index()
