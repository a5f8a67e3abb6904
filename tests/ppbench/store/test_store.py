from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from ppbench.config.case import Case
from ppbench.errors import StoreError, UsageError
from ppbench.store import (
    SCHEMA_VERSION,
    TABLES,
    Store,
    check_writable,
    columns_as_markdown,
    new_run_id,
)
from ppbench.store.parquet import as_table, row_as_table

ROOT = Path(__file__).parents[3]


def write(store, run_id, **columns):
    run = {"run_id": run_id, "status": "ok", "tokens_per_s": 1.5, "world_size": 2, **columns}
    steps = pd.DataFrame([{"step": 3, "step_ns": 10}])
    ranks = [{"rank": 0, "peak_memory_bytes": 7, "reserved_bytes": None}]
    spans = pd.DataFrame([Span(3, 0, Lane.COMPUTE, 0, Op.F, 0, 1, 2, 0)])
    tables = {name: pd.DataFrame() for name in TABLES if name != "runs"}
    some = {"steps": steps, "ranks": pd.DataFrame(ranks), "spans": spans}
    store.write_run(run, {**tables, **some})


def test_a_run_reads_back_from_every_table(tmp_path):
    store = Store(tmp_path)
    write(store, "b")
    write(store, "a", commit="c0ffee")
    assert list(store.runs()["run_id"]) == ["a", "b"]
    assert list(store.runs()["commit"].fillna("")) == ["c0ffee", ""]
    for name, column, value in (("steps", "step_ns", 10), ("spans", "end_ns", 2)):
        (row,) = store.table(name, ["a"]).to_dict("records")
        assert (row["run_id"], row["schema_version"], row[column]) == ("a", SCHEMA_VERSION, value)
    assert store.table("ranks", ["a", "b"])["peak_memory_bytes"].tolist() == [7, 7]


@pytest.mark.parametrize("value", [None, float("nan"), 3, 3.0, np.int64(3), True, 3.5, "3", ""])
@pytest.mark.parametrize("column", ["error", "world_size", "tokens_per_s", "is_finite", "seq_len"])
def test_one_row_is_converted_as_a_frame_of_rows_is(column, value):
    row = {"run_id": "a", "status": "ok", column: value}

    def converted(how):
        try:
            return how().to_pylist()
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            return type(error)

    expected = converted(lambda: as_table(pd.DataFrame([row]), "runs"))
    assert converted(lambda: row_as_table(row, "runs")) == expected


def test_files_hold_exactly_the_documented_columns(tmp_path):
    write(Store(tmp_path), "a")
    for name, columns in TABLES.items():
        schema = pq.read_schema(tmp_path / name / "a.parquet")
        assert schema.names == [column.name for column in columns]
        assert schema.types == [column.type for column in columns]


def test_a_variable_length_is_0_in_the_file_and_a_word_everywhere_else(tmp_path):
    store = Store(tmp_path)
    write(store, "a", **Case(seq_len="variable").settings())
    assert pq.read_table(tmp_path / "runs" / "a.parquet")["seq_len"].to_pylist() == [0]
    assert store.find("last")["seq_len"] == "variable"
    write(store, "b", **Case(seq_len=64).settings())
    assert list(store.runs()["seq_len"]) == ["variable", 64]


def test_the_results_readme_documents_every_column():
    assert columns_as_markdown() in (ROOT / "results" / "README.md").read_text()


def test_nothing_is_left_beside_the_files(tmp_path):
    write(Store(tmp_path), "a")
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == ["a.parquet"] * len(TABLES)


def test_a_run_that_was_killed_while_it_was_stored_leaves_no_figures_to_its_failure(tmp_path):
    store = Store(tmp_path)
    write(store, "a")
    (tmp_path / "runs" / "a.parquet").unlink()
    assert store.runs().empty  # a run exists only once its last file does
    store.write_run({"run_id": "a", "status": "interrupted"}, {"spans": pd.DataFrame()})
    assert list(store.runs()["status"]) == ["interrupted"]
    assert all(store.table(name, ["a"]).empty for name in TABLES if name != "runs")


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert Store(tmp_path / "none").runs().empty
    with pytest.raises(UsageError, match="ppbench sweep"):
        Store(tmp_path / "none").find("last")
    assert not (tmp_path / "none").exists()


def test_a_run_is_found_by_a_unique_prefix_or_as_the_last(tmp_path):
    store = Store(tmp_path)
    for run_id in ("20260101-aa", "20260101-ab", "20260202-cc"):
        write(store, run_id)
    assert store.find("last")["run_id"] == store.find("202602")["run_id"] == "20260202-cc"
    assert store.find("20260101-aa")["run_id"] == "20260101-aa"
    with pytest.raises(UsageError, match="2 runs start with it: 20260101-aa, 20260101-ab"):
        store.find("20260101")
    with pytest.raises(UsageError, match="ppbench ls"):
        store.find("x")


def test_a_file_of_another_kind_is_named_and_the_rest_is_read(tmp_path):
    store = Store(tmp_path)
    write(store, "a", launch=0)
    runs = tmp_path / "runs"
    for name, frame in (
        ("foreign", {"foo": ["x"]}),
        ("mistyped", {"run_id": ["x"], "status": ["ok"], "launch": ["first"]}),
        ("nested", {"run_id": ["x"], "status": [["ok"]]}),
    ):
        pd.DataFrame(frame).assign(schema_version=1).to_parquet(runs / f"{name}.parquet")
    problems = []
    assert list(Store(tmp_path, problems.append).runs()["run_id"]) == ["a"]
    told = [Path(problem.partition(": damaged, ")[0]).stem for problem in problems]
    assert told == ["foreign", "mistyped", "nested"]
    assert "it has no column run_id" in problems[0]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="choose another with --results DIR"):
        check_writable(tmp_path / "file" / "results", "--results")


def test_run_ids_sort_by_time_and_differ():
    ids = [new_run_id() for _ in range(20)]
    assert [i[:18] for i in ids] == sorted(i[:18] for i in ids)
    assert len(set(ids)) == 20


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_store_of_another_version_says_so_in_one_line(tmp_path, version):
    for run_id in ("a", "b"):
        write(Store(tmp_path), run_id)
        path = tmp_path / "runs" / f"{run_id}.parquet"
        rows = pq.read_table(path)
        index = rows.column_names.index("schema_version")
        pq.write_table(rows.set_column(index, "schema_version", pa.array([version])), path)
    problems = []
    with pytest.raises(StoreError, match=f"another version of ppbench wrote it .schema {version}"):
        Store(tmp_path, problems.append).runs()
    assert problems == []
