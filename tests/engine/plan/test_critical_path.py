"""Every step of the path starts when the one before it ends; together they are the makespan."""

import itertools

from hypothesis import given, settings
from mutations import simulations

from engine.plan.predict import Durations, predict
from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import build_program
from engine.plan.walk import TransferModel


def times_of_path(simulation):
    times = {send: (start, end) for send, start, end in simulation.messages()}
    for rank, row in enumerate(simulation.program.actions):
        ends = zip(row, simulation.start_ns[rank], simulation.end_ns[rank], strict=True)
        times |= {action: (start, end) for action, start, end in ends}
    return [times[action] for action in simulation.critical_path()]


def assert_leaves_no_slack(simulation):
    times = times_of_path(simulation)
    assert times[0][0] == 0
    assert times[-1][1] == simulation.makespan_ns
    for before, after in itertools.pairwise(times):
        assert before[1] == after[0]
    assert sum(end - start for start, end in times) == simulation.makespan_ns


@settings(max_examples=200, derandomize=True)
@given(simulations())
def test_the_path_leaves_no_slack_whatever_stages_and_messages_cost(simulation):
    assert_leaves_no_slack(predict(*simulation))


def path_of(name, p, m, durations, transfers):
    path = predict(build_program(name, p, m), durations, transfers).critical_path()
    return " ".join(map(str, path))


def test_a_transfer_that_takes_time_is_on_it():
    durations = Durations((1, 1), (1, 1), (1, 1))
    assert path_of("afab", 2, 1, durations, TransferModel()) == "0F0 1F0 1B0 0B0"
    path = path_of("afab", 2, 1, durations, TransferModel(latency_ns=1))
    assert path == "0F0 0SEND_F0 1F0 1B0 1SEND_B0 0B0"


def test_an_empty_program_has_none():
    program = Program("test", loop_placement(1), 0, ((),))
    assert predict(program, Durations((1,), (1,), (1,))).critical_path() == []
