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

from collections.abc import Collection

import pandas as pd

from engine.plan.action import RECV_OPS, SEND_OPS
from ppbench.analysis.collectives import collectives

Receive = tuple[int, int, str, int] | tuple[int, int, str, int, int]
"""A receive: step, stage, op, microbatch, and its replica where that is not 0."""
CHANNEL = ["step", "replica", "direction", "source"]
MESSAGE = [*CHANNEL, "microbatch"]
"""Columns that identify a message at both of its ends; direction is `F` or `B`."""


def messages(spans: pd.DataFrame) -> pd.DataFrame:
    """One row per message, in the order in which each channel moved them.

    Columns: `MESSAGE`, `target` (the receiving stage), `source_rank`, `target_rank`, `num_bytes`,
    `send_start_ns`, `recv_start_ns`, `send_end_ns`, `moving_start_ns`, `end_ns` (of the receive),
    `moving_ns`. `spans` has the columns of `engine.plan.spans.Span` and both ends of each message.
    """
    sends, receives = (_ends(spans, ops) for ops in (SEND_OPS, RECV_OPS))
    both = sends.merge(receives, on=MESSAGE, suffixes=("_send", "_recv"))
    moved = both[MESSAGE].assign(
        target=both["source"] + both["direction"].map({"F": 1, "B": -1}).astype("int64"),
        source_rank=both["rank_send"],
        target_rank=both["rank_recv"],
        num_bytes=both["num_bytes_send"],
        send_start_ns=both["start_ns_send"],
        recv_start_ns=both["start_ns_recv"],
        send_end_ns=both["end_ns_send"],
        end_ns=both["end_ns_recv"],
    )
    moved = moved.sort_values([*CHANNEL, "send_start_ns"], ignore_index=True)
    ready = moved[["send_start_ns", "recv_start_ns"]].max(axis=1)
    is_early = moved[["send_end_ns", "end_ns"]].max(axis=1) <= moved["recv_start_ns"]
    over = moved["end_ns"].mask(is_early, moved["send_end_ns"])
    before = over.groupby([moved[name] for name in CHANNEL]).shift()
    began = ready.where(~(before > ready), before).mask(is_early, moved["send_start_ns"])
    began = began.clip(upper=over).astype(over.dtype)
    return moved.assign(moving_start_ns=began, moving_ns=over - began)


def _ends(spans: pd.DataFrame, ops: frozenset[str]) -> pd.DataFrame:
    """The transfers of the given ops with `direction` and `source`, the sending stage."""
    ends = spans[spans["op"].isin([str(op) for op in ops])]
    direction = ends["op"].astype(str).str[-1]
    is_send = ends["op"].astype(str).str.startswith("SEND")
    one_back = direction.map({"F": -1, "B": 1}).astype("int64")
    source = ends["stage"].where(is_send, ends["stage"] + one_back)
    return ends.assign(direction=direction, source=source)


def waiting_ns(spans: pd.DataFrame, moved: pd.DataFrame | None = None) -> pd.Series:
    """The part of each span spent waiting for a peer or the channel; 0 for computations.

    In the rest of the span of a transfer or collective its bytes move. `moved` are the spans'
    `messages`, where they are known already. Collectives need the spans of all replicas. Indexed
    like `spans`.
    """
    moved = messages(spans) if moved is None else moved
    moving = _of_each_end(spans, moved, "moving_start_ns").clip(lower=spans["start_ns"])
    if len(joined := collectives(spans)):
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
    ends = _ends(spans, SEND_OPS | RECV_OPS)
    return ends.groupby(MESSAGE, sort=False).ngroup()


def _of_each_end(spans: pd.DataFrame, moved: pd.DataFrame, column: str) -> pd.Series:
    """A column of the messages, at both ends of each; null for spans other than transfers."""
    ends = _ends(spans, SEND_OPS | RECV_OPS)[MESSAGE]
    values = ends.merge(moved[[*MESSAGE, column]], on=MESSAGE, how="left")[column]
    return values.set_axis(ends.index).reindex(spans.index)


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
