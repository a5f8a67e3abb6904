"""`ppbench explain` of several runs: what it prints of each, one after the other."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from command import output_of
from recordings import STORE

from ppbench.cli.explain import explain
from ppbench.display.formats import Format
from ppbench.store import Store

RESULTS = STORE / "results"


@pytest.fixture(scope="module")
def ids() -> list[str]:
    runs = Store(RESULTS).runs(["run_id", "status"])
    return runs.loc[runs["status"].eq("ok"), "run_id"].tail(2).tolist()


def printed(names: list[str], how: Format) -> str:
    return output_of(explain, names, results=RESULTS, how=how)


def test_several_runs_are_explained_one_after_the_other(ids) -> None:
    for how in (Format.table, Format.markdown):
        alone = [printed([run_id], how).strip() for run_id in ids]
        assert printed(ids, how).strip() == "\n\n".join(alone)


def test_several_runs_are_a_list_in_json_and_named_in_csv(ids, tmp_path) -> None:
    alone = [json.loads(printed([run_id], Format.json)) for run_id in ids]
    assert json.loads(printed(ids, Format.json))["runs"] == alone
    (tmp_path / "all.csv").write_text(printed(ids, Format.csv))
    rows = pd.read_csv(tmp_path / "all.csv")
    assert rows["run_id"].unique().tolist() == ids
    assert len(rows) == sum(len(one["by_step_and_rank"]) for one in alone)
