"""Which programs are legal and cannot hang, and what is said of the others.

Brute force judges programs that chance has changed; texts are of programs written by hand.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from brute_force import delivers_all, is_legal
from drawn_programs import FAMILIES, lowered_programs, mutated_programs, mutated_transfers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import arrays
from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, parse_action
from engine.plan.check import check, check_delivery_between_ranks, prove_no_deadlock
from engine.plan.lower import Policy, lower
from engine.plan.messages import Edge, edge_of
from engine.plan.program import Placement, Program, loop_placement
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.walk import Sharing


def program_of(*rows, ranks=None):
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    placement = Placement(ranks, len(rows)) if ranks else loop_placement(len(rows))
    num_microbatches = len({action.microbatch for action in actions[0] if action.op is Op.F})
    return Program("test", placement, num_microbatches, actions)


def text(row):
    return " ".join(map(str, row))


def refusal(refuses, program, *arguments):
    """Why a program is refused, or None; the error's place is that of its action."""
    try:
        refuses(program, *arguments)
    except ProgramError as error:
        row = program.actions[error.rank]
        at_end = error.position == len(row) and error.action == "end of program"
        assert at_end or str(row[error.position]) == error.action
        return error
    return None


# against brute force


def test_python_machine_code_and_brute_force_agree_on_what_is_legal(monkeypatch, is_thorough):
    verdicts = Counter()

    def is_right(refuses, program, *arguments):
        reasons = []
        for pays_from in (10**9, 0):
            monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
            error = refusal(refuses, replace(program, actions=program.actions), *arguments)
            reasons.append(error and str(error))
        assert reasons[0] == reasons[1]
        verdicts[refuses, reasons[0] is None] += 1
        return reasons[0] is None

    @settings(max_examples=3000 if is_thorough else 250, derandomize=True)
    @given(
        mutated_programs(),
        mutated_transfers(),
        st.sampled_from(Sharing),
        st.sampled_from([0, 1, 3, 99]),
    )
    def agree(program, lowered, sharing, look_ahead):
        assert is_right(check, program) == is_legal(program)
        assert is_right(prove_no_deadlock, lowered, sharing) == delivers_all(lowered, sharing)
        if is_legal(program):
            assert delivers_all(lower(program, Policy.EARLY, look_ahead))

    agree()
    assert min(verdicts.values()) > 50


def test_what_is_proved_with_a_line_per_rank_edge_is_delivered_in_order_between_ranks():
    verdicts = Counter()

    @settings(max_examples=200, derandomize=True)
    @given(lowered_programs(), st.randoms())
    def is_delivered(lowered, chance):
        row = list(chance.choice(lowered.actions))
        rank = lowered.actions.index(tuple(row))
        receives = [at for at, action in enumerate(row) if action.op in RECV_OPS]
        here, there = chance.choice(receives), chance.choice(receives)
        row[here], row[there] = row[there], row[here]
        rows = [tuple(row) if r == rank else old for r, old in enumerate(lowered.actions)]
        changed = replace(lowered, actions=tuple(rows))
        is_refused = refusal(check_delivery_between_ranks, changed) is not None
        assert not is_refused or refusal(prove_no_deadlock, changed, Sharing.RANK_EDGE)
        verdicts[is_refused] += 1

    is_delivered()
    assert min(verdicts.values()) > 10


# what is said


@pytest.mark.parametrize(
    ("rows", "rank", "position", "reason"),
    [
        (("0F0 0B0", "1F0"), 1, 1, "1B0 is never done"),
        (("0F0 0F0 0B0", "1F0 1B0"), 0, 1, "0F0 has been done before"),
        (("0F0 1B0", "1F0 0B0"), 0, 1, "stage 1 is placed on rank 1"),
        (("0F0 0B0", "1F0 1B0 1B7"), 1, 2, "there are 1 microbatches"),
        (("0F0 0B0 5F0", "1F0 1B0"), 0, 2, "there are 2 stages"),
        (("0F0 0B0", "1F0 1W0"), 1, 2, "1I0 is never done"),
        (("0F0 0B0 0W0", "1F0 1B0"), 0, 2, "0W0 has been done before"),
        (
            ("0F0 0W0 0I0", "1F0 1B0"),
            *(0, 1, "can never start: 0W0 on rank 0 needs 0I0, which comes only later"),
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            *(0, 1),
            (
                "can never start: 0B0 on rank 0 needs 1B0, which stands behind 1F1 on rank 1; "
                "1F1 on rank 1 needs 0F1, which stands behind 0B0 on rank 0"
            ),
        ),
    ],
)
def test_a_violation_names_rank_position_action_and_reason(rows, rank, position, reason):
    error, row = refusal(check, program_of(*rows)), rows[rank].split()
    action = row[position] if position < len(row) else "end of program"
    assert (error.rank, error.position, error.action, error.reason) == (
        *(rank, position, action),
        reason,
    )
    headline, *grid = str(error).splitlines()
    assert headline == f"test: rank {rank}, position {position}, {action}: {reason}"
    assert len(grid) == len(rows)
    assert f"[{action}]" in grid[rank] or action == "end of program"


def test_the_place_is_marked_in_a_part_of_a_long_grid():
    program = build_program("1f1b", 2, 40)
    rows = [list(row) for row in program.actions]
    rows[1][50], rows[1][51] = rows[1][51], rows[1][50]
    error = refusal(check, replace(program, actions=tuple(map(tuple, rows))))
    assert "[1B25]" in str(error)
    assert "0F1 " not in str(error)
    assert max(map(len, str(error).splitlines()[1:])) < 160


@pytest.mark.parametrize(("name", "v"), FAMILIES)
@pytest.mark.parametrize("p", [1, 4])
def test_the_memory_rule_refuses_one_less_than_the_peak(name, v, p):
    p = max(p, 2 if SCHEDULES[name].is_two_way else 1)
    program = build_program(name, p, 2 * p, v)
    peaks = peak_activations(program)
    most = max(peaks)
    check(program, max_held=most)
    error = refusal(check, program, most - 1)
    assert error.rank == peaks.index(most)
    assert parse_action(error.action).op is Op.F
    assert error.reason == (
        f"holds the activations of {most} microbatches; at most {most - 1} are allowed"
    )


FIRST = "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
LAST = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize(
    ("rows", "rank", "action", "reason"),
    [
        (
            (FIRST, LAST.replace("1RECV_F1 ", "")),
            *(1, "1F1", "1RECV_F1 is not posted before it"),
        ),
        (
            ("0SEND_F0 " + FIRST.replace("0SEND_F0 ", ""), LAST),
            *(0, "0SEND_F0", "comes before the action whose result it sends"),
        ),
        (
            (FIRST.replace("0RECV_B0", "0SEND_F0 0RECV_B0"), LAST),
            *(0, "0SEND_F0", "has been done before"),
        ),
        (
            (FIRST, LAST + " 1RECV_B0"),
            *(1, "1RECV_B0", "nothing on this rank needs it from another rank"),
        ),
        ((FIRST, LAST + " 0RECV_B0"), 1, "0RECV_B0", "stage 0 is placed on rank 0"),
        (
            (FIRST, LAST + " 1RECV_F9"),
            *(1, "1RECV_F9", "waits for 0SEND_F9 on rank 0, which is not there"),
        ),
        ((FIRST.replace("0SEND_F1 ", ""), LAST), 0, "end of program", "0SEND_F1 is missing"),
    ],
)
def test_a_transfer_that_stands_wrong_is_told_with_its_place(rows, rank, action, reason):
    for refuses in (prove_no_deadlock, lower):
        error = refusal(refuses, program_of(*rows))
        assert (error.rank, error.action) == (rank, action)
        assert reason in error.reason
        assert str(error).splitlines()[1].startswith("rank 0: ")


def test_a_hang_is_reported_as_the_circle_of_waits():
    lowered = lower(build_program("1f1b", 2, 2), Policy.JUST_IN_TIME)
    error = refusal(prove_no_deadlock, lowered, Sharing.RANK)
    assert error.reason == (
        "hangs: "
        "0RECV_B0 on rank 0 is queued behind 0SEND_F1; "
        "0SEND_F1 on rank 0 waits for 1RECV_F1 on rank 1; "
        "1RECV_F1 on rank 1 is queued behind 1SEND_B0; "
        "1SEND_B0 on rank 1 waits for 0RECV_B0 on rank 0"
    )
    assert [" ".join(line.split()) for line in str(error).splitlines()[1:]] == [
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 [0RECV_B0] 0B0 0RECV_B1 0B1",
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_circle_may_lead_over_what_is_not_posted_yet():
    rows = "0F0 0SEND_F0 0RECV_B1 0B1 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1"
    reason = refusal(prove_no_deadlock, program_of(*rows)).reason
    assert reason.startswith("hangs: ")
    assert set(reason.removeprefix("hangs: ").split("; ")) == {
        "0B1 on rank 0 waits for 0RECV_B1",
        "0RECV_B1 on rank 0 waits for 1SEND_B1 behind 1F1 on rank 1",
        "1F1 on rank 1 waits for 1RECV_F1",
        "1RECV_F1 on rank 1 waits for 0SEND_F1 behind 0B1 on rank 0",
    }


# lowering


def test_a_send_follows_its_producer_and_a_receive_stands_as_far_ahead_as_asked():
    program = build_program("1f1b", 2, 2)
    assert list(map(text, lower(program).actions)) == [FIRST, LAST]
    just_in_time = lower(program, Policy.JUST_IN_TIME)
    assert text(just_in_time.actions[1]) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert lower(just_in_time, Policy.EARLY) == just_in_time  # it has its own
    split = lower(build_program("zb_h1", 2, 1))
    assert text(split.actions[1]) == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"
    early = lower(build_program("interleaved_1f1b", 2, 4, 2), Policy.EARLY, 3)
    assert text(early.actions[1][:4]) == "1RECV_F0 1RECV_F1 3RECV_F0 1F0"
    with pytest.raises(ValueError, match="look_ahead is -1; expected at least 0"):
        lower(program, Policy.EARLY, -1)


@pytest.mark.parametrize("look_ahead", [0, 1, 3, 10_000])
@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_every_message_has_two_ends_a_receive_is_early_and_compute_keeps_its_order(
    name, v, look_ahead
):
    p = 4 if SCHEDULES[name].is_two_way else 3
    program = build_program(name, p, 2 * p, v)
    lowered = lower(program, Policy.EARLY, look_ahead)
    assert (lowered == lower(program, Policy.JUST_IN_TIME, 7)) == (look_ahead == 0)
    assert lowered.compute_only().actions == program.actions
    assert not any(count > 1 for row in lowered.actions for count in Counter(row).values())
    sent, received = (
        sorted((edge_of(a), a.microbatch) for r in lowered.actions for a in r if a.op in ops)
        for ops in (SEND_OPS, RECV_OPS)
    )
    assert sent == received
    num_crossings = sum(a != b for a, b in itertools.pairwise(program.placement.ranks))
    assert len(sent) == 2 * num_crossings * 2 * p / program.placement.directions
    for row in lowered.actions:
        compute = [action for action in row if action.op in COMPUTE_OPS]
        num_done, due = 0, {}
        for action in row:
            num_done += action.op in COMPUTE_OPS
            if action.op in RECV_OPS:
                ops = "F" if action.op is Op.RECV_F else "BI"
                (consumer,) = (
                    at
                    for at, (stage, op, m) in enumerate(compute)
                    if (stage, m) == (action.stage, action.microbatch) and op in ops
                )
                due[edge_of(action)] = max(consumer, due.get(edge_of(action), 0))
                assert num_done <= max(0, due[edge_of(action)] - look_ahead)


def test_both_ends_of_a_message_name_one_channel():
    assert edge_of(Action(1, Op.SEND_F, 0)) == edge_of(Action(2, Op.RECV_F, 0)) == Edge(1, 2)
    assert edge_of(Action(2, Op.SEND_B, 0)) == edge_of(Action(1, Op.RECV_B, 0))
    with pytest.raises(ValueError, match="0F0 is not a transfer"):
        edge_of(Action(0, Op.F, 0))
