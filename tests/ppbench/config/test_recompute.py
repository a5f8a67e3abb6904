"""`train.recompute` of some stages: how a sweep file says it, and how a case keeps it."""

import json

import pytest
from sweep_files import read

from ppbench.config.case import Case
from ppbench.config.conditions import parse_only
from ppbench.run.runtimes.runtime import trainer_config

TWO_STAGES = "world_size = 2\n[train]\nrecompute = {}\n"


def test_a_list_has_a_value_for_each_stage(tmp_path):
    ((case, _),) = read(tmp_path, TWO_STAGES.format("[true, false]")).cases
    assert case.train_recompute is True
    assert case.train_recompute_stages == (True, False) == trainer_config(case).recompute
    assert json.loads(str(case.settings()["train_recompute_stages"])) == [True, False]
    ((none, _),) = read(tmp_path, TWO_STAGES.format("[false, false]")).cases
    assert none.train_recompute is False


@pytest.mark.parametrize("value", ["true", "false"])
def test_one_value_is_for_all_stages_and_such_cases_keep_their_ids(tmp_path, value):
    ((case, _),) = read(tmp_path, TWO_STAGES.format(value)).cases
    is_on = value == "true"
    assert case == Case(train_recompute=is_on)
    assert trainer_config(case).recompute is is_on


def test_an_axis_may_have_lists_beside_single_values(tmp_path):
    text = "world_size = 2\n[grid]\ntrain.recompute = [false, [true, false], [false, true]]\n"
    sweep = read(tmp_path, text)
    assert [case.recompute for case, _ in sweep.cases] == [False, (True, False), (False, True)]
    assert len({case.case_id for case, _ in sweep.cases}) == 3
    assert sweep.axes == ("train_recompute", "train_recompute_stages")
    only = parse_only(["train.recompute=[[true, false]]"], "cpu")
    assert [case.recompute for case, _ in only.select(sweep.cases)] == [(True, False)]
    excluded = text + "[[exclude]]\ntrain.recompute = [[true, false]]\n"
    assert [case.recompute for case, _ in read(tmp_path, excluded).cases] == [False, (False, True)]
