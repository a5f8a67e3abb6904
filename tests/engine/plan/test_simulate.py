"""Exact times on small programs, a plain simulation on others, and what all schedules have."""

import pytest
from brute_force import naive_times
from hypothesis import given, settings
from mutations import simulations
from schedule_grid import stages_per_rank

from engine.plan.action import Op
from engine.plan.lower import lower
from engine.plan.predict import Durations, InFlight, predict, uniform
from engine.plan.program import loop_placement, steps_can_overlap
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.spans import Lane, Span
from engine.plan.walk import FREE_TRANSFERS, TransferModel

FAMILIES = [(name, v) for name in SCHEDULES for v in stages_per_rank(name)]


def simulated(name, p, m, costs, transfers=FREE_TRANSFERS, v=None):
    program = build_program(name, p, m, v)
    return predict(program, uniform(program.placement, *costs), transfers)


def test_a_transfer_delays_its_consumer_and_has_a_span_on_both_ranks():
    link = TransferModel(latency_ns=5, bytes_per_s=1e9, message_bytes=20)
    assert sorted(
        simulated("afab", 2, 1, (100, 40, 60), link).spans(), key=lambda s: s.start_ns
    ) == [
        Span(0, 0, Lane.COMPUTE, 0, Op.F, 0, 0, 100, 0),
        Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 100, 125, 20),
        Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 100, 125, 20),
        Span(0, 1, Lane.COMPUTE, 1, Op.F, 0, 125, 225, 0),
        Span(0, 1, Lane.COMPUTE, 1, Op.B, 0, 225, 325, 0),
        Span(0, 1, Lane.SEND, 1, Op.SEND_B, 0, 325, 350, 20),
        Span(0, 0, Lane.RECV, 0, Op.RECV_B, 0, 325, 350, 20),
        Span(0, 0, Lane.COMPUTE, 0, Op.B, 0, 350, 450, 0),
    ]


def test_a_stage_of_v_takes_its_part_of_a_ranks_time():
    placement = loop_placement(4, 3)
    assert uniform(placement, 30, 15, 9) == Durations((10,) * 12, (5,) * 12, (3,) * 12)
    assert uniform(placement, 31, 16, 8) == Durations((10,) * 12, (5,) * 12, (3,) * 12)


@pytest.mark.parametrize(("name", "v"), FAMILIES)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_steps_overlap_where_some_costs_let_another_rank_end_after_that_of_stage_0(name, v, p):
    program = build_program(name, p, 2 * p, v)
    first, others = program.placement.ranks[0], set(range(p)) - {program.placement.ranks[0]}
    is_later = False
    for op in range(3):
        for stage in range(program.num_stages):  # one kind of action takes long
            costs = [[1] * program.num_stages for _ in range(3)]
            costs[op][stage] = 1000
            ends = dict.fromkeys(range(p), 0)
            for span in predict(program, Durations(*map(tuple, costs)), FREE_TRANSFERS).spans():
                ends[span.rank] = max(ends[span.rank], span.end_ns)
            is_later |= any(ends[rank] > ends[first] for rank in others)
    assert steps_can_overlap(program) == is_later


def test_transfers_in_a_program_change_nothing():
    program = build_program("zb_h1", 3, 5)
    durations, model = uniform(program.placement, 3, 2, 1), TransferModel(latency_ns=2)
    assert predict(lower(program), durations, model) == predict(program, durations, model)


@settings(max_examples=250, derandomize=True)
@given(simulations())
def test_times_are_those_of_a_plain_simulation(simulation):
    program, durations, model = simulation
    result = predict(program, durations, model)
    times = naive_times(program, durations, model)
    for rank, row in enumerate(program.actions):
        pairs = list(zip(result.start_ns[rank], result.end_ns[rank], strict=True))
        assert pairs == [times[action] for action in row]


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_spans_hold_all_compute_and_both_ends_of_every_message(name, v):
    model = TransferModel(latency_ns=3, bytes_per_s=1e9, message_bytes=4)
    simulation = simulated(name, 4, 8, (12, 18, 6), model, v)
    spans, lowered = list(simulation.spans()), lower(simulation.program)
    ours = sorted((span.rank, span.stage, span.op, span.microbatch) for span in spans)
    assert ours == sorted((rank, *a) for rank, row in enumerate(lowered.actions) for a in row)
    assert {span.num_bytes for span in spans if span.lane is not Lane.COMPUTE} == {4}
    assert {span.end_ns - span.start_ns for span in spans if span.lane is not Lane.COMPUTE} == {7}


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_what_is_in_flight_peaks_where_the_order_says(name, v):
    simulation = simulated(name, 4, 8, (12, 18, 6), TransferModel(latency_ns=5), v)
    peaks = peak_activations(simulation.program)
    for rank, peak in enumerate(peaks):
        held = simulation.in_flight(rank)
        assert max(one.num for one in held) == peak
        assert held[-1].num == 0
        assert [one.time_ns for one in held] == sorted(one.time_ns for one in held)


def test_an_activation_is_held_from_its_forwards_start_to_its_weights_end():
    assert simulated("zb_h1", 1, 1, (4, 3, 2)).in_flight(0) == [InFlight(0, 1), InFlight(9, 0)]
    assert simulated("afab", 2, 1, (4, 3, 2)).in_flight(0) == [InFlight(0, 1), InFlight(18, 0)]


def test_a_whole_backward_can_have_its_own_time():
    program = build_program("1f1b", 2, 1)
    times = Durations((10, 10), (5, 6), (4, 3), (7, 8))
    assert times.by_op()[Op.B] == times.whole_ns == (7, 8)
    assert predict(program, times).makespan_ns == 10 + 10 + 8 + 7
    assert predict(program, Durations((10, 10), (5, 6), (4, 3))).makespan_ns == 10 + 10 + 9 + 9
    with pytest.raises(ValueError, match=r"2, 2, 2, 1 stages \(forward, input, weight, backward\)"):
        predict(program, Durations((10, 10), (5, 6), (4, 3), (7,)))
