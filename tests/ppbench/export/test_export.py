"""Tables written out of the store, read back by other means."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from command import output_of
from stored_runs import NASTY, run_row, store_with

from ppbench.cli.export import export
from ppbench.config.case import Case
from ppbench.display.formats import ExportFormat
from ppbench.display.rows import Rows
from ppbench.display.tables import Table
from ppbench.store import RUNS, SPANS, TABLES, Store

pytestmark = pytest.mark.usefixtures("warm_starts")


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_every_column_of_every_run_raw(demo: Store) -> None:
    found = rows(output_of(export, ExportFormat.csv, [], "runs", None, demo.folder))
    assert list(found[0]) == [column.name for column in RUNS]
    assert [row["run_id"] for row in found] == list(demo.runs()["run_id"])
    assert (found[1]["step_ns"], found[1]["peak_memory_bytes"]) == ("56000000", "209715200")
    assert found[-1]["error"] == NASTY + "\nline two"


def test_markdown_has_chosen_columns_with_units_in_their_headings(demo: Store) -> None:
    text = output_of(export, ExportFormat.markdown, [], "runs", None, demo.folder)
    head, _, *rows = text.splitlines()
    headings = [heading.strip() for heading in head.strip("|").split("|")]
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    told = dict(zip(headings, cells, strict=True))
    assert (told["schedule"], told["ranks"], told["tokens/s"]) == ("afab", "1", "600")
    assert (told["step (ms)"], told["peak (MiB)"], told["bubble"]) == ("56.0", "100.0", "25.0 %")
    columns = zip(*(row.strip("|").split("|") for row in rows), strict=True)
    assert all(any(cell.strip() for cell in column) for column in columns)  # none is empty


def test_a_cell_of_markdown_is_one_line_of_text() -> None:
    frame = pd.DataFrame({"account": ["<b>a|b</b>\r\nR&D &lt;"]})
    last = Table(Rows.of(frame), ["account"]).markdown().splitlines()[-1]
    assert last == "| &lt;b>a\\|b&lt;/b> R&amp;D &amp;lt; |"


def test_parquet_has_the_types_that_the_store_documents(demo: Store, tmp_path: Path) -> None:
    path = tmp_path / "out" / "spans.parquet"
    assert output_of(export, ExportFormat.parquet, [], "spans", path, demo.folder) == str(path)
    table = pq.read_table(path)
    assert {field.name: field.type for field in table.schema} == {c.name: c.type for c in SPANS}
    assert table.num_rows == 6 * 3 * 10  # ok runs, steps, actions of a step


def test_parquet_keeps_a_variable_length(tmp_path: Path) -> None:
    case = replace(Case(), seq_len="variable")
    store = store_with(tmp_path / "results", [run_row(1, case), run_row(2, Case())])
    output_of(export, ExportFormat.parquet, [], "runs", tmp_path / "runs.parquet", store.folder)
    assert pq.read_table(tmp_path / "runs.parquet")["seq_len"].to_pylist() == [None, 128]
    text = output_of(export, ExportFormat.csv, [], "runs", None, store.folder)
    assert [row["seq_len"] for row in rows(text)] == ["variable", "128"]


def test_named_runs_alone_are_written_in_their_order(demo: Store, tmp_path: Path) -> None:
    ids = list(demo.runs()["run_id"])
    text = output_of(export, ExportFormat.csv, [ids[4], ids[1]], "ranks", None, demo.folder)
    assert [row["run_id"] for row in rows(text)] == [ids[4]] * 2 + [ids[1]] * 2
    path = tmp_path / "two.parquet"
    output_of(export, ExportFormat.parquet, [ids[4], ids[1]], "runs", path, demo.folder)
    assert pq.read_table(tmp_path / "two.parquet")["run_id"].to_pylist() == [ids[4], ids[1]]


def test_every_table_can_be_written_in_every_format(
    demo: Store, tmp_path: Path, is_thorough: bool
) -> None:
    formats = [ExportFormat.csv, ExportFormat.parquet, ExportFormat.markdown]
    for number, table in enumerate(TABLES):
        every = is_thorough or table == "runs"
        for how in formats if every else [formats[number % 3]]:
            path = tmp_path / f"{table}.{how.value}"
            output_of(export, how, [], table, path, demo.folder)
            assert path.stat().st_size > 0, (table, how)


def test_a_file_has_what_would_be_printed(demo: Store, tmp_path: Path) -> None:
    text = output_of(export, ExportFormat.csv, [], "steps", None, demo.folder)
    path = tmp_path / "steps.csv"
    assert output_of(export, ExportFormat.csv, [], "steps", path, demo.folder) == str(path)
    assert path.read_text() == text + "\n"
    assert len(pd.read_csv(path)) == 6 * 3
