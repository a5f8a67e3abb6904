import itertools
from collections import Counter
from dataclasses import replace

import pytest
from brute_force import delivers_all
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mutations import lowered_programs, mutated_programs
from schedule_grid import stages_per_rank

from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, parse_action
from engine.plan.check import check, check_delivery_between_ranks, prove_no_deadlock
from engine.plan.lower import Policy, lower
from engine.plan.messages import Edge, edge_of
from engine.plan.program import Placement, Program
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.walk import Sharing

FAMILIES = [(name, v) for name in SCHEDULES for v in stages_per_rank(name)]


def text(row):
    return " ".join(str(action) for action in row)


def is_safe(lowered, sharing):
    try:
        prove_no_deadlock(lowered, sharing)
    except ProgramError:
        return False
    return True


def test_a_send_follows_its_producer_and_a_receive_stands_one_action_ahead():
    lowered = lower(build_program("1f1b", 2, 2))
    assert text(lowered.actions[0]) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
    assert text(lowered.actions[1]) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_just_in_time_posts_each_receive_right_before_its_consumer():
    lowered = lower(build_program("1f1b", 2, 2), Policy.JUST_IN_TIME)
    assert text(lowered.actions[1]) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_early_without_look_ahead_is_just_in_time(name, v):
    program = build_program(name, 3, 6, v)
    assert lower(program, Policy.EARLY, 0) == lower(program, Policy.JUST_IN_TIME, 7)


def test_receives_posted_together_stand_in_the_order_in_which_they_are_needed():
    lowered = lower(build_program("interleaved_1f1b", 2, 4, 2), Policy.EARLY, 3)
    assert text(lowered.actions[1][:4]) == "1RECV_F0 1RECV_F1 3RECV_F0 1F0"


def test_a_look_ahead_below_zero_is_refused_and_not_the_program():
    with pytest.raises(ValueError, match="look_ahead is -1; expected at least 0"):
        lower(build_program("1f1b", 2, 4), Policy.EARLY, -1)


def test_a_split_backward_sends_after_its_first_half():
    lowered = lower(build_program("zb_h1", 2, 1))
    assert text(lowered.actions[1]) == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"


@pytest.mark.parametrize("look_ahead", [0, 1, 3, 10_000])
@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_every_message_has_two_ends_and_compute_keeps_its_order(name, v, look_ahead):
    program = build_program(name, 3, 6, v)
    lowered = lower(program, Policy.EARLY, look_ahead)
    assert lowered.compute_only().actions == program.actions
    assert not any(count > 1 for row in lowered.actions for count in Counter(row).values())
    sent, received = (
        sorted((edge_of(a), a.microbatch) for r in lowered.actions for a in r if a.op in ops)
        for ops in (SEND_OPS, RECV_OPS)
    )
    assert sent == received
    ranks = program.placement.ranks
    num_crossings = sum(here != there for here, there in itertools.pairwise(ranks))
    assert len(sent) == 2 * num_crossings * 6


@pytest.mark.parametrize("look_ahead", [1, 2, 5])
@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "interleaved_zb", "dualpipev"])
def test_a_receive_is_posted_so_many_compute_actions_ahead_or_earlier_for_its_channel(
    name, look_ahead
):
    for row in lower(build_program(name, 4, 8), Policy.EARLY, look_ahead).actions:
        compute = [action for action in row if action.op in COMPUTE_OPS]
        num_done = 0
        for action in row:
            num_done += action.op in COMPUTE_OPS
            if action.op in RECV_OPS:
                ops = "F" if action.op is Op.RECV_F else "BI"
                (consumer,) = (
                    at
                    for at, one in enumerate(compute)
                    if one.stage == action.stage
                    and one.microbatch == action.microbatch
                    and one.op in ops
                )
                assert num_done == max(0, consumer - look_ahead)


def test_both_ends_of_a_message_name_one_channel():
    assert edge_of(Action(1, Op.SEND_F, 0)) == edge_of(Action(2, Op.RECV_F, 0))
    assert edge_of(Action(2, Op.SEND_B, 0)) == edge_of(Action(1, Op.RECV_B, 0))
    assert edge_of(Action(1, Op.SEND_F, 0)) == Edge(1, 2)
    with pytest.raises(ValueError, match="0F0 is not a transfer"):
        edge_of(Action(0, Op.F, 0))


def test_a_program_with_transfers_of_its_own_keeps_them_if_it_cannot_hang():
    lowered = lower(build_program("1f1b", 2, 3), Policy.JUST_IN_TIME)
    assert lower(lowered, Policy.EARLY) == lowered
    with pytest.raises(ProgramError, match="0SEND_F2 is missing"):
        lower(broken(lambda rows: rows[0].remove(Action(0, Op.SEND_F, 2))))


def broken(change):
    lowered = lower(build_program("1f1b", 2, 3))
    rows = [list(row) for row in lowered.actions]
    change(rows)
    return replace(lowered, actions=tuple(tuple(row) for row in rows))


def to_start(row, cell):
    row.insert(0, row.pop(row.index(parse_action(cell))))


@pytest.mark.parametrize(
    ("change", "rank", "action", "reason"),
    [
        (
            lambda rows: rows[1].remove(Action(1, Op.RECV_F, 2)),
            *(1, "1F2", "1RECV_F2 is not posted before it"),
        ),
        (
            lambda rows: to_start(rows[0], "0SEND_F0"),
            *(0, "0SEND_F0", "comes before the action whose result it sends"),
        ),
        (
            lambda rows: rows[0].insert(3, Action(0, Op.SEND_F, 0)),
            *(0, "0SEND_F0", "has been done before"),
        ),
        (
            lambda rows: rows[1].append(Action(1, Op.RECV_B, 0)),
            *(1, "1RECV_B0", "nothing on this rank needs it from another rank"),
        ),
        (
            lambda rows: rows[1].append(Action(0, Op.RECV_B, 0)),
            *(1, "0RECV_B0", "stage 0 is placed on rank 0"),
        ),
        (
            lambda rows: rows[1].append(Action(1, Op.RECV_F, 9)),
            1,
            "1RECV_F9",
            "waits for 0SEND_F9 on rank 0, which is not there",
        ),
    ],
)
def test_a_transfer_that_stands_wrong_is_told_with_its_place(change, rank, action, reason):
    with pytest.raises(ProgramError) as caught:
        prove_no_deadlock(broken(change))
    error = caught.value
    assert (error.rank, error.action) == (rank, action)
    assert reason in error.reason
    assert str(error).splitlines()[1].startswith("rank 0: ")


def test_a_hang_is_reported_as_the_circle_of_waits():
    lowered = lower(build_program("1f1b", 2, 2), Policy.JUST_IN_TIME)
    with pytest.raises(ProgramError) as caught:
        prove_no_deadlock(lowered, Sharing.RANK)
    assert caught.value.reason == (
        "hangs: "
        "0RECV_B0 on rank 0 is queued behind 0SEND_F1; "
        "0SEND_F1 on rank 0 waits for 1RECV_F1 on rank 1; "
        "1RECV_F1 on rank 1 is queued behind 1SEND_B0; "
        "1SEND_B0 on rank 1 waits for 0RECV_B0 on rank 0"
    )
    assert [" ".join(line.split()) for line in str(caught.value).splitlines()[1:]] == [
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 [0RECV_B0] 0B0 0RECV_B1 0B1",
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_circle_may_lead_over_what_is_not_posted_yet():
    rows = ("0F0 0SEND_F0 0RECV_B1 0B1 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    with pytest.raises(ProgramError) as caught:
        prove_no_deadlock(Program("test", Placement((0, 1), 2), 2, actions))
    assert caught.value.reason.startswith("hangs: ")
    for wait in (
        "0B1 on rank 0 waits for 0RECV_B1",
        "0RECV_B1 on rank 0 waits for 1SEND_B1 behind 1F1 on rank 1",
        "1F1 on rank 1 waits for 1RECV_F1",
        "1RECV_F1 on rank 1 waits for 0SEND_F1 behind 0B1 on rank 0",
    ):
        assert wait in caught.value.reason


POSTINGS = [(Policy.JUST_IN_TIME, 0), (Policy.EARLY, 1), (Policy.EARLY, 3), (Policy.EARLY, 99)]


def test_a_legal_program_never_hangs_with_a_channel_per_stage_edge(is_thorough):
    num_legal, num_examples = Counter(), 400 if is_thorough else 200

    @settings(max_examples=num_examples, derandomize=True)
    @given(mutated_programs(), st.sampled_from(POSTINGS))
    def lowers(program, posting):
        try:
            check(program)
        except ProgramError:
            assume(condition=False)
        assert delivers_all(lower(program, *posting))
        num_legal["all"] += 1

    lowers()
    assert num_legal["all"] > num_examples / 2


def test_what_is_proved_with_a_line_per_rank_edge_is_delivered_in_order_between_ranks():
    verdicts = Counter()

    @settings(max_examples=300, derandomize=True)
    @given(lowered_programs(st.integers(2, 3)), st.randoms())
    def is_delivered(lowered, chance):
        row = list(chance.choice(lowered.actions))
        rank = lowered.actions.index(tuple(row))
        receives = [at for at, action in enumerate(row) if action.op in RECV_OPS]
        here, there = chance.choice(receives), chance.choice(receives)
        row[here], row[there] = row[there], row[here]
        rows = [tuple(row) if r == rank else old for r, old in enumerate(lowered.actions)]
        changed = replace(lowered, actions=tuple(rows))
        is_proved = is_safe(changed, Sharing.RANK_EDGE)
        try:
            check_delivery_between_ranks(changed)
            verdicts["delivered"] += 1
        except ProgramError:
            assert not is_proved
            verdicts["refused"] += 1

    is_delivered()
    assert min(verdicts.values()) > 15
