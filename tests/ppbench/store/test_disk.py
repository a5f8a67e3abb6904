"""Disks that take nothing: real ones, mounted for the test where that is permitted."""

import os
import subprocess

import pandas as pd
import pytest
from disks import mounted

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from ppbench.errors import StoreError
from ppbench.store import Store, check_writable


@pytest.fixture
def small(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as place:
        yield place


@pytest.fixture
def read_only(tmp_path):
    with mounted(tmp_path / "read_only", "size=32m") as place:
        write(Store(place), "a")
        write(Store(place), "b")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=60)
        yield place


def write(store, run_id, num_spans=10):
    spans = [
        Span(1, 0, Lane.COMPUTE, 0, Op.F, m, m * m % 7919, m * m % 7907, 0)
        for m in range(num_spans)
    ]
    tables = {"spans": pd.DataFrame(spans)}
    store.write_run({"run_id": run_id, "status": "ok", "error": os.urandom(20_000).hex()}, tables)


def test_a_disk_with_little_room_is_refused_before_a_sweep(small):
    with pytest.raises(StoreError, match=r"has 1\.0 MiB left; a sweep needs at least 16\.0 MiB"):
        check_writable(small, "--results")


def test_on_a_disk_that_fills_up_each_run_is_there_wholly_or_an_error(small):
    store = Store(small, pytest.fail)
    stored = []
    with pytest.raises(StoreError, match="No space left on device"):
        for number in range(100):
            write(store, f"{number:03}")
            stored.append(f"{number:03}")
    assert stored
    assert list(store.runs()["run_id"]) == stored
    assert sorted(path.stem for path in (small / "spans").iterdir()) == stored  # no remains
    with pytest.raises(StoreError, match="No space left on device"):
        (small / "filler").write_bytes(b"")
        write(store, "more", num_spans=200_000)
    assert list(store.runs()["run_id"]) == stored


def test_a_read_only_store_is_read_and_refuses_to_be_written(read_only):
    store = Store(read_only, pytest.fail)
    assert list(store.runs()["run_id"]) == ["a", "b"]
    with pytest.raises(
        StoreError, match="Read-only file system; choose another with --results DIR"
    ):
        check_writable(read_only, "--results")
    with pytest.raises(StoreError, match="cannot be written: Read-only file system"):
        write(store, "c")
    with pytest.raises(StoreError, match="cannot be locked: Read-only file system"):
        store.compact(pytest.fail)
    assert len(store.table("spans", ["a", "b"])) == 20
