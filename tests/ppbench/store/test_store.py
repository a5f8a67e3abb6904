import itertools

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
    new_run_id,
    read_conditions,
)
from ppbench.store.parquet import as_table, row_as_table


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
        assert (row["run_id"], row[column]) == ("a", value)
    assert store.table("ranks", ["a", "b"])["peak_memory_bytes"].tolist() == [7, 7]


def test_a_setting_that_is_newer_than_a_run_had_its_default(tmp_path):
    store = Store(tmp_path)
    write(store, "old", **Case(train_momentum=0.5).settings())
    (path,) = (tmp_path / "runs").glob("*.parquet")
    newer = ["train_autocast", "train_microbatch_size", "launch_bind", "train_clip_norm"]
    pq.write_table(pq.read_table(path).drop_columns(newer), path)
    write(store, "recent", **Case(train_microbatch_size=4, launch_bind=False).settings())
    columns = [*newer, "train_momentum"]
    old, recent = store.runs(columns).to_dict("records")
    assert old == {name: getattr(Case(train_momentum=0.5), name) for name in columns}
    assert (recent["train_microbatch_size"], recent["launch_bind"]) == (4, False)


NUMBERS = ("world_size", "tokens_per_s", "is_finite", "seq_len")
CELLS = [None, float("nan"), 3, 3.0, np.int64(3), True, 3.5, ""]


@pytest.mark.parametrize(  # digits as text in a column of numbers: pandas 3 reads them, 2 does not
    ("column", "value"), [*itertools.product(("error", *NUMBERS), CELLS), ("error", "3")]
)
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
    store = Store(tmp_path, pytest.fail)
    write(store, "a")
    (tmp_path / f"schema-{SCHEMA_VERSION}").rename(tmp_path / f"schema-{version}")
    for use in (store.runs, lambda: write(store, "b")):
        with pytest.raises(
            StoreError, match=rf"another version .* wrote it .schema {version}"
        ) as e:
            use()
        assert "\n" not in str(e.value)


def test_a_length_that_varies_or_is_unknown_is_no_number(tmp_path):
    store = Store(tmp_path)
    lengths = {"a": 128, "b": "variable", "c": "unknown", "d": 2048}
    for run_id, length in lengths.items():
        write(store, run_id, seq_len=length)
    assert dict(store.runs(["run_id", "seq_len"]).itertuples(index=False)) == lengths
    text = "SELECT avg(seq_len), count(*) FILTER (seq_len <= 1024) FROM runs"
    assert store.query(text)[1] == [(1088.0, 1)]
    for words, found in (
        ("seq_len<=1024", "a"),
        ("seq_len=variable", "b"),
        ("seq_len=unknown", "c"),
        ("seq_len!=variable", "acd"),
        ("seq_len=null", "bc"),
    ):
        runs = store.listed(["run_id"], read_conditions([words]))
        assert "".join(run_id for (run_id,) in runs) == found


def test_a_column_that_no_file_has_is_null_and_a_later_one_is_not_read(tmp_path):
    store = Store(tmp_path)
    write(store, "a")
    path = tmp_path / "runs" / "a.parquet"
    rows = pq.read_table(path).drop_columns(["verified"]).append_column("new", pa.array(["x"]))
    pq.write_table(rows, path)
    runs = store.runs()
    assert runs["verified"].isna().all()
    assert "new" not in runs
    write(store, "b", verified="yes")
    assert list(store.runs()["verified"].fillna("")) == ["", "yes"]
