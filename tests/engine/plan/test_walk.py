"""When each action happens: against a plain walk over ranks, channels and lanes, and by hand."""

import itertools
import random
from array import array
from fractions import Fraction

import pytest
from brute_force import PlainWalk
from drawn_programs import (
    FAMILIES,
    POLICIES,
    shuffled_program,
    simulations,
    small_program,
    stages_per_rank,
    with_rows,
)
from hypothesis import given, settings

from engine import arrays
from engine.plan.action import COMPUTE_OPS, JOINING_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    add_collectives,
    leaves_whole_sums,
    ring_ns,
    with_sums_of_copies,
)
from engine.plan.lower import Policy, lower
from engine.plan.period import Step, period_ns, period_of, spans_in_a_row, with_end
from engine.plan.predict import (
    Durations,
    InFlight,
    predict,
    predict_replicas,
    timed,
    uniform,
)
from engine.plan.program import Program, loop_placement, steps_can_overlap
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.spans import Lane, Span
from engine.plan.walk import FREE_TRANSFERS, TransferModel, walk

# against the plain walk


def drawn_program(chance, name):
    """A program of a schedule, or one of chance, with transfers and collectives or without."""
    while True:
        p, m, v = chance.randint(1, 4), chance.randint(1, 8), chance.choice(stages_per_rank(name))
        try:
            program = build_program(name, p, m, v)
            break
        except ShapeError:
            continue
    if chance.random() < 0.2:
        program = shuffled_program(chance.random(), chance.randint(2, 4))
    if chance.random() < 0.7:
        program = lower(program, chance.choice(list(Policy)), chance.randint(0, 2))
    program = add_collectives(program, chance.choice(POLICIES))
    return with_early_and_late(program, chance) if chance.random() < 0.5 else program


def with_early_and_late(program, chance):
    """The program with some REDUCE_GRADs issued later and some UNSHARDs earlier."""
    rows = [list(row) for row in program.actions]
    for row in rows:
        for at in range(len(row)):
            if row[at].op is Op.REDUCE_GRAD and chance.random() < 0.5:
                later = next((n for n in range(at + 1, len(row)) if row[n].op in JOINING_OPS), None)
                row.insert(chance.randint(at, (later or len(row)) - 1), row.pop(at))
            elif row[at].op is Op.UNSHARD and chance.random() < 0.5:
                least = max((n for n in range(at) if row[n].op not in COMPUTE_OPS), default=-1)
                row.insert(chance.randint(least + 1, at), row.pop(at))
    return with_rows(program, rows)


def drawn_times(chance, program, replicas, steps):
    """The nanoseconds of each action of each step, by replica; a norm takes none."""
    actions = [action for row in program.actions for action in row] * steps
    return [
        array("q", [chance.randint(0, 40) * (a.op is not Op.NORM) for a in actions])
        for _ in range(replicas)
    ]


def assert_as_plain(walked, plain):
    """Each start, moving and end is the plain walk's; what it does not tell is not compared."""
    offset, found = walked.program.table.offset, {}
    columns = (walked.starts_ns, walked.moves_ns, walked.ends_ns)
    for (d, step, rank, at), expected in plain.times.items():
        index = offset[rank] + at
        ours = [walked.of_step(times, d, step)[index] for times in columns]
        found[d, step, rank, at] = tuple(
            ns if known is not None else None for ns, known in zip(ours, expected, strict=True)
        )
    assert found == plain.times


@pytest.mark.parametrize("name", SCHEDULES)
def test_replicas_in_steps_in_a_row_do_each_thing_when_a_plain_walk_does(
    name, is_thorough, monkeypatch
):
    chance = random.Random(name)
    for number in range(200 if is_thorough else 16):
        program, replicas = drawn_program(chance, name), chance.randint(1, 4)
        if replicas == 1 and program.placement.directions > 1:
            program = with_sums_of_copies(program.without_collectives())
        has_end, meets = chance.random() < 0.7, chance.random() < 0.3
        if has_end:
            program = with_end(program, meets=meets)
        steps = chance.randint(1, 4) if has_end else 1
        took = drawn_times(chance, program, replicas, steps)
        transfers = TransferModel(
            chance.choice([0, chance.randint(1, 30)]),
            overlaps=program.has_collectives or chance.random() < 0.7,
        )
        monkeypatch.setattr(arrays, "PAYS_FROM", 0 if number % 2 else 10**9)
        plain = PlainWalk(program, took, transfers, steps)
        walked = walk(program, took, transfers)
        assert_as_plain(walked, plain)
        if has_end:
            ends = iter(walked.step_ends_ns)
            for d, rank, step in itertools.product(
                range(len(took)), range(program.world_size), range(steps)
            ):
                last = d, step, rank, len(program.actions[rank]) - 1
                assert plain.times[last][2] == next(ends)
        elif program.has_transfers:
            assert_makespan_and_idle(timed(program, took, transfers), plain, took)


def assert_makespan_and_idle(step, plain, took):
    """A step lasts from the first computation, or what is gathered before, to the last end."""
    actions = [[action.op for action in row] for row in step.program.actions]
    kinds = [(actions[rank][at], times) for (_, _, rank, at), times in plain.times.items()]
    begun = [start for op, (start, _, _) in kinds if op in COMPUTE_OPS]
    begun += [ready for op, (_, ready, _) in kinds if op is Op.UNSHARD]
    ends = [end for op, (_, _, end) in kinds if op not in SEND_OPS]
    assert step.makespan_ns == max(ends) - min(begun)
    for idle, of_replica in zip(step.idle_ns, took, strict=True):
        left = iter(of_replica)
        busy = [sum(ns * (op in COMPUTE_OPS) for op, ns in zip(row, left)) for row in actions]  # noqa: B905
        assert idle == [step.makespan_ns - ns for ns in busy]


STEPS, LONGEST = 50, 24


def ends_of_steps(program, durations, transfers, optimizer_ns, *, meets):
    """By step and rank, when a training that repeats one step has done it."""
    ended, by_op = with_end(program, meets=meets), durations.by_op()
    took = [
        {Op.NORM: 0, Op.OPT: optimizer_ns}[a.op] if a.op not in by_op else by_op[a.op][a.stage]
        for row in ended.actions
        for a in row
    ]
    times = PlainWalk(ended, [took * STEPS], transfers, STEPS).times
    last = [len(row) - 1 for row in ended.actions]
    return [[times[0, step, r, at][2] for r, at in enumerate(last)] for step in range(STEPS)]


@pytest.mark.parametrize("meets", [False, True])
def test_a_training_goes_on_as_steps_one_after_the_other_do(meets, is_thorough):
    drawn = random.Random(meets)
    for seed in range(500 if is_thorough else 15):
        program = shuffled_program(seed)
        stages = range(program.num_stages)
        durations = Durations(*(tuple(drawn.randint(0, 40) for _ in stages) for _ in "fiw"))
        latency_ns, optimizer_ns = drawn.choice([0, drawn.randint(1, 30)]), drawn.randint(0, 9)
        transfers = TransferModel(latency_ns, overlaps=seed % 4 > 0)
        found = period_ns(program, durations, transfers, optimizer_ns, meets=meets)
        if not (optimizer_ns or meets):
            assert period_of(predict(program, durations, transfers)) == found
        *_, last = ends = ends_of_steps(program, durations, transfers, optimizer_ns, meets=meets)
        assert any(
            all(a - b == steps * found for a, b in zip(last, ends[-1 - steps], strict=True))
            for steps in range(1, LONGEST)
        ), (seed, found)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "zbv"])
def test_three_steps_in_a_row_are_the_second_to_the_fourth_of_a_training(schedule, meets):
    program = build_program(schedule, 4, 6)
    durations, transfers = uniform(program.placement, 10, 12, 8), TransferModel(latency_ns=2)
    step = Step(program, predict(program, durations, transfers).took_ns, 7, meets)
    spans = [span for span in spans_in_a_row(step, transfers) if span.lane == "compute"]
    assert min(span.start_ns for span in spans if span.step == 0) == 0
    expected = ends_of_steps(program, durations, transfers, 7, meets=meets)[1:4]
    ends = [
        [max(s.end_ns for s in spans if (s.step, s.rank) == (n, rank)) for rank in range(4)]
        for n in (-1, 0, 1)
    ]
    shift = expected[0][0] - ends[0][0]
    assert [[end + shift for end in of_ranks] for of_ranks in ends] == expected


@settings(max_examples=150, derandomize=True)
@given(simulations())
def test_the_critical_path_leaves_no_slack_and_is_as_long_as_the_step(simulation):
    step = predict(*simulation)
    times = {send: (start, end) for send, start, end in step.messages()}
    for row, starts, ends in zip(step.program.actions, step.start_ns, step.end_ns, strict=True):
        times |= {a: (start, end) for a, start, end in zip(row, starts, ends, strict=True)}
    path = [times[action] for action in step.critical_path()]
    assert (path[0][0], path[-1][1]) == (0, step.makespan_ns)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(path))


# by hand


def simulated(name, p, m, costs, transfers=FREE_TRANSFERS, v=None):
    program = build_program(name, p, m, v)
    return predict(program, uniform(program.placement, *costs), transfers)


def test_a_transfer_delays_its_consumer_and_has_a_span_on_both_ranks():
    link = TransferModel(latency_ns=5, bytes_per_s=1e9, message_bytes=20)
    spans = simulated("afab", 2, 1, (100, 40, 60), link).spans()
    assert sorted(spans, key=lambda s: s.start_ns) == [
        Span(0, 0, Lane.COMPUTE, 0, Op.F, 0, 0, 100, 0),
        Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 100, 125, 20),
        Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 100, 125, 20),
        Span(0, 1, Lane.COMPUTE, 1, Op.F, 0, 125, 225, 0),
        Span(0, 1, Lane.COMPUTE, 1, Op.B, 0, 225, 325, 0),
        Span(0, 1, Lane.SEND, 1, Op.SEND_B, 0, 325, 350, 20),
        Span(0, 0, Lane.RECV, 0, Op.RECV_B, 0, 325, 350, 20),
        Span(0, 0, Lane.COMPUTE, 0, Op.B, 0, 350, 450, 0),
    ]


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_a_step_has_spans_of_all_its_actions_and_holds_what_the_order_says(name, v):
    model = TransferModel(latency_ns=3, bytes_per_s=1e9, message_bytes=4)
    step = simulated(name, 4, 8, (12, 18, 6), model, v)
    spans, lowered = list(step.spans()), lower(step.program)
    ours = sorted((span.rank, span.stage, span.op, span.microbatch) for span in spans)
    assert ours == sorted((rank, *a) for rank, row in enumerate(lowered.actions) for a in row)
    messages = [span for span in spans if span.lane is not Lane.COMPUTE]
    assert {(s.num_bytes, s.end_ns - s.start_ns) for s in messages} == {(4, 7)}
    assert predict(lowered, uniform(lowered.placement, 12, 18, 6), model) == step
    for rank, peak in enumerate(peak_activations(step.program)):
        in_flight = step.in_flight(rank)
        assert max(one.num for one in in_flight) == peak
        assert in_flight[-1].num == 0
        assert [one.time_ns for one in in_flight] == sorted(one.time_ns for one in in_flight)


def test_an_activation_is_in_flight_from_its_forwards_start_to_its_weights_end():
    assert simulated("zb_h1", 1, 1, (4, 3, 2)).in_flight(0) == [InFlight(0, 1), InFlight(9, 0)]
    assert simulated("afab", 2, 1, (4, 3, 2)).in_flight(0) == [InFlight(0, 1), InFlight(18, 0)]


def test_durations_are_a_ranks_share_and_a_whole_backward_may_have_its_own():
    placement = loop_placement(4, 3)
    assert uniform(placement, 30, 15, 9) == Durations((10,) * 12, (5,) * 12, (3,) * 12)
    assert uniform(placement, 31, 16, 8) == Durations((10,) * 12, (5,) * 12, (3,) * 12)
    program = build_program("1f1b", 2, 1)
    own = Durations((10, 10), (5, 6), (4, 3), (7, 8))
    assert predict(program, own).makespan_ns == 10 + 10 + 8 + 7
    assert predict(program, Durations((10, 10), (5, 6), (4, 3))).makespan_ns == 10 + 10 + 9 + 9


def test_a_transfer_that_takes_time_is_on_the_critical_path():
    ones, program = Durations((1, 1), (1, 1), (1, 1)), build_program("afab", 2, 1)
    for latency_ns, words in (
        (0, "0F0 1F0 1B0 0B0"),
        (1, "0F0 0SEND_F0 1F0 1B0 1SEND_B0 0B0"),
    ):
        path = predict(program, ones, TransferModel(latency_ns)).critical_path()
        assert " ".join(map(str, path)) == words
    empty = Program("test", loop_placement(1), 0, ((),))
    assert predict(empty, Durations((1,), (1,), (1,))).critical_path() == []


@pytest.mark.parametrize(("name", "v"), FAMILIES)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_steps_overlap_where_some_costs_let_another_rank_end_after_that_of_stage_0(name, v, p):
    try:
        program = build_program(name, p, 2 * p, v)
    except ShapeError:
        return
    first, others = program.placement.ranks[0], set(range(p)) - {program.placement.ranks[0]}
    is_later = False
    for op, stage in itertools.product(range(3), range(program.num_stages)):
        costs = [[1] * program.num_stages for _ in range(3)]
        costs[op][stage] = 1000  # one kind of action takes long
        ends = [max(row) for row in predict(program, Durations(*map(tuple, costs))).end_ns]
        is_later |= any(ends[rank] > ends[first] for rank in others)
    assert steps_can_overlap(program) == is_later


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "v"), [("afab", 1), ("1f1b", 1), ("zb_h2", 1), ("zbv", 2)])
def test_a_step_of_a_training_takes_its_makespan_or_where_no_rank_waits_its_work(name, v, p):
    """The zero-bubble schedules have no bubble in a training, unless ranks meet in each step."""
    program = build_program(name, p, 4 * p, v)
    durations = uniform(program.placement, 2, 2, 2)
    makespan_ns = predict(program, durations).makespan_ns
    assert period_ns(program, durations, optimizer_ns=5, meets=True) == makespan_ns + 5
    is_filled = name in ("zb_h2", "zbv")
    expected = (6 * 4 * p if is_filled else makespan_ns) + 5
    assert period_ns(program, durations, optimizer_ns=5) == expected


def test_a_period_is_a_fraction_and_a_program_that_hangs_has_none():
    program = build_program("1f1b", 1, 1)
    assert period_ns(program, Durations((1,), (1,), (1,)), optimizer_ns=1) == Fraction(4)
    rows = ((Action(0, Op.B, 0), Action(0, Op.F, 0)), (Action(1, Op.F, 0), Action(1, Op.B, 0)))
    backwards = Program("mine", loop_placement(2), 1, rows)
    for meets in (False, True):
        with pytest.raises(ProgramError, match="can never start: "):
            period_ns(backwards, uniform(backwards.placement, 1, 1, 1), meets=meets)


def test_a_message_moves_when_both_ends_are_ready_and_the_one_before_is_over():
    lowered = lower(build_program("afab", 2, 2))
    ns = {Action(0, Op.SEND_F, 0): 25, Action(0, Op.SEND_F, 1): 1, Action(1, Op.SEND_B, 0): 0}
    ns[Action(1, Op.SEND_B, 1)] = 0
    took = [ns.get(action, 10) for row in lowered.actions for action in row]
    step = timed(lowered, [took], TransferModel(message_bytes=3))
    spans = list(step.spans())
    assert Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 10, 35, 3) in spans
    assert Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 10, 35, 3) in spans
    assert Span(0, 0, Lane.SEND, 0, Op.SEND_F, 1, 35, 36, 3) in spans
    assert Span(0, 1, Lane.COMPUTE, 1, Op.F, 1, 45, 55, 0) in spans
    assert len(spans) == 8 + 2 * 4
    assert (step.makespan_ns, step.idle_ns) == (85, [[85 - 40, 85 - 40]])


# replicas by hand


def collectives(gather_ns, reduce_ns):
    return {Op.UNSHARD: gather_ns, Op.REDUCE_GRAD: reduce_ns}


def test_a_ring_sends_all_but_a_replicas_own_part_and_twice_for_a_sum_that_all_get():
    assert ring_ns(1000, 4, 1e9, 7, is_summed_whole=False) == 757
    assert ring_ns(4000, 4, 1e9, 7, is_summed_whole=True) == 6007
    assert ring_ns(1000, 1, 1e9, is_summed_whole=True) == 0
    assert all(map(leaves_whole_sums, (NoCollectives(), DataParallel(), Zero1())))
    assert not any(map(leaves_whole_sums, (Zero2(), Zero3(), TorchWindow())))


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_replicas_with_free_collectives_are_one_simulation(name):
    program = small_program(name)
    durations = uniform(program.placement, 24, 36, 12)
    free = collectives((0,) * program.num_stages, (0,) * program.num_stages)
    alone = predict(program, durations)
    for policy in (NoCollectives(), DataParallel(), Zero3()):
        joined = predict_replicas(program, [durations] * 3, policy, free)
        assert joined.makespan_ns == alone.makespan_ns
        assert joined.compute_ns == alone.compute_ns * 3
        assert joined.bubble_fraction == alone.bubble_fraction
        assert joined.bubble_idle_over_ideal == alone.bubble_idle_over_ideal
        computed = {span for span in joined.spans() if span.lane is Lane.COMPUTE}
        spans = [span for span in alone.spans() if span.lane is Lane.COMPUTE]
        assert computed == {span._replace(replica=d) for span in spans for d in range(3)}


def test_one_slow_replica_keeps_the_others_waiting_at_the_sum():
    program = build_program("1f1b", 1, 2)
    quick, slow = Durations((10,), (10,), (10,)), Durations((12,), (12,), (12,))
    joined = predict_replicas(program, [quick, slow], DataParallel(), collectives((0,), (20,)))
    assert joined.makespan_ns == 72 + 20
    sums = [span for span in joined.spans() if span.lane is Lane.COLLECTIVE]
    assert sums == [
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 60, 92, 0, 0),
        Span(0, 0, Lane.COLLECTIVE, 0, Op.REDUCE_GRAD, NO_INDEX, 72, 92, 0, 1),
    ]


def test_gathers_are_hidden_by_look_ahead_and_else_exposed():
    program = build_program("interleaved_1f1b", 1, 1, 2)
    durations, model = Durations((10,) * 2, (10,) * 2, (10,) * 2), collectives((8, 8), (0, 0))
    for policy, num_exposed in ((Zero3(1, 0), 3), (Zero3(2, 0), 2), (Zero3(2, 1), 1)):
        joined = predict_replicas(program, [durations] * 2, policy, model)
        assert joined.makespan_ns == 60 + 8 * num_exposed, policy


# refusals


@pytest.mark.parametrize("pays_from", [0, 10**9])
def test_what_does_not_fit_a_program_is_refused_before_it_is_walked(pays_from, monkeypatch):
    monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
    program = with_rows(build_program("1f1b", 3, 7), build_program("1f1b", 3, 7).actions)
    ones = uniform(program.placement, 1, 1, 1)
    for durations, words in (
        (Durations((1,) * 4, (1,) * 4, (1,) * 4), "of 4, 4, 4 stages .* program of 3"),
        (Durations((1,) * 3, (1,) * 2, (1,) * 3), "of 3, 2, 3 stages .* program of 3"),
        (
            Durations((1,) * 3, (1,) * 3, (1,) * 3, (1,)),
            r"3, 3, 3, 1 stages \(forward, input, weight, backward\)",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            predict(program, durations)
    lowered = lower(program)
    fits = array("q", [1]) * lowered.table.num_actions
    for times in ([], [fits, array("q")], [fits[1:]]):
        with pytest.raises(ValueError, match=f"the times of {len(fits)} actions"):
            timed(lowered, times)
    none = NoCollectives()
    for durations, gathers, transfers, words in (
        ([ones], (0,) * 3, TransferModel(overlaps=False), "block their sender"),
        ([ones], (1,), FREE_TRANSFERS, r"UNSHARD, REDUCE_GRAD.* of 3"),
    ):
        with pytest.raises(ValueError, match=words):
            predict_replicas(program, durations, none, collectives(gathers, gathers), transfers)
