"""Transfers, told apart: how long an end waited for the other, and how long bytes moved.

A receive is posted long before its message exists, and a send may stand in line, so a transfer's
span by itself says little. Matching the two ends of each message tells more:

    SEND      |======================|
    RECV  |==============================|      posted early: it waits
              ^ moving: both ends are ready, and the channel's message before is over

The bytes move from the later of the two starts (or the end of the message before, if that is later:
a channel keeps order) to the end of the receive. Where the receive was over as it began, since
its send had been (through memory), they moved while that lasted.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from engine.plan.action import RECV_OPS, SEND_OPS

Receive = tuple[int, int, str, int]
"""A step, and the receive of it: stage, op, microbatch."""
MESSAGE = ["step", "direction", "source", "microbatch"]
"""What the two ends of one message have in common; direction is `F` or `B`."""


def messages(spans: pd.DataFrame) -> pd.DataFrame:
    """One row per message, in the order in which each channel moved them.

    Columns: `MESSAGE`, `target` (the receiving stage), `source_rank`, `target_rank`, `num_bytes`,
    `send_start_ns`, `recv_start_ns`, `send_end_ns`, `moving_start_ns`, `end_ns` (of the receive),
    `moving_ns`. `spans` has the columns of `engine.plan.spans.Span` and both ends of each message.
    """
    sends, receives = (_ends(spans, ops) for ops in (SEND_OPS, RECV_OPS))
    both = sends.merge(receives, on=MESSAGE, suffixes=("_send", "_recv"))
    found = both[MESSAGE].assign(
        target=both["source"] + both["direction"].map({"F": 1, "B": -1}).astype("int64"),
        source_rank=both["rank_send"],
        target_rank=both["rank_recv"],
        num_bytes=both["num_bytes_send"],
        send_start_ns=both["start_ns_send"],
        recv_start_ns=both["start_ns_recv"],
        send_end_ns=both["end_ns_send"],
        end_ns=both["end_ns_recv"],
    )
    return _with_moving(found)


def _ends(spans: pd.DataFrame, ops: frozenset[str]) -> pd.DataFrame:
    """The transfers of the given ops with `direction` and `source`, the sending stage."""
    ends = spans[spans["op"].isin([str(op) for op in ops])]
    direction = ends["op"].astype(str).str[-1]
    is_send = ends["op"].astype(str).str.startswith("SEND")
    one_back = direction.map({"F": -1, "B": 1}).astype("int64")
    source = ends["stage"].where(is_send, ends["stage"] + one_back)
    return ends.assign(direction=direction, source=source)


def _with_moving(found: pd.DataFrame) -> pd.DataFrame:
    found = found.sort_values(["step", "direction", "source", "send_start_ns"], ignore_index=True)
    ready = found[["send_start_ns", "recv_start_ns"]].max(axis=1)
    is_early = found[["send_end_ns", "end_ns"]].max(axis=1) <= found["recv_start_ns"]
    over = found["end_ns"].mask(is_early, found["send_end_ns"])
    before = over.groupby([found[one] for one in ("step", "direction", "source")]).shift()
    began = ready.where(~(before > ready), before).mask(is_early, found["send_start_ns"])
    began = began.clip(upper=over).astype(over.dtype)
    return found.assign(moving_start_ns=began, moving_ns=over - began)


def moving_start_ns(spans: pd.DataFrame) -> pd.Series:
    """For each span, when it really began: a transfer when its bytes could move, others at start.

    Indexed as `spans`.
    """
    moving = _of_each_end(spans, messages(spans), "moving_start_ns").clip(lower=spans["start_ns"])
    return spans["start_ns"].mask(moving.notna(), moving).astype(spans["start_ns"].dtype)


def waiting_ns(spans: pd.DataFrame) -> pd.Series:
    """For each span, how much of it was waiting for the peer or the channel; 0 for computations.

    What is left of a transfer's span is moving bytes. Indexed as `spans`.
    """
    began = moving_start_ns(spans).clip(upper=spans["end_ns"])
    return (began - spans["start_ns"]).clip(lower=0)


def settled_end_ns(spans: pd.DataFrame, *, is_noted_when_taken: bool) -> pd.Series:
    """For each span, when it was over at the latest.

    A message that has been received has been sent, however late the sender's thread was woken to
    note it; so a send ends no later than its receive. Where a receive is noted only when its
    message is taken (gloo), one that nobody waited for was there when its sender was done, which
    gloo is not before the receive is posted. Indexed as `spans`.
    """
    found = messages(spans)
    if is_noted_when_taken:
        ready = found[["send_start_ns", "recv_start_ns"]].max(axis=1)
        sent = found["send_end_ns"].clip(lower=ready)
        found["end_ns"] = found["end_ns"].where(found["end_ns"] < sent, sent)
    arrived = _of_each_end(spans, found, "end_ns").clip(lower=spans["start_ns"])
    return spans["end_ns"].mask(arrived < spans["end_ns"], arrived).astype(spans["end_ns"].dtype)


def hastened_end_ns(spans: pd.DataFrame, early: Collection[Receive]) -> pd.Series:
    """For each span, when it was over, where receives are noted only when their messages are taken.

    `early`: the receives whose message was there when its rank asked for it, at what is their end
    here. When they came nobody saw; each is taken to have moved as fast as the fastest of its
    channel, of all steps. Indexed as `spans`.
    """
    keys = zip(spans["step"], spans["stage"], spans["op"], spans["microbatch"], strict=True)
    was_early = pd.Series([key in early for key in keys], spans.index, dtype=bool)
    found = messages(spans)
    ready = found[["send_start_ns", "recv_start_ns"]].max(axis=1)
    took = (found["end_ns"] - ready).clip(lower=0)
    least = took.groupby([found["direction"], found["source"]]).transform("min")
    arrived = _of_each_end(spans, found.assign(end_ns=ready + least), "end_ns")
    return (
        spans["end_ns"]
        .mask(was_early & (arrived < spans["end_ns"]), arrived)
        .astype(spans["end_ns"].dtype)
    )


def message_numbers(spans: pd.DataFrame) -> pd.Series:
    """For each transfer, the number of its message: the same at both ends, from 0 on.

    Indexed as `spans`, without its computations.
    """
    ends = _ends(spans, SEND_OPS | RECV_OPS)
    return ends.groupby(MESSAGE, sort=False).ngroup()


def _of_each_end(spans: pd.DataFrame, found: pd.DataFrame, column: str) -> pd.Series:
    """A column of the messages, at both ends of each; null for spans that are no transfer."""
    ends = _ends(spans, SEND_OPS | RECV_OPS)[MESSAGE]
    values = ends.merge(found[[*MESSAGE, column]], on=MESSAGE, how="left")[column]
    return values.set_axis(ends.index).reindex(spans.index)


def edges(found: pd.DataFrame) -> pd.DataFrame:
    """One row per channel of the `messages` of some steps.

    Columns: `source`, `target` (stages), `source_rank`, `target_rank`, `num_messages` (of a step),
    `num_bytes` (of a message, mean), `moving_ns` (mean), `bytes_per_s` (all bytes over all the time
    in which they moved), `sender_waiting_ns` and `receiver_waiting_ns` (of a message, mean).
    """
    waits = found.assign(
        sender_waiting_ns=(found["moving_start_ns"] - found["send_start_ns"]).clip(lower=0),
        receiver_waiting_ns=(found["moving_start_ns"] - found["recv_start_ns"]).clip(lower=0),
    )
    groups = waits.groupby(["source", "target", "source_rank", "target_rank"])
    means = groups[["num_bytes", "moving_ns", "sender_waiting_ns", "receiver_waiting_ns"]].mean()
    means.insert(0, "num_messages", groups.size() // max(1, found["step"].nunique()))
    moving_s = groups["moving_ns"].sum() / 1e9
    means.insert(3, "bytes_per_s", (groups["num_bytes"].sum() / moving_s).where(moving_s > 0))
    return means.reset_index()
