"""`ranks` and `microbatches` are taken wherever `world_size` and `num_microbatches` are."""

import pandas as pd
import pytest
from stored_runs import run_row, store_with
from sweep_files import read

from ppbench.config.case import Case
from ppbench.config.conditions import parse_only
from ppbench.display.formats import Format
from ppbench.display.tables import View, render
from ppbench.errors import SweepFileError, UsageError
from ppbench.results import load
from ppbench.store import read_conditions

FILE = """\
microbatches = 16
[grid]
schedule = ["afab", "1f1b"]
ranks = [1, 2, 4]
[[exclude]]
ranks = 1
schedule = "afab"
[[override]]
where = { ranks = 4 }
set = { seq_len = 64 }
"""


def cases(tmp_path, text, *overrides):
    sweep = read(tmp_path, text, *overrides)
    return [case for case, _ in sweep.cases], sweep.axes


def test_a_sweep_file_takes_them_everywhere(tmp_path):
    planned, axes = cases(tmp_path, FILE)
    assert [(c.schedule, c.world_size, c.num_microbatches, c.seq_len) for c in planned] == [
        *(("afab", 2, 16, 128), ("afab", 4, 16, 64)),
        *(("1f1b", 1, 16, 128), ("1f1b", 2, 16, 128), ("1f1b", 4, 16, 64)),
    ]
    assert axes[:2] == ("schedule", "world_size")
    same, _ = cases(tmp_path, FILE.replace("ranks", "world_size").replace("micro", "num_micro"))
    assert [case.case_id for case in planned] == [case.case_id for case in same]


def test_options_take_them(tmp_path):
    planned, _ = cases(tmp_path, FILE, "ranks=2", "grid.microbatches=[4, 8]")
    assert {case.world_size for case in planned} == {2}
    assert {case.num_microbatches for case in planned} == {4, 8}
    only = parse_only(["ranks=2", "microbatches=[8, 16]"], "cpu")
    assert only == parse_only(["world_size=2", "num_microbatches=[8, 16]"], "cpu")
    assert read_conditions(["ranks>=2 and microbatches=8"]) == read_conditions(
        ["world_size>=2 and num_microbatches=8"]
    )


def test_a_setting_is_not_given_by_both_words(tmp_path):
    with pytest.raises(
        SweepFileError, match=r"toml:2: ranks: is given twice: world_size is the same key"
    ):
        cases(tmp_path, "world_size = 2\nranks = 4\n")


def test_an_error_names_the_line_that_has_the_other_word(tmp_path):
    with pytest.raises(SweepFileError, match=r"sweep\.toml:3: grid\.ranks: "):
        cases(tmp_path, '[grid]\nschedule = ["afab"]\nranks = [0]\n')


@pytest.mark.parametrize(
    "refused",
    [
        lambda: parse_only(["rankss=2"], "cpu"),
        lambda: read_conditions(["rankss=2"]),
        lambda: render(
            pd.DataFrame({"world_size": [1]}), Format.csv, [], View.of(["rankss"], None)
        ),
    ],
    ids=["only", "where", "columns"],
)
def test_they_are_suggested(refused):
    with pytest.raises(UsageError, match='did you mean "ranks"'):
        refused()


def test_a_notebook_selects_by_them(tmp_path):
    store_with(tmp_path, [run_row(1, Case(world_size=2)), run_row(2, Case(world_size=4))])
    results = load(tmp_path)
    assert len(results.select(ranks=4, microbatches=8)) == 1
    with pytest.raises(UsageError, match='did you mean "ranks"'):
        results.select(rankss=4)
