"""`ranks` and `microbatches` are taken wherever `world_size` and `num_microbatches` are."""

import pandas as pd
import pytest
from stored_runs import run_row, store_with
from sweep_files import assert_refused

from ppbench.config.case import Case
from ppbench.config.conditions import parse_only
from ppbench.display.formats import Format
from ppbench.display.tables import View, render
from ppbench.errors import UsageError
from ppbench.results import load
from ppbench.store import read_conditions


def test_conditions_take_them():
    only = parse_only(["ranks=2", "microbatches=[8, 16]"], "cpu")
    assert only == parse_only(["world_size=2", "num_microbatches=[8, 16]"], "cpu")
    assert read_conditions(["ranks>=2 and microbatches=8"]) == read_conditions(
        ["world_size>=2 and num_microbatches=8"]
    )


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("world_size = 2\nranks = 4\n", "2: ranks", "is given twice: world_size is the same key"),
        ("[grid]\nranks = [0]\n", "2: grid.ranks", "expected a whole number"),
    ],
)
def test_an_error_names_the_word_that_the_file_has(tmp_path, text, where, what):
    assert_refused(tmp_path, text, where, what)


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
