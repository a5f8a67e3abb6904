"""Commands print the runs of a store."""

import json

import pandas as pd
import pytest
from command import output_of, printed
from stored_runs import NASTY, run_row, store_failed, store_with

from ppbench.cli import runs
from ppbench.config.case import Case
from ppbench.display.formats import Format
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
    lines = [line.split() for line in output_of(runs.show, "last", results).splitlines()]
    assert ["model_partition", "[3,", "5]"] in lines
    assert ["0", "3", "3,000", "37.5", "%"] in lines
    assert ["1", "5", "5,500", "62.5", "%"] in lines
    assert ["3", "1,234", "0.0"] in lines  # the step


def test_a_variable_length_is_a_word_in_every_listing(results):
    for how in Format:
        assert "variable" in output_of(runs.list_runs, [], None, results, how=how)
        assert "variable" in output_of(runs.show, "last", results, how=how)
    (row,) = json.loads(output_of(runs.list_runs, [], None, results, how=Format.json))["rows"]
    assert row["seq_len"] == "variable"
    (results / "v.toml").write_text("[grid]\nseq_len = [64, 'variable']")
    assert "variable" in printed("sweep", results / "v.toml", "--dry-run").text


@pytest.fixture
def failed(tmp_path):
    """A run that hung, the last one, and one without a record of its ranks."""
    case = Case(seq_len=512)
    oom = run_row(1, case, status="oom", error=f"{NASTY}\nline two", tokens_per_s=None)
    store_failed(store_with(tmp_path, [oom]), run_row(2, Case()))
    return tmp_path


def test_a_failed_run_without_a_record_shows_its_whole_error(failed):
    run_id = Store(failed).runs().iloc[0]["run_id"]
    shown = output_of(runs.show, run_id, failed, how=Format.table)
    assert shown.startswith(f"oom: {NASTY}\n\nline two\n")
    assert "```" in output_of(runs.show, run_id, failed, how=Format.markdown)


def test_a_listing_tells_the_first_line_of_each_error(failed):
    listed = output_of(runs.list_runs, [], None, failed, how=Format.table)
    assert "rank 1 is stopped (SIGSTOP or a debugger) in 1B0" in listed
    assert "line two" not in listed
    assert NASTY[:20] in listed
    (oom, _) = json.loads(output_of(runs.list_runs, [], None, failed, how=Format.json))["rows"]
    assert oom["error"].endswith("line two")  # programs get all of it
