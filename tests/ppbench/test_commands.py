"""What the commands print of runs that are in the store already."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from ppbench import commands, stored
from ppbench.config.case import Case
from ppbench.format import Format
from ppbench.store import Store

STAGES = {
    "layers_per_stage": "[3, 5]",
    "parameters_per_stage": "[3000, 5500]",
    "stage_shares": "[0.375, 0.625]",
}


@pytest.fixture
def results(tmp_path):
    """One run of variable length over two stages."""
    case = Case(seq_len="variable", model_partition=(3, 5))
    run = {"run_id": "a", "status": "ok", "case_id": case.case_id, **case.settings(), **STAGES}
    steps = pd.DataFrame([{"step": 3, "num_tokens": 1234, "step_ns": 10}])
    Store(tmp_path).write_run(run, {"steps": steps})
    return tmp_path


def test_a_run_shows_its_partition_and_what_each_stage_has_of_it(results):
    lines = [line.split() for line in commands.show("last", results, Format.table).splitlines()]
    assert ["model_partition", "[3,", "5]"] in lines
    assert ["0", "3", "3,000", "37.5", "%"] in lines
    assert ["1", "5", "5,500", "62.5", "%"] in lines
    assert ["3", "1,234", "0.0"] in lines  # the step


def test_a_run_of_an_older_version_shows_the_stages_that_it_knows(results):
    for path in results.rglob("*.parquet"):
        later = ("parameters_per_stage", "stage_shares", "num_tokens", "train_compile")
        pq.write_table(pq.read_table(path).drop_columns(
            [name for name in later if name in pq.read_schema(path).names]
        ), path)  # fmt: skip
    lines = [line.split() for line in commands.show("last", results, Format.table).splitlines()]
    assert ["1", "5"] in lines
    assert ["train_compile", "false"] in lines


def test_a_variable_length_is_a_word_in_every_listing(results):
    for how in Format:
        assert "variable" in stored.list_runs(results, [], None, how)
        assert "variable" in commands.show("last", results, how)
    assert json.loads(stored.list_runs(results, [], None, Format.json))[0]["seq_len"] == "variable"
    (results / "v.toml").write_text("[grid]\nseq_len = [64, 'variable']")
    assert "variable" in commands.list_cases(results / "v.toml", [], Format.table)
