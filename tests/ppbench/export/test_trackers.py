from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from command import output_of
from tracked import CASE, STEADY, add_launches, slower, store_in

from ppbench.cli.export import export
from ppbench.display.formats import ExportFormat
from ppbench.errors import UsageError
from ppbench.export.trackers import bencher, github, name_of, otava
from ppbench.store import Store

NAME = "1f1b world_size=2 num_microbatches=8 seq_len=128 device=cpu model.preset=llama-8m on f1f2"
ONE, TWO = "1" * 40, "2" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_in(tmp_path)


def test_a_case_is_called_the_same_whatever_else_there_is(store):
    add_launches(store, STEADY[:1], ONE)
    case = replace(CASE, schedule="zb_h1", train_microbatch_size=2, model_split_points=("a", "b"))
    add_launches(store, STEADY[:1], ONE, case, fingerprint="f9")
    costs = replace(CASE, emulated_costs="costs.toml", emulated_F_ms=(1.0, 2.0))
    add_launches(store, STEADY[:1], ONE, costs)
    names = [name_of(run) for _, run in store.runs().iterrows()]
    usual = "world_size=2 num_microbatches=8 seq_len=128 device=cpu model.preset=llama-8m"
    assert names == [
        NAME,
        f'zb_h1 {usual} model.split_points=["a", "b"] train.microbatch_size=2 on f9',
        f"1f1b {usual} emulated.costs=costs.toml on f1f2",
    ]


def test_bencher_gets_medians_with_the_lowest_and_highest_launch(store):
    add_launches(store, STEADY, ONE)
    assert json.loads(bencher(store.runs())) == {
        NAME: {
            "tokens_per_s": {"value": 1000.0, "lower_value": 997.0, "upper_value": 1004.0},
            "bubble_fraction": {"value": 0.25, "lower_value": 0.25, "upper_value": 0.25},
            "peak_memory_bytes": {
                "value": 104857600.0, "lower_value": 104857600.0, "upper_value": 104857600.0
            },
        }
    }  # fmt: skip


def test_one_launch_has_the_interval_of_its_steps(store):
    ends = {"tokens_per_s_low": 990.0, "tokens_per_s_high": 1010.0, "peak_memory_bytes": None}
    add_launches(store, STEADY[:1], ONE, **ends)
    (figures,) = json.loads(bencher(store.runs())).values()
    assert figures["tokens_per_s"] == {"value": 1000, "lower_value": 990, "upper_value": 1010}
    assert set(figures) == {"tokens_per_s", "bubble_fraction"}


def test_github_gets_what_is_better_when_bigger(store):
    add_launches(store, STEADY, ONE)
    assert json.loads(github(store.runs())) == [
        {
            "name": NAME,
            "unit": "tokens/s",
            "value": 1000.0,
            "range": "± 3.5",
            "extra": "launches: 5\nbubble: 25.0 %\npeak: 100.0 MiB",
        }
    ]


def test_otava_gets_a_row_per_commit_by_time_and_a_configuration_that_reads_it(store):
    day = "2026-01-0{}T01:00:00+01:00"
    add_launches(store, slower(0.05), TWO, author_date=day.format(2), subject='Slower, "a bit"')
    add_launches(store, STEADY, ONE, author_date=day.format(1))
    for sha in (ONE, TWO):
        afab = replace(CASE, schedule="afab")
        add_launches(store, STEADY[:1], sha, afab, author_date=None, peak_memory_bytes=None)
    made = otava(store.runs(), "history.csv")
    rows = list(csv.DictReader(io.StringIO(made.text)))
    assert [(row["time"], row["commit"]) for row in rows] == [
        ("2026-01-01T00:00:00+00:00", ONE),
        ("2026-01-02T00:00:00+00:00", TWO),
    ]
    assert rows[1]["subject"] == 'Slower, "a bit"'
    assert "branch" not in rows[0]
    (test,) = yaml.safe_load(made.config)["tests"].values()
    assert (test["type"], test["file"], test["time_column"]) == ("csv", "history.csv", "time")
    assert set(test["metrics"]) == set(rows[0]) - {"time", "commit", "subject"}
    directions = {name.split()[-1]: of["direction"] for name, of in test["metrics"].items()}
    assert directions == {"tokens_per_s": 1, "bubble_fraction": -1, "peak_memory_bytes": -1}
    assert all(pd.notna(float(row[name])) for row in rows for name in test["metrics"])


def test_otava_takes_no_gaps(store):
    third = "3" * 40
    for sha in (ONE, TWO, third):
        add_launches(store, STEADY[:1], sha)
    add_launches(store, STEADY[:1], ONE, fingerprint="rare")
    for sha in (ONE, TWO):
        add_launches(store, STEADY[:1], sha, replace(CASE, schedule="afab"))
    made = otava(store.runs(), "x.csv")
    assert made.num_commits == 2
    assert made.left_out == "columns that few commits have (3) and commits that lack a figure (1)"
    assert "rare" not in made.text


def test_by_default_the_last_sweep_goes_out_and_never_two_commits_at_once(store, capsys):
    add_launches(store, STEADY, ONE, sweep_id="a")
    (newest,) = add_launches(store, STEADY[2:3], TWO, sweep_id="b")
    found = json.loads(output_of(export, ExportFormat.github, [], None, None, store.folder))
    assert found[0]["value"] == STEADY[2]
    first = store.runs()["run_id"].iloc[0]
    with pytest.raises(UsageError, match="takes the runs of one commit, and these are of 2: 1111"):
        output_of(export, ExportFormat.bencher, [first, newest], None, None, store.folder)
    assert capsys.readouterr().err == "figures of commit 222222222\n"
    path = store.folder / "history.csv"
    assert output_of(export, ExportFormat.otava, [], None, path, store.folder) == str(path)
    assert len(path.read_text().splitlines()) == 1 + 2
    told = capsys.readouterr().err
    assert told.startswith("# otava.yaml, to be read with: otava analyze ppbench\ntests:\n")
    assert f'file: "{path}"' in told


def test_a_tracker_takes_no_table_and_no_failed_runs(store):
    add_launches(store, [None], ONE, status="oom")
    with pytest.raises(UsageError, match="--table steps: otava takes figures of runs and no table"):
        output_of(export, ExportFormat.otava, [], "steps", None, store.folder)
    with pytest.raises(UsageError, match="none of the 1 runs is ok; nothing to export"):
        output_of(export, ExportFormat.bencher, [], None, None, store.folder)


def test_otava_takes_no_runs_with_uncommitted_changes(store):
    add_launches(store, STEADY[:1], ONE, is_dirty=True, changes="c4a9")
    with pytest.raises(UsageError, match="none of the runs is of a commit without changes"):
        output_of(export, ExportFormat.otava, [], None, None, store.folder)


def test_figures_that_no_run_has_are_not_told(store):
    add_launches(store, STEADY, ONE, bubble_fraction=None, peak_memory_bytes=None)
    (entry,) = json.loads(github(store.runs()))
    assert entry["extra"] == "launches: 5"
