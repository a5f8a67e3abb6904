"""`--only KEY=VALUE`: which cases it chooses, and what it says when there is none."""

import pytest
from sweep_files import read

from ppbench.config.sweep import parse_only
from ppbench.errors import UsageError

TEXT = """\
[grid]
schedule = ["afab", "1f1b"]
world_size = [1, 2, 4]
model.partition = ["uniform", "parameters"]
measure.steps = [3, 5]

[[exclude]]
schedule = "afab"
world_size = 4
"""


@pytest.fixture
def planned(tmp_path):
    return read(tmp_path, TEXT).cases


def shapes(cases):
    return sorted({(case.schedule, case.world_size) for case, _ in cases})


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        ([], [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("afab", 1), ("afab", 2)]),
        (["world_size=2"], [("1f1b", 2), ("afab", 2)]),
        (["world_size=4"], [("1f1b", 4)]),
        (["world_size=1", "schedule=afab"], [("afab", 1)]),
        (["world_size=1", "world_size=4"], [("1f1b", 1), ("1f1b", 4), ("afab", 1)]),
        (["world_size=[1, 4]", 'schedule="1f1b"'], [("1f1b", 1), ("1f1b", 4)]),
        (["schedule=gpipe"], [("afab", 1), ("afab", 2)]),
        (["grid.world_size=2", "device=cpu", "seq_len=128"], [("1f1b", 2), ("afab", 2)]),
    ],
)
def test_keys_hold_together_and_values_of_one_key_are_alternatives(planned, texts, chosen):
    only = parse_only(texts)
    assert shapes(only.select(planned)) == chosen
    assert only.select(planned) == tuple(one for one in planned if only.matches(*one))


def test_lists_and_how_a_case_is_measured_can_be_chosen(planned):
    assert {m.steps for _, m in parse_only(["measure.steps=5"]).select(planned)} == {5}
    partitions = parse_only(["model.partition=parameters"]).select(planned)
    assert {case.model_partition for case, _ in partitions} == {"parameters"}
    assert parse_only(["model.partition=[3, 5]"]).allowed == (("model.partition", ((3, 5),)),)
    two = parse_only(["model.partition=[[3, 5], [4, 4]]"])
    assert two.allowed == (("model.partition", ((3, 5), (4, 4))),)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["name=x"], "--only name=x: not a setting of a case"),
        (["world_size=two"], '--only world_size=two: expected an integer, got "two"'),
        (["schedule=1f1v"], '--only schedule=1f1v: unknown schedule "1f1v"; did you mean "1f1b"?'),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(texts, message):
    with pytest.raises(UsageError) as caught:
        parse_only(texts)
    assert str(caught.value).startswith(message)


def test_a_selection_of_nothing_tells_what_there_is(planned):
    with pytest.raises(UsageError) as caught:
        parse_only(["world_size=8"]).select(planned)
    assert str(caught.value) == (
        "--only world_size=8: no case has this value; its values are 1, 2, 4"
    )
    with pytest.raises(UsageError) as caught:
        parse_only(["schedule=afab", "world_size=4"]).select(planned)
    assert str(caught.value) == (
        '--only world_size=4: no case of those with schedule = "afab" has this '
        "value; its values are 1, 2"
    )


def test_of_many_values_only_some_are_told(tmp_path):
    planned = read(tmp_path, f"[grid]\nseq_len = {list(range(1, 100))}").cases
    with pytest.raises(UsageError, match=r"its values are 1, 2, .*, 20, \.\.\. \(99 values\)"):
        parse_only(["seq_len=200"]).select(planned)
