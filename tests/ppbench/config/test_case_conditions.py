"""Conditions on cases: of `--only`, `[[exclude]]`, `[[override]]` and `[track]`."""

import pytest
from sweep_files import read

from ppbench.commits.bench import read_tracked
from ppbench.config.conditions import conditions_of, parse_only, read_conditions
from ppbench.recommendation.question import read_question

GRID = """\
[grid]
schedule = ["afab", "1f1b"]
world_size = [1, 2, 4]
model.partition = ["uniform", "parameters"]
measure.steps = [3, 5]

[[exclude]]
schedule = "afab"
world_size = 4
"""
TWO_STAGES = '[grid]\nschedule = ["1f1b", "zbv"]\nnum_microbatches = [4, 8]\n'


@pytest.fixture
def planned(tmp_path):
    return read(tmp_path, GRID).cases


def shapes(cases):
    return sorted({(case.schedule, case.world_size) for case, _ in cases})


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        ([], [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("afab", 1), ("afab", 2)]),
        (["world_size=4"], [("1f1b", 4)]),
        (["world_size=1", "schedule=afab"], [("afab", 1)]),
        (["world_size=1 and schedule=afab"], [("afab", 1)]),
        (["world_size=1", "world_size=4"], [("1f1b", 1), ("1f1b", 4), ("afab", 1)]),
        (["world_size=[1, 4]", 'schedule="1f1b"'], [("1f1b", 1), ("1f1b", 4)]),
        (["schedule=gpipe"], [("afab", 1), ("afab", 2)]),
        (["grid.ranks=2", "device=auto", "seq_len=128"], [("1f1b", 2), ("afab", 2)]),
        (["ranks>=2", "schedule!=afab"], [("1f1b", 2), ("1f1b", 4)]),
        (["world_size>1 and world_size<4"], [("1f1b", 2), ("afab", 2)]),
        (["world_size<=1", "seq_len<=128"], [("1f1b", 1), ("afab", 1)]),
    ],
)
def test_conditions_hold_together_and_values_of_one_key_are_alternatives(planned, texts, chosen):
    only = parse_only(texts, "cpu")
    assert shapes(only.select(planned)) == chosen
    assert only.select(planned) == tuple(one for one in planned if only.matches(one))
    assert parse_only(map(str, only.each), "cpu") == only


def test_lists_and_how_a_case_is_measured_can_be_chosen(planned):
    assert {m.steps for _, m in parse_only(["measure.steps=5"], "cpu").select(planned)} == {5}
    for text, values in (("[3, 5]", ((3, 5),)), ("[[3, 5], [4, 4]]", ((3, 5), (4, 4)))):
        (condition,) = parse_only([f"model.partition={text}"], "cpu").each
        assert condition.values == values
        assert parse_only([str(condition)], "cpu").each == (condition,)


def test_the_conditions_of_a_case_are_its_own(planned):
    axes = ("schedule", "world_size", "model_partition", "measure_steps")
    for case in planned:
        assert read_conditions(conditions_of(case, axes), "cpu").select(planned) == (case,)


@pytest.mark.parametrize(
    ("table", "left"),
    [
        ('[[exclude]]\ndevice = "auto"\nschedule = "1f1b"', [("zbv", 4), ("zbv", 8)]),
        ('[[exclude]]\nstages_per_rank = "auto"\nnum_microbatches = 4', [("1f1b", 8), ("zbv", 8)]),
        ("[[exclude]]\nstages_per_rank = 2", [("1f1b", 4), ("1f1b", 8)]),
        ('[[exclude]]\nschedule = ["1f1b", "zbv"]\nmicrobatches = 4', [("1f1b", 8), ("zbv", 8)]),
    ],
)
def test_values_are_resolved_before_they_are_matched(tmp_path, table, left):
    """`auto` was taken and never matched (FAULTS 13)."""
    sweep = read(tmp_path, TWO_STAGES + table)
    assert sorted((case.schedule, case.num_microbatches) for case, _ in sweep.cases) == left
    assert sweep.notes == ()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ('{device = "auto"}', {"1f1b": 64, "zbv": 64}),
        ("{stages_per_rank = 2}", {"1f1b": 128, "zbv": 64}),
        ('{stages_per_rank = "auto", schedule = "1f1b"}', {"1f1b": 64, "zbv": 128}),
    ],
)
def test_an_override_matches_what_a_case_has(tmp_path, where, expected):
    text = f"{TWO_STAGES}[[override]]\nwhere = {where}\nset = {{seq_len = 64}}\n"
    assert {case.schedule: case.seq_len for case, _ in read(tmp_path, text).cases} == expected


@pytest.mark.parametrize("reads", [read_tracked, read_question], ids=["check", "plan"])
def test_commands_that_read_a_sweep_file_say_so(tmp_path, caplog, reads):
    """`ppbench check` took a threshold that no case meets, and was silent."""
    caplog.set_level("INFO", logger="ppbench")
    path = tmp_path / "sweep.toml"
    path.write_text('[track.thresholds]\n"ranks>4" = "2%"\n')
    reads(path)
    assert caplog.messages == [f"note: {path}:2: world_size>4 matches no case"]
