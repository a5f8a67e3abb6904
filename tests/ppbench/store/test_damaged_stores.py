"""A file that does not open is named, its runs are missing, and nothing else is lost."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from command import printed
from damage import damaged_bytes
from samples import sampled
from stored_runs import demo_store

from ppbench.store import TABLES, Store
from ppbench.store.reader import COMPACTED


@pytest.mark.parametrize(
    ("name", "size"), sampled([("runs", 10), ("steps", 0), ("steps", 2000)], 2)
)
def test_a_run_loses_the_rows_of_its_damaged_file_alone(tmp_path, name, size):
    store = demo_store(tmp_path)
    ids = list(store.runs(["run_id"])["run_id"])
    before = {table: store.table(table, ids) for table in TABLES}
    path = tmp_path / name / f"{ids[1]}.parquet"
    os.truncate(path, size)
    problems: list[str] = []
    damaged = Store(tmp_path, problems.append)
    for _ in range(2):
        for table, rows in before.items():
            kept = rows[rows["run_id"] != ids[1]] if table == name else rows
            assert list(damaged.table(table, ids)["run_id"]) == list(kept["run_id"])
    assert [problem.partition(": damaged, ")[0] for problem in problems] == [str(path)]
    assert damaged.damaged == problems
    left = [run_id for run_id in ids if name != "runs" or run_id != ids[1]]
    assert list(damaged.runs(["run_id"])["run_id"]) == left


def test_a_damaged_file_of_many_runs_costs_its_table_alone(tmp_path):
    store = demo_store(tmp_path)
    store.compact(pytest.fail)
    ids = list(store.runs(["run_id"])["run_id"])
    (path,) = (tmp_path / "steps" / COMPACTED).iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    problems: list[str] = []
    damaged = Store(tmp_path, problems.append)
    assert damaged.table("steps", ids).empty
    assert len(damaged.table("ranks", ids)) == len(store.table("ranks", ids))
    assert len(problems) == 1


def test_a_file_of_another_kind_is_named_and_the_last_run_is_the_last_readable(tmp_path):
    store = demo_store(tmp_path)
    ids = list(store.runs(["run_id"])["run_id"])
    path = tmp_path / "runs" / f"{ids[-1]}.parquet"
    path.write_bytes((tmp_path / "ranks" / f"{ids[0]}.parquet").read_bytes()[:-3] + b"XYZ")
    problems: list[str] = []
    assert Store(tmp_path, problems.append).find("last")["run_id"] == ids[-2]
    assert len(problems) == 1


def damage(draw: random.Random, folder: Path) -> Path:
    """Harm one file of a store as a disk or a hand may: damage or remove it."""
    path = draw.choice(sorted(folder.glob("*/**/*.parquet")))
    if draw.random() < 0.25:
        path.unlink()
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), draw))
    return path


def check(draw: random.Random, whole: Path, folder: Path) -> None:
    """Damage a copy of a store; every other run is still listed, shown and counted."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    path = damage(draw, folder)
    problems: list[str] = []
    store, every = Store(folder, problems.append), Store(whole).runs(["run_id"])["run_id"]
    asked = Store(folder, lambda _: None).query("SELECT max(COLUMNS(*)), count(*) FROM runs")[1][0]
    rows = store.runs()
    is_of_many = path.parent.name == COMPACTED
    left = {run_id for run_id in every if run_id != path.stem and not is_of_many}
    assert left <= set(rows["run_id"])
    assert set(store.runs(["run_id", "status"])["run_id"]) >= left
    for name in TABLES:
        store.table(name, every)
    assert asked[-1] >= len(left)
    assert store.query("SELECT count(*) FROM runs")[1][0][0] >= len(left)
    assert all(str(path) in problem for problem in problems)
    assert len(problems) <= 1


@pytest.mark.parametrize(
    "seed",
    sampled((349, *range(349), *range(350, 1000)), 3),  # the first ends a whole database of DuckDB
)
def test_whatever_happens_to_a_file_all_other_runs_are_shown(tmp_path_factory, seed):
    place = tmp_path_factory.getbasetemp()
    if not (place / "own").exists():
        demo_store(place / "own")
        demo_store(place / "many").compact(pytest.fail)
    draw = random.Random(seed)
    check(draw, place / draw.choice(["own", "many"]), place / "damaged")


def test_commands_name_a_damaged_file_and_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo_store(tmp_path / "results")
    path = min((tmp_path / "results" / "runs").glob("*.parquet"))
    os.truncate(path, 100)
    for command in (["ls"], ["show", "last"], ["query", "SELECT count(*) FROM runs"]):
        done = printed(*command)
        assert done.exit_code == 0, done.notes
        (note,) = (note for note in done.notes if ": damaged, " in note)
        assert path.name in note
