import json
import re

from command import output_of
from typer.testing import CliRunner

from ppbench.cli import runs as stored
from ppbench.cli.app import app
from ppbench.display.formats import Format

RUNNER = CliRunner()


def run(store, *words):
    return RUNNER.invoke(app, [*words, "--results", str(store.folder)])


def listed(store, *words):
    found = run(store, "ls", "--format", "json", *words)
    assert found.exit_code == 0
    return json.loads(found.stdout)["rows"]


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
