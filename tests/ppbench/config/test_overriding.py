"""`[[override]]`: settings of the cases that match, as for ranks that are more than the cores."""

import pandas as pd
import pytest
from sweep_files import assert_refused, read

from ppbench.display.cases import case_text, varying_axes
from ppbench.run.sweep.plan import planned_cases

MIXED = """\
name = "mixed"
[grid]
schedule = ["afab", "1f1b"]
world_size = [2, 4]
seq_len = [64, 128]

[[override]]
where = {world_size = 4}
set = {device = "emulated", emulated = {F_ms = 8, I_ms = 8, W_ms = 8}}

[[override]]
where = {world_size = [4, 8], seq_len = 128}
set = {emulated.F_ms = 16}
"""


def test_settings_of_the_matching_cases_are_overridden_and_later_overrides_win(tmp_path):
    sweep = read(tmp_path, MIXED)
    found = {
        (case.world_size, case.seq_len): (case.device, case.emulated_F_ms, case.emulated_W_ms)
        for case, _ in sweep.cases
    }
    assert found == {
        (2, 64): ("cpu", (), ()),
        (2, 128): ("cpu", (), ()),
        (4, 64): ("emulated", (8.0,), (8.0,)),
        (4, 128): ("emulated", (16.0,), (8.0,)),
    }
    plain = read(tmp_path, MIXED.partition("[[override]]")[0])
    ids = {case.case_id for case, _ in plain.cases if case.world_size == 2}
    assert ids == {case.case_id for case, _ in sweep.cases if case.world_size == 2}


def test_tables_and_names_say_which_cases_are_emulated(tmp_path):
    sweep = read(tmp_path, MIXED)
    assert sweep.axes == ("schedule", "world_size", "seq_len", "device")
    rows = planned_cases(sweep)
    assert varying_axes(rows) == ("schedule", "world_size", "seq_len", "device")
    names = [case_text(row, varying_axes(rows)) for _, row in rows.iterrows()]
    assert names[0] == "afab, 2 ranks, 64 tokens, cpu"
    assert names[-1] == "1f1b, 4 ranks, 128 tokens, emulated"


def test_times_that_nothing_else_tells_apart_stay_in_the_names(tmp_path):
    slower = read(tmp_path, MIXED.replace("F_ms = 8", "F_ms = 10"))
    both = pd.concat([planned_cases(read(tmp_path, MIXED)), planned_cases(slower)])
    assert "emulated_F_ms" in varying_axes(both)


def test_the_command_line_wins_over_an_override(tmp_path):
    real = read(tmp_path, MIXED, "device=cpu")
    assert {case.device for case, _ in real.cases} == {"cpu"}
    assert {case.emulated_F_ms for case, _ in real.cases} == {()}
    assert "device" not in real.axes
    times = ("emulated.F_ms=4", "emulated.I_ms=2", "emulated.W_ms=3")
    timed = read(tmp_path, MIXED, "device=emulated", *times)
    assert {case.emulated_F_ms for case, _ in timed.cases} == {(4.0,)}


def test_a_measurement_may_be_overridden(tmp_path):
    sweep = read(
        tmp_path, MIXED + "[[override]]\nwhere = {device = 'cpu'}\nset = {measure.steps = 4}"
    )
    assert {case.world_size: measure.steps for case, measure in sweep.cases} == {2: 4, 4: 10}
    assert sweep.axes[-1] == "measure_steps"


@pytest.mark.parametrize(
    ("table", "where", "what"),
    [
        ("[override]\nwhere = {}", "7: override", "expected [[override]], an array"),
        ("[[override]]\nworld_size = 4", "7: override", "expected where = {KEY = VALUE, ...} and"),
        ("[[override]]\nset = {seq_len = 4}\nwhere = {}", "9: override.where", "is empty"),
        ("[[override]]\nwhere = {seq_len = 64}\nset = {wrold_size = 4}",
         "9: override.set.wrold_size", 'mean "world_size"'),
        ("[[override]]\nwhere = {seq_len = 64}\nset = {world_size = 4}",
         "9: override.set.world_size", "is an axis of [grid]"),
        ("[[override]]\nwhere = {seq_len = 64}\nset = {device = 'emulated'}",
         "9: override.set.device", "needs F_ms, I_ms and W_ms"),
        ("[[override]]\nwhere = {seq_len = 64}\nset = {name = 'x'}", "9: override.set.name",
         "names the whole sweep"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_override_is_located(tmp_path, table, where, what):
    assert_refused(tmp_path, f"{MIXED.partition('[[override]]')[0]}{table}\n", where, what)
