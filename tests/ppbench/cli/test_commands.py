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


def test_a_failed_run_shows_first_how_it_failed_and_what_each_rank_was_doing(failed):
    shown = output_of(runs.show, "last", failed, how=Format.table)
    first, *lines = shown.splitlines()
    assert first == (
        "timeout: rank 1 is stopped (SIGSTOP or a debugger) in 1B0 of step 1, since "
        "10.0 s; rank 0 waits for it"
    )
    cells = [line.split() for line in lines]
    assert ["phase", "steps,", "step", "1"] in cells
    assert ["rank", "process", "action", "waits", "for", "for", "(s)"] in cells
    assert ["0", "alive", "0B0", "1B0", "of", "rank", "1", "10.010"] in cells
    assert ["1", "stopped", "1B0", "10.000"] in cells
    assert "rank 1: last lines of its log" in lines
    assert ["attempt", "1"] in cells
    assert not any(line.startswith((" last_actions", " error ")) for line in lines)


def test_a_failed_run_without_a_record_shows_its_whole_error(failed):
    run_id = Store(failed).runs().iloc[0]["run_id"]
    shown = output_of(runs.show, run_id, failed, how=Format.table)
    assert shown.startswith(f"oom: {NASTY}\n\nline two\n")
    assert "```" in output_of(runs.show, run_id, failed, how=Format.markdown)


def test_json_of_a_failed_run_holds_the_flight_of_its_ranks(failed):
    told = json.loads(output_of(runs.show, "last", failed, how=Format.json))
    assert [row["rank"] for row in told["flight"]] == [0, 1]
    assert told["flight"][0]["waits_for_action"] == "1B0"
    assert told["run"]["error_rank"] == 1


def test_a_listing_tells_the_first_line_of_each_error(failed):
    listed = output_of(runs.list_runs, [], None, failed, how=Format.table)
    assert "rank 1 is stopped (SIGSTOP or a debugger) in 1B0" in listed
    assert "line two" not in listed
    assert NASTY[:20] in listed
    (oom, _) = json.loads(output_of(runs.list_runs, [], None, failed, how=Format.json))["rows"]
    assert oom["error"].endswith("line two")  # programs get all of it


def test_a_listing_without_failures_has_no_column_for_errors(results):
    assert "error" not in output_of(runs.list_runs, [], None, results, how=Format.table)
