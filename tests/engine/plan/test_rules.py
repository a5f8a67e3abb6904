"""Illegal programs are refused with the rank, the place and the reason."""

import pytest
from schedule_grid import stages_per_rank

from engine.plan.action import Op, parse_action
from engine.plan.check import check
from engine.plan.program import Placement, Program, loop_placement
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import SCHEDULES, build_program


def program_of(*rows, num_microbatches=1, ranks=None):
    actions = tuple(tuple(parse_action(cell) for cell in row.split()) for row in rows)
    placement = Placement(ranks, len(rows)) if ranks else loop_placement(len(rows))
    return Program("test", placement, num_microbatches, actions)


def error_of(program, **options):
    with pytest.raises(ProgramError) as caught:
        check(program, **options)
    return caught.value


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
    ],
)
def test_a_violation_names_rank_position_action_and_reason(rows, rank, position, reason):
    error = error_of(program_of(*rows))
    row = rows[rank].split()
    action = row[position] if position < len(row) else "end of program"
    assert (error.rank, error.position, error.action) == (rank, position, action)
    assert error.reason == reason
    headline, *grid = str(error).splitlines()
    assert headline == f"test: rank {rank}, position {position}, {action}: {reason}"
    assert len(grid) == len(rows)
    assert f"[{action}]" in grid[rank] or action == "end of program"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            ("0F0 0W0 0I0", "1F0 1B0"),
            "can never start: 0W0 on rank 0 needs 0I0, which comes only later",
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            (
                "can never start: 0B0 on rank 0 needs 1B0, which stands behind 1F1 on rank 1; "
                "1F1 on rank 1 needs 0F1, which stands behind 0B0 on rank 0"
            ),
        ),
    ],
)
def test_what_can_never_start_is_told_as_the_circle_of_waits(rows, reason):
    num_microbatches = sum("F" in cell for cell in rows[0].split())
    assert error_of(program_of(*rows, num_microbatches=num_microbatches)).reason == reason


def test_the_place_is_marked_in_a_part_of_a_long_grid():
    program = build_program("1f1b", 2, 40)
    rows = [list(row) for row in program.actions]
    rows[1][50], rows[1][51] = rows[1][51], rows[1][50]
    error = error_of(Program("test", program.placement, 40, tuple(map(tuple, rows))))
    assert "[1B25]" in str(error)
    assert "0F1 " not in str(error)
    assert max(map(len, str(error).splitlines()[1:])) < 160


@pytest.mark.parametrize("p", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "v"), [(name, v) for name in SCHEDULES for v in stages_per_rank(name)]
)
def test_the_memory_rule_refuses_one_less_than_the_peak(name, v, p):
    program = build_program(name, p, 2 * p, v)
    peaks = peak_activations(program)
    check(program, max_held=max(peaks))
    error = error_of(program, max_held=max(peaks) - 1)
    assert error.rank == peaks.index(max(peaks))
    assert parse_action(error.action).op is Op.F
    limit = max(peaks) - 1
    assert error.reason == (
        f"holds the activations of {limit + 1} microbatches; at most {limit} are allowed"
    )
