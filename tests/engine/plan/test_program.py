from dataclasses import replace

import pytest

from engine.plan.action import COLLECTIVE_OPS, NO_INDEX, Action, parse_action, parse_cell
from engine.plan.drawing import draw
from engine.plan.lower import lower
from engine.plan.program import (
    Placement,
    actions_from_csv,
    from_csv,
    from_json,
    to_csv,
    to_json,
    v_placement,
)
from engine.plan.schedules.registry import ProgramFileError, build_program, read_csv


def cells(*texts):
    return tuple(parse_action(text) for text in texts)


@pytest.mark.parametrize("op", sorted(COLLECTIVE_OPS))
def test_a_collective_has_no_microbatch_whatever_stands_behind_it(op):
    action = Action(12, op, NO_INDEX)
    assert str(action) == f"12{op.value}"
    assert parse_action(str(action)) == parse_action(f"{action}7") == action
    assert parse_cell(f" {action} ") == (action,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0F",
        "0X1",
        "-1F0",
        "0F1.5",
        "0OPT0",
        "0F0 1F1",
        "UNSHARD",
        "٥F0",
        "0F" + 5000 * "9",
    ],
)
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_a_pair_that_may_overlap_is_run_in_its_order_and_nothing_else_is_a_pair():
    assert parse_cell("(0F3;3B1)OVERLAP_F_B") == cells("0F3", "3B1")
    for text in ("()", "(0F0;)", "(0F0)(0B0)", ""):
        with pytest.raises(ValueError, match="is not an action"):
            parse_cell(f"{text}OVERLAP_F_B")
    with pytest.raises(ValueError, match="is not an action"):
        parse_cell("0F0;0B0")


def test_v_placement_goes_down_the_ranks_and_back():
    assert v_placement(3).ranks == (0, 1, 2, 2, 1, 0)
    assert v_placement(3).stages_of(0) == (0, 5)
    assert v_placement(2, stages_per_rank=3).ranks == (0, 1, 1, 0, 0, 1)


def test_csv_has_a_row_per_rank_and_reads_back():
    program = build_program("1f1b", 2, 3)
    assert to_csv(program) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert actions_from_csv(to_csv(program)) == program.actions


def test_collectives_stand_in_the_rows_and_can_be_left_out():
    text = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n1F0,1UNSHARD,1B0\n"
    program = from_csv(text, "mine")
    assert to_csv(program) == text
    assert from_json(to_json(program)) == program
    assert program.actions[1] == cells("1F0", "1UNSHARD", "1B0")
    assert program.table.part(0, 1, 4) == cells("0F0", "0B0", "0REDUCE_GRAD")
    assert program.compute_only().actions == (cells("0F0", "0B0"), cells("1F0", "1B0"))
    assert (program.table.num_actions, program.num_computations) == (8, 4)
    assert draw(program, (1, 1)).splitlines()[1] == "rank 1: 1F0          [1UNSHARD]   1B0"
    assert replace(program, schedule="other").has_collectives
    plain = program.without_collectives()
    assert not plain.has_collectives
    assert plain != program
    assert plain is plain.without_collectives()
    assert program.compute_only() == plain.compute_only()
    assert lower(program) == lower(plain)


@pytest.mark.parametrize(
    ("text", "placement", "num_microbatches"),
    [
        ("0F0,7UNSHARD,1F0,1B0,0B0\n,9RESHARD\n\n", Placement((0, 0), 1), 1),
        ("0F0,3F0,,3B0,0B0\n1F0,2F0,2B0,1B0\n", Placement((0, 1, 1, 0), 2), 1),
    ],
)
def test_ranks_stages_and_microbatches_follow_from_computations(text, placement, num_microbatches):
    program = from_csv(text, "mine")
    assert (program.schedule, program.placement) == ("mine", placement)
    assert program.num_microbatches == num_microbatches


SMALL = b"0F0,,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    "data",
    [
        SMALL,
        SMALL.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + SMALL,
        SMALL + b"\n\n",
        SMALL + b",,\r\n\r\n",
        SMALL.removesuffix(b"\n"),
        SMALL.replace(b"0B0", b'"0B0",0RESHARD,0REDUCE_GRAD'),
        b"0UNSHARD," + SMALL.replace(b"1F0,1B0", b"(1F0;1B0)OVERLAP_F_B"),
    ],
)
def test_a_file_may_come_from_any_editor(tmp_path, data):
    path = tmp_path / "program.csv"
    path.write_bytes(data)
    plain = read_csv(path).without_collectives()
    assert plain.actions == (cells("0F0", "0B0"), cells("1F0", "1B0"))
    assert build_program(f"csv:{path}", 2, 1).actions == plain.actions


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n,,\n\n", "holds no actions; expected a row per rank with cells such as 0F0"),
        (b"0F0,0B0,0F2,0B2\n", "has microbatch 2 but nothing for microbatch 1"),
        (b"0F999999999,0B0\n", "has microbatch 999999999 but nothing for microbatch 1"),
        (b"999999999F0\n", "has stage 999999999 but nothing for stage 0"),
        (b'"0F\n0"\n', r'rank 0, column 0: "0F\n0" is not an action; '),
        (b"0F0\n\x1b[31m\x00", r'rank 1, column 0: "\u001b[31m\u0000" is not an action; '),
        (b"0F0," + b"x" * 5000, f'rank 0, column 1: "{"x" * 40}" is not an action; '),
        (b"0F0," + b"x" * 200_000, "is not CSV: field larger than field limit (131072)"),
        (b"\x89PNG\r\n\x1a\n\x00", "'utf-8' codec can't decode byte 0x89 in position 0"),
    ],
)
def test_a_file_that_holds_no_program_is_refused_in_one_line_that_says_where(
    tmp_path, data, message
):
    path = tmp_path / "program.csv"
    path.write_bytes(data)
    with pytest.raises(ProgramFileError) as caught:
        read_csv(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).isprintable()
