"""A file that does not open is named, its runs are missing, and nothing else is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from stored_runs import demo_store

from ppbench.store import TABLES, Store
from ppbench.store.snapshot import COMPACTED


def flip_a_page(path: Path) -> None:
    """Flip a bit of the last column's values, which parquet's checksum of the page tells."""
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: path.write_bytes(b""),
    "flipped": flip_a_page,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["runs", "steps"])
def test_a_run_loses_the_rows_of_its_damaged_file_alone(tmp_path, name, kind):
    store = demo_store(tmp_path)
    ids = list(store.runs(["run_id"])["run_id"])
    before = {table: store.table(table, ids) for table in TABLES}
    path = tmp_path / name / f"{ids[1]}.parquet"
    DAMAGE[kind](path)
    problems: list[str] = []
    damaged = Store(tmp_path, problems.append)
    for table, rows in before.items():
        kept = rows[rows["run_id"] != ids[1]] if table == name else rows
        found = damaged.table(table, ids)
        pd.testing.assert_frame_equal(found, kept.reset_index(drop=True), check_dtype=False)
    assert [problem.partition(": damaged, ")[0] for problem in problems] == [str(path)]
    left = [run_id for run_id in ids if name != "runs" or run_id != ids[1]]
    assert list(damaged.runs(["run_id"])["run_id"]) == left
    assert len(problems) == 1


def test_a_damaged_file_of_many_runs_costs_its_table_alone(tmp_path):
    store = demo_store(tmp_path)
    store.compact(pytest.fail)
    ids = list(store.runs(["run_id"])["run_id"])
    (path,) = (tmp_path / "steps" / COMPACTED).iterdir()
    DAMAGE["flipped"](path)
    problems: list[str] = []
    damaged = Store(tmp_path, problems.append)
    assert damaged.table("steps", ids).empty
    assert [str(path) in problem for problem in problems] == [True]
    assert len(damaged.table("spans", ids)) == len(store.table("spans", ids)) > 0
