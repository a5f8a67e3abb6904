import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from command import inside

from ppbench.config.case import Case
from ppbench.store import SCHEMA_VERSION, TABLES, Store

pytestmark = pytest.mark.usefixtures("warm_starts")

STORES = Path(__file__).parents[1] / "stores"
VERSIONS = range(1, SCHEMA_VERSION + 1)
FIRST_IN = {"attribution": 4, "edges": 4, "planned": 4, "flight": 5}


def ppbench(*words):
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def store(request, tmp_path):
    shutil.copytree(STORES / f"v{request.param}", tmp_path / "results")
    return Store(tmp_path / "results", pytest.fail)


def contents(store):
    runs = store.runs()
    others = [name for name in TABLES if name != "runs"]
    return {"runs": runs, **{name: store.table(name, runs["run_id"]) for name in others}}


@pytest.mark.parametrize(
    ("store", "version"), list(zip(VERSIONS, VERSIONS, strict=True)), indirect=["store"]
)
def test_a_store_of_each_version_is_read(store, version):
    found = contents(store)
    run = found["runs"].iloc[0]
    assert (run["status"], run["schema_version"]) == ("ok", version)
    assert all(not pd.isna(run[name]) for name in Case().settings())
    assert bool(run["launch_bind"]) is (version >= 5)
    for name in ("steps", "ranks", "spans"):
        assert set(found[name]["run_id"]) == {run["run_id"]}
        assert set(found[name]["schema_version"]) == {version}
    of_a_rank = [table for table in found.values() if "replica" in table and len(table)]
    assert all((table["replica"] == 0).all() for table in of_a_rank)
    for name, first in FIRST_IN.items():
        assert version >= first or found[name].empty


@pytest.mark.parametrize("store", VERSIONS, indirect=True)
def test_a_store_of_each_version_is_the_same_when_compacted(store):
    before = contents(store)
    store.compact(pytest.fail)
    assert not list((store.folder / "runs").glob("*.parquet"))
    after = contents(Store(store.folder, pytest.fail))
    for name in TABLES:
        pd.testing.assert_frame_equal(after[name], before[name])


@pytest.mark.parametrize("is_compacted", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_runs_of_all_versions_are_listed_shown_and_asked_together(tmp_path, is_compacted):
    for version in VERSIONS:
        shutil.copytree(STORES / f"v{version}", tmp_path, dirs_exist_ok=True)
    store = Store(tmp_path, pytest.fail)
    runs = store.runs()
    assert list(runs["schema_version"].sort_values()) == list(VERSIONS)
    if is_compacted:
        ppbench("compact", "--results", tmp_path)
    at = ("--results", tmp_path, "--format", "json")
    listed = json.loads(ppbench("ls", "--where", "launch.bind=false", *at))
    assert sorted(run["schema_version"] for run in listed) == [1, 2, 3, 4]
    for run_id in runs["run_id"]:
        shown = json.loads(inside("show", run_id, *map(str, at), folder=tmp_path))
        assert shown["run"]["run_id"] == run_id
        assert len(shown["ranks"]) == 2
    asked = "SELECT runs.schema_version v, launch_bind b, count(replica) n FROM runs"
    answer = json.loads(
        ppbench("query", f"{asked} JOIN spans USING (run_id) GROUP BY ALL ORDER BY v", *at)
    )
    spans = {
        version: len(Store(STORES / f"v{version}").table("spans", runs["run_id"]))
        for version in VERSIONS
    }
    assert answer == [{"v": v, "b": v >= 5, "n": spans[v]} for v in VERSIONS]
