from dataclasses import replace

import pytest

from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.lower import Channel, channel_of, lower, prove_no_deadlock
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import build_program


def text(row):
    return " ".join(str(action) for action in row)


def test_a_send_follows_its_producer_and_a_receive_stands_one_action_ahead():
    lowered = lower(build_program("1f1b", 2, 2))
    assert text(
        lowered.actions[0]
    ) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1".replace(
        "0B0 0RECV_B1", "0RECV_B1 0B0"
    )
    assert text(lowered.actions[1]) == ("1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")


def test_just_in_time_posts_each_receive_right_before_its_consumer():
    lowered = lower(build_program("1f1b", 2, 2), look_ahead=0)
    assert text(lowered.actions[1]) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_compute_order_is_unchanged_and_every_message_has_two_ends(name):
    program = build_program(name, 4, 6)
    lowered = lower(program)
    for row, before in zip(lowered.actions, program.actions, strict=True):
        assert tuple(a for a in row if a.op in COMPUTE_OPS) == before
    ends = {
        ops: sorted(
            (channel_of(a), a.microbatch) for r in lowered.actions for a in r if a.op in ops
        )
        for ops in (SEND_OPS, RECV_OPS)
    }
    assert ends[SEND_OPS] == ends[RECV_OPS]
    assert len(ends[SEND_OPS]) == 2 * 3 * 6


def test_one_rank_communicates_nothing():
    program = build_program("1f1b", 1, 4)
    assert lower(program).actions == program.actions


def test_both_ends_of_a_message_name_one_channel():
    assert channel_of(Action(1, Op.SEND_F, 0)) == channel_of(Action(2, Op.RECV_F, 0))
    assert channel_of(Action(2, Op.SEND_B, 0)) == channel_of(Action(1, Op.RECV_B, 0))
    assert channel_of(Action(1, Op.SEND_F, 0)) == Channel(1, 2)


def broken(change):
    lowered = lower(build_program("1f1b", 2, 3))
    rows = [list(row) for row in lowered.actions]
    change(rows)
    return replace(lowered, actions=tuple(tuple(row) for row in rows))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[1].remove(Action(1, Op.RECV_F, 2)), "received for microbatch None"),
        (lambda rows: rows[0].remove(Action(0, Op.SEND_F, 2)), "is sent for microbatch None"),
        (
            lambda rows: rows[1].append(rows[1].pop(rows[1].index(Action(1, Op.RECV_F, 0)))),
            "is sent for microbatch 0 and received for microbatch 1",
        ),
        (
            lambda rows: rows[0].insert(0, rows[0].pop(rows[0].index(Action(0, Op.SEND_F, 0)))),
            "stands before the action it sends for",
        ),
        (
            lambda rows: rows[1].append(rows[1].pop(rows[1].index(Action(1, Op.RECV_F, 2)))),
            "1RECV_F2 is not posted before it",
        ),
    ],
)
def test_a_program_that_could_hang_or_mix_up_messages_is_refused(change, reason):
    with pytest.raises(ProgramError, match=reason):
        prove_no_deadlock(broken(change))
