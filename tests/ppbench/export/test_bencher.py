from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import output_of
from tracked import CASE, STEADY, add_launches, store_in

from ppbench.cli.export import export
from ppbench.display.formats import ExportFormat
from ppbench.errors import UsageError
from ppbench.export.bencher import bencher, name_of
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


def test_by_default_the_last_sweep_goes_out_and_never_two_commits_at_once(store, capsys):
    add_launches(store, STEADY, ONE, sweep_id="a")
    (newest,) = add_launches(store, STEADY[2:3], TWO, sweep_id="b")
    found = json.loads(output_of(export, ExportFormat.bencher, [], None, None, store.folder))
    assert found[NAME]["tokens_per_s"]["value"] == STEADY[2]
    first = store.runs()["run_id"].iloc[0]
    with pytest.raises(UsageError, match="takes the runs of one commit, and these are of 2: 1111"):
        output_of(export, ExportFormat.bencher, [first, newest], None, None, store.folder)
    assert capsys.readouterr().err == "figures of commit 222222222\n"
