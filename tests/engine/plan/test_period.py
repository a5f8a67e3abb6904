"""Tests of steps in a row: closed forms, and many steps one after the other in the plainest way."""

import itertools
import random
from array import array
from fractions import Fraction

import pytest
from brute_force import run_step
from shuffled_programs import shuffled_program

from engine import arrays
from engine.plan.action import Action, Op
from engine.plan.period import Step, period_ns, period_of, spans_in_a_row, with_end
from engine.plan.predict import Durations, predict, uniform
from engine.plan.program import Program, loop_placement
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import build_program
from engine.plan.walk import TransferModel, walk

STEPS, LONGEST = 50, 24


def ends_of_steps(program, durations, transfers, optimizer_ns, *, meets):
    free, channels, ends = [0] * program.world_size, {}, []
    by_op = durations.by_op()
    for _ in range(STEPS):
        run_step(program, lambda action: by_op[action.op][action.stage], transfers, free, channels)
        free = [(max(free) if meets else own) + optimizer_ns for own in free]
        ends.append(list(free))
    return ends


@pytest.mark.parametrize("meets", [False, True])
def test_a_training_goes_on_as_steps_one_after_the_other_do(meets, is_thorough):
    drawn = random.Random(meets)
    for seed in range(500 if is_thorough else 40):
        program = shuffled_program(seed)
        stages = range(program.num_stages)
        durations = Durations(*(tuple(drawn.randint(0, 40) for _ in stages) for _ in "fiw"))
        latency_ns, optimizer_ns = drawn.choice([0, drawn.randint(1, 30)]), drawn.randint(0, 9)
        transfers = TransferModel(latency_ns, overlaps=seed % 4 > 0)
        found = period_ns(program, durations, transfers, optimizer_ns, meets=meets)
        if not (optimizer_ns or meets):
            assert period_of(predict(program, durations, transfers)) == found
        *_, last = ends = ends_of_steps(program, durations, transfers, optimizer_ns, meets=meets)
        repeats = [
            steps
            for steps in range(1, LONGEST)
            if all(a - b == steps * found for a, b in zip(last, ends[-1 - steps], strict=True))
        ]
        assert repeats, (seed, found)


@pytest.mark.parametrize("meets", [False, True])
def test_steps_whose_actions_take_different_times_go_on_one_after_the_other(
    meets, is_thorough, monkeypatch
):
    drawn = random.Random(7 + meets)
    for seed in range(500 if is_thorough else 60):
        program = shuffled_program(seed)
        ended = with_end(program, meets=meets)
        steps, replicas, ranks = drawn.randint(1, 5), drawn.randint(1, 3), program.world_size
        transfers = TransferModel(drawn.choice([0, drawn.randint(1, 30)]), overlaps=seed % 4 > 0)
        own = [{} for _ in range(replicas)]  # by replica, the nanoseconds of (step, rank, action)
        for took, step, rank in itertools.product(own, range(steps), range(ranks)):
            for action in ended.actions[rank]:
                took[step, rank, action] = drawn.randint(0, 40) * (action.op is not Op.NORM)
        free, channels = [[0] * ranks for _ in own], [{} for _ in own]
        ends = []
        for step in range(steps):
            for took, of_replica, moving in zip(own, free, channels, strict=True):

                def took_of(action, took=took, step=step, ranks=program.placement.ranks):
                    return took[step, ranks[action.stage], action]

                run_step(program, took_of, transfers, of_replica, moving)
            latest = max(map(max, free))
            for took, of_replica in zip(own, free, strict=True):
                for rank, row in enumerate(ended.actions):
                    came = latest if meets else of_replica[rank]
                    of_replica[rank] = came + took[step, rank, row[-1]]
            ends.append([list(of_replica) for of_replica in free])
        monkeypatch.setattr(arrays, "PAYS_FROM", 0 if seed % 2 else 10**9)
        walked = walk(ended, [array("q", took.values()) for took in own], transfers)
        found = iter(walked.step_ends_ns)
        assert [[[next(found) for _ in range(steps)] for _ in range(ranks)] for _ in own] == [
            [[at_end[d][rank] for at_end in ends] for rank in range(ranks)] for d in range(replicas)
        ]


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_where_rank_0_begins_and_ends_the_step_nothing_overlaps(name, p):
    program = build_program(name, p, 2 * p)
    durations = uniform(program.placement, 3, 2, 4)
    makespan_ns = predict(program, durations).makespan_ns
    for meets in (False, True):
        assert period_ns(program, durations, optimizer_ns=5, meets=meets) == makespan_ns + 5


@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize(("name", "v"), [("zb_h2", 1), ("zbv", 2)])
def test_where_no_rank_waits_a_step_takes_what_a_rank_computes(name, v, p):
    """The zero-bubble schedules have no bubble in a training, unless ranks meet in each step."""
    m = 4 * p
    program = build_program(name, p, m, v)
    durations = uniform(program.placement, 2, 2, 2)
    assert period_ns(program, durations, optimizer_ns=5) == 6 * m + 5
    makespan_ns = predict(program, durations).makespan_ns
    assert period_ns(program, durations, optimizer_ns=5, meets=True) == makespan_ns + 5


def test_a_period_may_be_a_fraction_and_an_empty_program_takes_none():
    program = build_program("1f1b", 1, 1)
    assert period_ns(program, Durations((1,), (1,), (1,)), optimizer_ns=1) == Fraction(4)


@pytest.mark.parametrize("meets", [False, True])
def test_a_program_that_hangs_is_told_by_its_circle_of_waits(meets):
    rows = ((Action(0, Op.B, 0), Action(0, Op.F, 0)), (Action(1, Op.F, 0), Action(1, Op.B, 0)))
    program = Program("mine", loop_placement(2), 1, rows)
    with pytest.raises(ProgramError, match="can never start: "):
        period_ns(program, uniform(program.placement, 1, 1, 1), meets=meets)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "zbv"])
def test_three_steps_in_a_row_are_the_second_to_the_fourth_of_a_training(schedule, meets):
    program = build_program(schedule, 4, 6)
    durations, optimizer_ns = uniform(program.placement, 10, 12, 8), 7
    transfers = TransferModel(latency_ns=2)
    alone = predict(program, durations, transfers)
    step = Step(program, alone.took_ns, optimizer_ns, meets)
    spans = [span for span in spans_in_a_row(step, transfers) if span.lane == "compute"]
    assert min(span.start_ns for span in spans if span.step == 0) == 0
    expected = ends_of_steps(program, durations, transfers, optimizer_ns, meets=meets)[1:4]
    ends = [
        [max(s.end_ns for s in spans if (s.step, s.rank) == (n, rank)) for rank in range(4)]
        for n in (-1, 0, 1)
    ]
    shift = expected[0][0] - ends[0][0]
    assert [[end + shift for end in of_ranks] for of_ranks in ends] == expected
