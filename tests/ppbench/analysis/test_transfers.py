"""Hand-written transfers, exact expected waiting and moving."""

import pandas as pd
import pytest
from spans import TWO_RANKS, frame

from ppbench.analysis.transfers import (
    corrected_end_ns,
    edges,
    messages,
    reconciled_end_ns,
    waiting_ns,
)


def test_a_transfer_moves_from_when_both_ends_are_ready():
    moving = TWO_RANKS["start_ns"] + waiting_ns(TWO_RANKS)
    starts = dict(zip(TWO_RANKS["op"], moving, strict=False))
    assert starts["RECV_F"] == starts["SEND_F"] == 200
    assert starts["RECV_B"] == starts["SEND_B"] == 410
    assert list(moving[TWO_RANKS["op"] == "F"]) == [100, 210]


def test_what_of_a_span_is_not_moving_bytes_is_waiting():
    waits = dict(zip(TWO_RANKS["op"], waiting_ns(TWO_RANKS), strict=False))
    assert waits["SEND_F"] == waits["SEND_B"] == 0
    assert waits["RECV_F"] == 200 - 90
    assert waits["RECV_B"] == 410 - 205
    assert waits["F"] == waits["B"] == waits["OPT"] == 0


def test_a_send_ends_no_later_than_its_receive():
    late = TWO_RANKS.copy()
    late.loc[late["op"] == "SEND_F", "end_ns"] = 900
    for noted in (False, True):
        ends = dict(
            zip(late["op"], reconciled_end_ns(late, completion_seen_on_wait=noted), strict=False)
        )
        assert ends["SEND_F"] == ends["RECV_F"] == 210
        settled = reconciled_end_ns(TWO_RANKS, completion_seen_on_wait=noted)
        assert list(settled) == list(TWO_RANKS["end_ns"])


def test_a_receive_that_is_noted_when_it_is_taken_was_over_when_its_send_was():
    taken = TWO_RANKS.copy()
    taken.loc[taken["op"] == "RECV_B", "end_ns"] = 580  # busy meanwhile; sent between 410 and 440
    assert set(reconciled_end_ns(taken, completion_seen_on_wait=True)[taken["op"] == "RECV_B"]) == {
        440
    }
    assert set(
        reconciled_end_ns(taken, completion_seen_on_wait=False)[taken["op"] == "RECV_B"]
    ) == {580}
    taken.loc[taken["op"] == "RECV_B", "start_ns"] = 460  # it cannot have come before that
    assert set(reconciled_end_ns(taken, completion_seen_on_wait=True)[taken["op"] == "RECV_B"]) == {
        460
    }


def test_what_was_sent_before_its_receive_was_posted_moved_as_it_was_sent():
    early = TWO_RANKS.copy()
    of_send, of_recv = early["op"] == "SEND_F", early["op"] == "RECV_F"
    early.loc[of_send, ["start_ns", "end_ns"]] = (100, 104)
    early.loc[of_recv, ["start_ns", "end_ns"]] = (150, 150)
    (message,) = messages(early).query("direction == 'F'").to_dict("records")
    assert (message["moving_start_ns"], message["moving_ns"]) == (100, 4)
    waits = waiting_ns(early)
    assert list(waits[of_send]) == list(waits[of_recv]) == [0]


EARLY = frame(
    (0, "SEND_F", 0, 0, 10, 500), (1, "RECV_F", 1, 0, 0, 30),  # waited for: it took 20
    (0, "SEND_F", 0, 1, 40, 500), (1, "RECV_F", 1, 1, 35, 400),
    (0, "SEND_F", 0, 2, 90, 500), (1, "RECV_F", 1, 2, 380, 450),  # asked for late
    (1, "SEND_B", 1, 0, 50, 60), (0, "RECV_B", 0, 0, 50, 55),
)  # fmt: skip


def test_a_message_that_nobody_waited_for_moved_as_fast_as_the_fastest_of_its_channel():
    receives = EARLY[EARLY["op"] == "RECV_F"].index
    waited_for, early, late = receives
    none = corrected_end_ns(EARLY, set())
    assert list(none) == list(EARLY["end_ns"])
    step = EARLY["step"].iloc[0]
    ends = corrected_end_ns(EARLY, {(step, 1, "RECV_F", 1), (step, 1, "RECV_F", 2)})
    assert list(ends[receives]) == [30, 40 + 20, 380 + 20]
    assert list(ends.drop([early, late])) == list(EARLY["end_ns"].drop([early, late]))
    shortest = corrected_end_ns(EARLY, {(step, 1, "RECV_F", 0)})
    assert shortest[waited_for] == 30


def test_one_rank_has_no_transfers():
    compute = TWO_RANKS[TWO_RANKS["op"].isin(["F", "B"])]
    assert list(reconciled_end_ns(compute, completion_seen_on_wait=True)) == list(compute["end_ns"])
    assert list(waiting_ns(compute)) == [0] * len(compute)
    assert messages(compute).empty
    assert edges(messages(compute)).empty


QUEUE = frame(
    (0, "SEND_F", 0, 0, 0, 40),
    (0, "SEND_F", 0, 1, 10, 70),
    (0, "SEND_F", 0, 2, 200, 200),  # handed over before its receive was there
    (1, "RECV_F", 1, 0, 5, 40),
    (1, "RECV_F", 1, 1, 6, 70),
    (1, "RECV_F", 1, 2, 250, 260),
).assign(num_bytes=1000)


def test_a_message_waits_for_the_one_before_it_on_its_channel():
    found = messages(QUEUE)
    assert found["microbatch"].tolist() == [0, 1, 2]
    assert found["moving_start_ns"].tolist() == [5, 40, 250]
    assert found["moving_ns"].tolist() == [35, 30, 10]
    assert waiting_ns(QUEUE).tolist() == [5, 30, 0, 0, 34, 0]


def test_an_edges_rate_is_all_its_bytes_over_all_the_time_in_which_they_moved():
    (edge,) = edges(messages(QUEUE)).to_dict("records")
    assert (edge["source"], edge["target"]) == (0, 1)
    assert (edge["source_rank"], edge["target_rank"]) == (0, 1)
    assert edge["num_messages"] == 3
    assert edge["moving_ns"] == pytest.approx(25)
    assert edge["bytes_per_s"] == pytest.approx(3000 / 75e-9)
    assert edge["sender_waiting_ns"] == pytest.approx((5 + 30 + 50) / 3)
    assert edge["receiver_waiting_ns"] == pytest.approx((0 + 34 + 0) / 3)


def test_each_direction_and_each_step_is_its_own():
    both = pd.concat([TWO_RANKS, TWO_RANKS.assign(step=6)], ignore_index=True)
    found = edges(messages(both))
    assert found[["source", "target", "num_messages"]].to_numpy().tolist() == [[0, 1, 1], [1, 0, 1]]
    assert found["moving_ns"].tolist() == [10, 30]
