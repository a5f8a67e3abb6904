"""Illegal programs are refused with the rank, the place and the reason."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.action import Action, Op, parse_action
from engine.plan.program import Program, loop_placement
from engine.plan.rules import ProgramError, check
from engine.plan.schedules.registry import build_program


def program_of(*rows, num_microbatches=1):
    actions = tuple(tuple(parse_action(cell) for cell in row.split()) for row in rows)
    return Program("test", loop_placement(len(rows)), num_microbatches, actions)


@pytest.mark.parametrize(
    ("rows", "rank", "position", "reason"),
    [
        (("0F0 0B0", "1F0"), 1, 1, "1I0 is never done"),
        (("0F0 0F0 0B0", "1F0 1B0"), 0, 1, "0F0 has been done before"),
        (("0F0 0B0", "1B0 1F0"), 0, 1, "0B0: can never start: it needs 1I0"),
        (("0F0 1B0", "1F0 0B0"), 0, 1, "stage 1 is placed on rank 1"),
        (("0F0 0B0", "1F0 1B0 1B7"), 1, 2, "there are 1 microbatches"),
        (("0F0 0B0 5F0", "1F0 1B0"), 0, 2, "there are 2 stages"),
        (("0F0 0SEND_F0 0B0", "1F0 1B0"), 0, 1, "transfers are added by lowering"),
        (("0F0 0W0 0I0", "1F0 1B0"), 0, 1, "it needs 0I0"),
        (("0F0 0I0", "1F0 1B0"), 0, 2, "0W0 is never done"),
        (("0F0 0B0 0W0", "1F0 1B0"), 0, 2, "0W0 has been done before"),
    ],
)
def test_a_violation_names_rank_position_and_reason(rows, rank, position, reason):
    with pytest.raises(ProgramError) as caught:
        check(program_of(*rows))
    assert (caught.value.rank, caught.value.position) == (rank, position)
    assert reason in str(caught.value)
    assert "rank 0:" in str(caught.value)


def test_a_split_backward_is_legal_with_w_any_time_after_i():
    check(program_of("0F0 0F1 0I0 0I1 0W1 0W0", "1F0 1I0 1F1 1I1 1W0 1W1", num_microbatches=2))


def brute_force_is_legal(program):
    """Try to run it: repeat passes over the ranks until nothing moves."""
    wanted = set(
        itertools.product(range(program.num_stages), "FIW", range(program.num_microbatches))
    )
    done, positions = [], [0] * program.world_size
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(program.actions):
            while positions[rank] < len(row):
                stage, op, m = row[positions[rank]]
                if program.placement.ranks[stage] != rank:
                    return False
                needs = {
                    "F": [(stage - 1, "F", m)],
                    "W": [(stage, "I", m)],
                }.get(op, [(stage, "F", m), (stage + 1, "I", m)])
                if any(0 <= n[0] < program.num_stages and n not in done for n in needs):
                    break
                done += [(stage, "I", m), (stage, "W", m)] if op == "B" else [(stage, str(op), m)]
                positions[rank] += 1
                progress = True
    return sorted(done) == sorted(wanted) and positions == [len(r) for r in program.actions]


@st.composite
def mutated_programs(draw):
    program = build_program(
        draw(st.sampled_from(["afab", "1f1b"])), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    )
    rows = [list(row) for row in program.actions]
    row = rows[draw(st.integers(0, len(rows) - 1))]
    first, second = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
    match draw(st.sampled_from(["swap", "drop", "double", "move", "split", "none"])):
        case "swap":
            row[first], row[second] = row[second], row[first]
        case "drop":
            del row[first]
        case "double":
            row.insert(second, row[first])
        case "move":
            row.insert(second, row.pop(first))
        case "split" if row[first].op is Op.B:
            stage, _, m = row[first]
            row[first : first + 1] = [Action(stage, Op.I, m), Action(stage, Op.W, m)]
    return replace(program, actions=tuple(tuple(row) for row in rows))


@settings(max_examples=400, deadline=None)
@given(mutated_programs())
def test_a_mutated_program_is_refused_exactly_when_it_cannot_run(program):
    try:
        check(program)
        is_accepted = True
    except ProgramError:
        is_accepted = False
    assert is_accepted == brute_force_is_legal(program)
