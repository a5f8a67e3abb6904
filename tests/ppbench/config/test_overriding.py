"""`[[override]]`: settings of the cases that match, as for ranks that are more than the cores."""

import pandas as pd
from sweep_files import read

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
