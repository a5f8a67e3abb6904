"""Peaks of rows written by hand, to the byte; and what the walk keeps to on every schedule."""

import pytest
from drawn_programs import FAMILIES, programs_of

from engine.plan.action import NO_INDEX, Op
from engine.plan.lower import lower
from engine.plan.memory import MeasuredBytes, MemoryRow, Messages
from engine.plan.program import Program, actions_from_csv, loop_placement, v_placement
from engine.plan.sharded_bytes import ActionBytes
from engine.plan.spans import Lane, Span
from engine.run.memory import Block, Level, costs_of

OPT = (NO_INDEX, Op.OPT)
STATIC = 1000


def predict_peak(lowered, rank, static_bytes, measured, messages):
    row = MemoryRow(lowered, rank, is_posted=messages.is_posted, is_queued=messages.is_queued)
    stages = row.of_measured(measured, messages)
    return row.peak(static_bytes, stages, measured.first.get(OPT, ActionBytes(0, 0)))


def there_before_computing(lowered, rank, messages):
    row = MemoryRow(lowered, rank, is_posted=messages.is_posted)
    return row.before_computing(row.of_measured(MeasuredBytes({}, {}), messages))


def program(text, placement):
    return Program("hand", placement, 2, actions_from_csv(text))


ONE_STAGE = MeasuredBytes(
    first={(0, Op.F): ActionBytes(12, 10), (0, Op.B): ActionBytes(6, -7), OPT: ActionBytes(4, 0)},
    later={(0, Op.B): ActionBytes(5, -10)},  # the first one made gradients of 3
)


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("0F0,0F1,0B0,0B1", 26),  # both held, and the rise of the B that makes gradients
        ("0F0,0B0,0F1,0B1", 18),  # gradients, one held, the rise of a later B
    ],
)
def test_one_stage_peaks_where_the_row_says(row, peak):
    one = program(row, loop_placement(1))
    assert predict_peak(one, 0, STATIC, ONE_STAGE, Messages((), ())) == STATIC + peak


TWO_RANKS = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""
# F leaves 10 and an output of 2; B lets go of its microbatch, and on rank 1 of the input, 2, and
# leaves an input gradient of 2. The first B makes gradients of 3.
RANK_0 = MeasuredBytes(
    {(0, Op.F): ActionBytes(12, 12, 2), (0, Op.B): ActionBytes(4, -7)},
    {(0, Op.B): ActionBytes(1, -10)},
)
RANK_1 = MeasuredBytes(
    {(1, Op.F): ActionBytes(15, 10), (1, Op.B): ActionBytes(5, -7, 2)},
    {(1, Op.B): ActionBytes(1, -10, 2)},
)


@pytest.mark.parametrize(
    ("rank", "costs", "transport", "peak"),
    [
        # Two held, the last output still queued, the gradient received, the rise of B
        (0, RANK_0, {}, 10 + 10 + 2 + 2 + 4),
        # The same without the output
        (0, RANK_0, {"is_queued": False}, 10 + 10 + 2 + 4),
        # Gradients, the last input gradient still queued, the input, the rise of F
        (1, RANK_1, {}, 3 + 2 + 2 + 15),
        (1, RANK_1, {"is_queued": False}, 3 + 2 + 15),
    ],
)
def test_messages_count_from_their_post_until_they_are_let_go(rank, costs, transport, peak):
    two = program(TWO_RANKS, loop_placement(2))
    messages = Messages((2,), (2,), **transport)
    assert predict_peak(two, rank, STATIC, costs, messages) == STATIC + peak


def test_a_receive_that_is_posted_early_counts_earlier_only_where_it_has_a_buffer():
    early = TWO_RANKS.replace("1B0,1SEND_B0,1RECV_F1", "1RECV_F1,1B0,1SEND_B0")
    two = program(early, loop_placement(2))
    costs = MeasuredBytes(
        {(1, Op.F): ActionBytes(15, 10), (1, Op.B): ActionBytes(50, -7, 2)}, RANK_1.later
    )
    for is_posted, num_messages in ((True, 2), (False, 1)):
        peak = predict_peak(two, 1, STATIC, costs, Messages((2,), (2,), is_posted=is_posted))
        assert peak == STATIC + 2 * num_messages + 10 + 50


@pytest.mark.parametrize(
    ("input_net", "weight_net", "peak"),
    [
        # All but the gradient goes in I, the gradient after it: I1 as I0
        (-10, 0, 10 + 2 + 2 + 4),
        # W0 has yet to let go of 4 and of the gradient when I1 begins
        (-6, -6, 10 + 2 + 2 + 4 + 6),
    ],
)
def test_what_i_does_not_let_go_of_waits_for_w(input_net, weight_net, peak):
    row = "0F0,0SEND_F0,0RECV_B0,0I0,0F1,0SEND_F1,0RECV_B1,0I1,0W0,0W1\n"
    two = program(row + TWO_RANKS.splitlines()[1], loop_placement(2))
    halves = {(0, Op.I): ActionBytes(4, input_net), (0, Op.W): ActionBytes(0, weight_net)}
    costs = MeasuredBytes({(0, Op.F): ActionBytes(12, 12, 2), **halves}, halves)
    assert predict_peak(two, 0, STATIC, costs, Messages((2,), (2,))) == STATIC + peak


def test_what_is_handed_on_within_a_rank_is_no_message_but_is_let_go():
    """Stages 1 and 2 share rank 1: F of 2 takes the output of 1, B of 1 the gradient of 2."""
    rows = "0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n"
    lowered = lower(program(rows, v_placement(2)))
    costs = MeasuredBytes(
        first={
            **{(s, Op.F): ActionBytes(12, 12, 2 if s == 2 else 0) for s in (1, 2)},
            **{(s, Op.B): ActionBytes(0, -12, 2 if s == 1 else 0) for s in (1, 2)},
            OPT: ActionBytes(500, 0),
        },
        later={(s, Op.B): ActionBytes(0, -12, 2 if s == 1 else 0) for s in (1, 2)},
    )
    messages = Messages((2, 2, 2), (2, 2, 2), is_queued=False)
    assert predict_peak(lowered, 1, STATIC, costs, messages) == STATIC + 500


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_after_the_last_action_only_gradients_are_left(name, v):
    """The optimizer's peak is the highest, so it shows how much was left when it began."""
    for one in (one for p in (1, 2, 4) for one in programs_of(name, p, v)):
        lowered, num_messages = lower(one), one.num_stages - 1
        messages = Messages((2,) * num_messages, (2,) * num_messages, is_queued=False)
        for rank in range(one.world_size):
            later = costs_without_gradients(one.placement, rank)
            first = {
                key: cost._replace(net_bytes=cost.net_bytes + gradient_bytes(key[1]))
                for key, cost in later.items()
            }
            costs = MeasuredBytes({**first, OPT: ActionBytes(10**6, 0)}, later)
            gradients = 100 * len(one.placement.stages_of(rank))  # whichever of B and W is first
            peak = predict_peak(lowered, rank, STATIC, costs, messages)
            assert peak == STATIC + gradients + 10**6


def gradient_bytes(op):
    return 100 if op in (Op.B, Op.W) else 0


def costs_without_gradients(placement, rank):
    """F: activations of 7 and the output. B lets go of all but the gradient given, as I and W do,
    where W keeps the gradient and 3 of the activations.
    """
    costs, ranks = {}, placement.ranks
    for s in placement.stages_of(rank):
        before, after = ranks[s - 1 : s] if s else (), ranks[s + 1 : s + 2]
        taken, given = 2 * len(before), 2 * len(after)
        handed_f = given if after != (rank,) else 0
        handed_b = taken if before != (rank,) else 0
        costs[s, Op.F] = ActionBytes(9, 7 + given, handed_f)
        costs[s, Op.B] = ActionBytes(9, -7 - taken + taken, handed_b)
        costs[s, Op.I] = ActionBytes(9, -4 - taken + taken, handed_b)
        costs[s, Op.W] = ActionBytes(0, -3 - given)
    return costs


def span(op, microbatch, start_ns, end_ns, stage=0):
    return Span(0, 0, Lane.COMPUTE, stage, op, microbatch, start_ns, end_ns, 0)


def test_costs_are_cut_out_between_the_marks_of_the_first_and_second_of_a_kind():
    timeline = [
        Level(0, 100),
        *(Level(11, 130), Level(12, 110)),  # F0: up by 30, leaves 10
        *(Level(21, 150), Level(22, 120)),  # F1, not looked at
        *(Level(31, 128), Level(32, 113)),  # B0: up by 8, leaves 3 of gradients
        *(Level(41, 115), Level(42, 103)),  # B1
        Level(43, 101),  # between spans
        Level(51, 106),
        Level(52, 101),
    ]
    spans = [
        span(Op.F, 0, 10, 13),
        span(Op.F, 1, 20, 23),
        span(Op.B, 0, 30, 33),
        span(Op.B, 1, 40, 42),
        span(Op.OPT, NO_INDEX, 50, 53, NO_INDEX),
    ]
    blocks = [Block(11, 25, 4), Block(12, 31, 6), Block(12, None, 1), Block(41, 43, 2)]
    start_bytes, costs = costs_of(timeline, blocks, spans)
    assert start_bytes == 100
    assert costs.first == {
        (0, Op.F): ActionBytes(30, 10, 4),
        (0, Op.B): ActionBytes(8, -7, 0),
        OPT: ActionBytes(5, 0, 0),
    }
    assert costs.later == {(0, Op.F): ActionBytes(30, 10, 4), (0, Op.B): ActionBytes(2, -10, 2)}


def test_receives_posted_before_the_first_action_are_not_taken_for_static():
    two = lower(program("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", loop_placement(2)), look_ahead=2)
    posted = [str(action) for action in two.actions[1][:2]]
    assert posted == ["1RECV_F0", "1RECV_F1"]
    assert there_before_computing(two, 1, Messages((2,), (2,))) == 4
    assert there_before_computing(two, 1, Messages((2,), (2,), is_posted=False)) == 2
    assert there_before_computing(lower(two.compute_only()), 0, Messages((2,), (2,))) == 0
