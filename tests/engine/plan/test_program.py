import pytest

from engine.plan.action import Action, Op, parse_action
from engine.plan.program import actions_from_csv, draw, from_json, loop_placement, to_csv, to_json
from engine.plan.schedules.registry import build_program


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.OPT])
def test_the_text_form_of_an_action_reads_back(op):
    action = Action(12, op, 345)
    assert str(action) == f"12{op.value}345"
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "-1F0", "0F1.5", "0OPT0", "0F0 1F1"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_loop_placement_goes_round_the_ranks():
    placement = loop_placement(3, stages_per_rank=2)
    assert placement.ranks == (0, 1, 2, 0, 1, 2)
    assert placement.stages_of(1) == (1, 4)


def test_csv_has_a_row_per_rank_and_reads_back():
    program = build_program("1f1b", 2, 3)
    assert to_csv(program) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert actions_from_csv(to_csv(program)) == program.actions


def test_csv_skips_idle_cells_and_locates_bad_ones():
    assert actions_from_csv("0F0,,0B0\n") == ((Action(0, Op.F, 0), Action(0, Op.B, 0)),)
    with pytest.raises(ValueError, match='rank 1, column 2: "1Z0"'):
        actions_from_csv("0F0\n1F0,,1Z0\n")


def test_torch_reads_our_csv_cells():
    from torch.distributed.pipelining.schedules import _Action

    for row in build_program("1f1b", 3, 4).actions:
        assert [str(_Action.from_str(str(action))) for action in row] == [str(a) for a in row]


def test_json_reads_back():
    program = build_program("afab", 3, 2)
    assert from_json(to_json(program)) == program


def test_drawing_marks_a_place_and_cuts_around_it():
    program = build_program("afab", 2, 30)
    assert "[0F20]" in draw(program, (0, 20))
    assert "0F2 " not in draw(program, (0, 20))
