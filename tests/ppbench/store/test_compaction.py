"""Compaction changes nothing that is read, whenever it is killed and whoever else reads."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from samples import sampled

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from ppbench.config.case import Case
from ppbench.errors import StoreError
from ppbench.store import TABLES, Store, compaction
from ppbench.store.reader import COMPACTED


def ids(num_runs, start=0):
    return [f"20260101T{number:09d}-abcdef" for number in range(start, start + num_runs)]


def fill(folder, run_ids):
    store = Store(folder)
    for run_id in run_ids:
        number = int(run_id[9:18])
        spans = [Span(1, 0, Lane.COMPUTE, 0, Op.F, m, number, number + m, 0) for m in range(3)]
        steps = pd.DataFrame([{"step": 1, "step_ns": number}])
        tables = {"steps": steps, "spans": pd.DataFrame(spans)}
        tables["flight"] = pd.DataFrame()
        run = {"run_id": run_id, "status": "ok", "step_ns": float(number), **Case().settings()}
        store.write_run(run, tables)
    return store


def contents(folder):
    store = Store(folder, pytest.fail)
    runs = store.runs()
    return {"runs": runs} | {
        name: store.table(name, runs["run_id"]) for name in TABLES if name != "runs"
    }


def assert_same(found, expected):
    for name in TABLES:
        pd.testing.assert_frame_equal(found[name], expected[name])


def files(folder, name):
    return sorted(path.name for path in (folder / name).rglob("*") if path.is_file())


def test_compacting_changes_nothing_that_is_read_and_twice_nothing_at_all(tmp_path):
    fill(tmp_path, ids(12))
    before = contents(tmp_path)
    done = {one.table: one for one in Store(tmp_path).compact(pytest.fail)}
    assert (done["runs"].files_before, done["runs"].files_after) == (12, 1)
    assert done["runs"].bytes_after < done["runs"].bytes_before
    assert (done["flight"].files_before, done["flight"].files_after) == (12, 0)  # no rows in them
    assert_same(contents(tmp_path), before)
    assert list(Store(tmp_path).table("runs", [ids(12)[3], "20260101"])["run_id"]) == [ids(12)[3]]
    names = files(tmp_path, "runs")
    Store(tmp_path).compact(pytest.fail)
    assert files(tmp_path, "runs") == names


def test_later_runs_are_merged_into_the_same_file_which_any_reader_reads(tmp_path):
    fill(tmp_path, ids(4))
    Store(tmp_path).compact(pytest.fail)
    fill(tmp_path, ids(3, start=4))
    before = contents(tmp_path)
    assert sorted(pd.read_parquet(tmp_path / "runs")["run_id"]) == ids(7)
    Store(tmp_path).compact(pytest.fail)
    assert len(files(tmp_path, "runs")) == len(files(tmp_path, "spans")) == 1
    assert_same(contents(tmp_path), before)


@pytest.mark.parametrize(("name", "value"), [("TARGET_BYTES", 3000), ("MOST_FILES", 3)])
def test_files_are_merged_up_to_a_size_and_no_run_is_cut_in_two(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(compaction, name, value)
    fill(tmp_path, ids(12))
    before = contents(tmp_path)
    Store(tmp_path).compact(pytest.fail)
    paths = sorted((tmp_path / "spans" / COMPACTED).iterdir())
    assert len(paths) > 1 if name == "TARGET_BYTES" else len(paths) == 1
    runs = [set(pq.read_table(path)["run_id"].to_pylist()) for path in paths]
    assert sum(map(len, runs)) == 12
    assert_same(contents(tmp_path), before)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_steps", sampled((0, 11, 24, 5, 18), 3))
def test_stopped_between_any_two_changes_of_the_folder_every_run_is_there_once(
    tmp_path, monkeypatch, num_steps
):
    fill(tmp_path, ids(2))
    Store(tmp_path).compact(pytest.fail)
    fill(tmp_path, ids(2, start=2))
    before = contents(tmp_path)
    left = [num_steps]

    def stopping(change):
        def changed(path, *args, **more):
            if left[0] == 0 and tmp_path in path.parents:
                raise Killed
            left[0] -= tmp_path in path.parents
            return change(path, *args, **more)

        return changed

    with monkeypatch.context() as patch:
        for name in ("unlink", "replace", "mkdir"):
            patch.setattr(Path, name, stopping(getattr(Path, name)))
        with pytest.raises(Killed):
            Store(tmp_path).compact(pytest.fail)
    assert_same(contents(tmp_path), before)
    (tmp_path / "runs" / COMPACTED / ".begun.parquet").touch()  # as if killed while it wrote
    Store(tmp_path).compact(pytest.fail)
    assert_same(contents(tmp_path), before)
    assert len(files(tmp_path, "runs")) == 1


def test_reading_and_writing_go_on_while_two_compact(tmp_path):
    fill(tmp_path, ids(6))
    stop = threading.Event()
    written = ids(6)
    problems = []

    def write():
        for run_id in ids(10, start=6):
            fill(tmp_path, [run_id])
            written.append(run_id)
        stop.set()

    def read():
        while not stop.is_set():
            least = set(written)
            found = list(Store(tmp_path, problems.append).runs(["run_id"])["run_id"])
            spans = Store(tmp_path, problems.append).table("spans", sorted(least))
            if len(found) != len(set(found)) or least - set(found) or len(spans) != 3 * len(least):
                problems.append(f"{len(least)} written, {len(found)} found, {len(spans)} spans")

    def merge():
        while not stop.is_set():
            Store(tmp_path).compact(lambda _waiting: None)

    threads = [threading.Thread(target=work) for work in (write, read, read, merge, merge)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert problems == []
    assert list(Store(tmp_path).runs()["run_id"]) == ids(16)


def test_what_cannot_be_merged_or_is_being_written_is_left_alone(tmp_path):
    fill(tmp_path, ids(5))
    runs = tmp_path / "runs"
    (runs / f"{ids(5)[1]}.parquet").write_bytes(b"PAR1 nonsense")
    (runs / f"{ids(5)[4]}.parquet").unlink()  # as if its row were still to come
    shutil.copy(tmp_path / "spans" / f"{ids(5)[3]}.parquet", tmp_path / "spans" / "other.parquet")
    told = []
    Store(tmp_path).compact(told.append)
    assert [path.name for path in runs.glob("*.parquet")] == [f"{ids(5)[1]}.parquet"]
    left = [path.name for path in (tmp_path / "spans").glob("*.parquet")]
    assert sorted(left) == [f"{ids(5)[1]}.parquet", f"{ids(5)[4]}.parquet", "other.parquet"]
    assert [ids(5)[1] in text for text in told] == [True]
    assert list(Store(tmp_path, told.append).runs()["run_id"]) == [ids(5)[n] for n in (0, 2, 3)]


def test_compacting_a_folder_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        Store(tmp_path / "none").compact(pytest.fail)
    assert not (tmp_path / "none").exists()
