import json
import re

import pytest
from command import output_of
from typer.testing import CliRunner

from ppbench.cli import runs as stored
from ppbench.cli.app import app
from ppbench.display.formats import Format
from ppbench.errors import UsageError

RUNNER = CliRunner()


def run(store, *words):
    return RUNNER.invoke(app, [*words, "--results", str(store.folder)])


def listed(store, *words):
    found = run(store, "ls", "--format", "json", *words)
    assert found.exit_code == 0
    return json.loads(found.stdout)["rows"]


def test_runs_are_listed_that_meet_all_conditions(demo):
    chosen = listed(demo, "--where", "schedule=1f1b and status=ok", "--where", "world_size>1")
    assert [(run["schedule"], run["world_size"]) for run in chosen] == [("1f1b", 2), ("1f1b", 4)]
    assert listed(demo, "--where", "world_size>100") == []


def test_the_newest_are_listed_oldest_first(demo):
    every = [run["run_id"] for run in listed(demo)]
    assert every == sorted(every)
    assert [run["run_id"] for run in listed(demo, "--limit", "2")] == every[-2:]
    assert [run["run_id"] for run in listed(demo, "--limit", "0")] == every


def test_people_see_the_model_and_are_told_of_what_is_left_out(demo, monkeypatch, capsys):
    monkeypatch.setattr(stored, "MOST_LISTED", 3)
    text = output_of(stored.list_runs, [], None, demo.folder, how=Format.table)
    headings, rows = re.split("─+\n", text)
    assert "llama-8m" in headings
    assert len(rows.splitlines()) == 3
    assert "the newest 3 are shown; --limit 0 lists all" in capsys.readouterr().err
    assert (
        len(json.loads(output_of(stored.list_runs, [], None, demo.folder, how=Format.json))["rows"])
        == 7
    )


def test_a_condition_that_nothing_meets_and_an_empty_store_are_told_apart(demo, tmp_path, capsys):
    output_of(stored.list_runs, ["world_size=64"], None, demo.folder, how=Format.table)
    told = "--where world_size=64: no run has this value; its values are 1, 2, 4\n"
    assert capsys.readouterr().err.endswith(told)
    output_of(stored.list_runs, ["error=null", "status=oom"], None, demo.folder, how=Format.table)
    assert 'of those with error=null has this value; its values are "ok"' in capsys.readouterr().err
    with pytest.raises(UsageError, match="no runs here yet"):
        output_of(stored.list_runs, ["world_size=64"], None, tmp_path / "none", how=Format.table)
