"""The catalogue of figures is complete, and tables made from it fit a page."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from ppbench import explanation
from ppbench.cli import export, models, runs, schedules, simulate, sweep
from ppbench.commits.noise import NUM_LAUNCHES
from ppbench.config.case import Case, Measure, settings_in
from ppbench.config.toml import column_named
from ppbench.display.fields import DISPENSABLE, FIELDS, Direction, field_of, figure
from ppbench.display.metrics import METRICS, metric_of
from ppbench.display.rows import Rows
from ppbench.display.tables import PAGE_WIDTH, Table
from ppbench.report.pages import history as history_page
from ppbench.report.pages import tables
from ppbench.store import TABLES
from ppbench.store.columns import COMPUTED, SQL_TYPES

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "ppbench" / "recorded"
SETTING_NAMES = {column_named(one.key) for one in (*settings_in(Case), *settings_in(Measure))}
LISTED = {
    "ls": runs.LISTED,
    "compact": runs.COMPACTED,
    "show, ranks": runs.RANK_COLUMNS,
    "show, memory": runs.MEMORY_COLUMNS,
    "show, machine": runs.MACHINE_COLUMNS,
    "show, GPU": runs.GPU_COLUMNS,
    "show, steps": runs.STEP_COLUMNS,
    "explain, parts": explanation.PART_COLUMNS,
    "explain, messages": explanation.EDGE_COLUMNS,
    "explain, what if": explanation.WHAT_IF_COLUMNS,
    "export": export.RUN_COLUMNS,
    "history, series": history_page.SERIES,
    "history, changes": history_page.STEPS,
    "models check": models.COLUMNS,
    "schedules list": schedules.COLUMNS,
    "simulate": simulate.COMPARED,
    "sweep": sweep.FIGURES,
    "report": tables.SUMMARY,
    "report, bubbles": tables.BUBBLES,
    "report, parts": tables.PARTS,
}


@pytest.mark.parametrize("listing", LISTED)
def test_every_listed_column_is_in_the_catalogue(listing: str) -> None:
    assert [name for name in LISTED[listing] if name not in FIELDS] == []


def test_every_recorded_heading_is_in_the_catalogue() -> None:
    stored = {column.name for columns in TABLES.values() for column in columns}
    known = {field_of(name).heading for name in {*FIELDS, *SETTING_NAMES, *stored}}
    headings = {
        heading: file.name
        for file in sorted(RECORDED.glob("*/*.txt"))
        if not file.name.startswith(("query", "compare-across"))  # headed by what was asked
        for header in re.findall(r"^\| (.*) \|\n\|(?:---:?\|)+$", file.read_text(), re.MULTILINE)
        for heading in header.split(" | ")
    }
    assert len(headings) > 50
    assert {heading: name for heading, name in headings.items() if heading not in known} == {}


def test_every_column_has_a_meaning_and_one_look() -> None:
    stored = {column.name for columns in TABLES.values() for column in columns}
    computed = [column.name for columns in COMPUTED.values() for column in columns]
    assert len(computed) == len(set(computed))
    assert stored & set(computed) == {"source"}  # of a message, and of a schedule
    assert [name for name, field in FIELDS.items() if not field.meaning] == []
    for columns in TABLES.values():
        for column in columns:
            if column.name != "source":
                assert (column.heading, column.digits) == (
                    FIELDS[column.name].label,
                    FIELDS[column.name].digits,
                )
    assert {column.type for columns in TABLES.values() for column in columns} == set(SQL_TYPES)
    assert set(DISPENSABLE) <= FIELDS.keys()
    assert (
        DISPENSABLE.index("created_at") < DISPENSABLE.index("commit") < DISPENSABLE.index("error")
    )


@pytest.mark.parametrize("listing", sorted({*LISTED} - {"ls", "export", "history, changes"}))
def test_headings_leave_room_for_the_values(listing: str) -> None:
    columns = [name for name in LISTED[listing] if not name.startswith("gpu_") or "GPU" in listing]
    frame = pd.DataFrame([dict.fromkeys(columns, 0)])
    lines = Table(Rows.of(frame), columns).terminal().splitlines()
    assert max(map(len, lines)) <= PAGE_WIDTH


def test_a_table_wraps_its_headings_and_never_its_cells() -> None:
    frame = pd.DataFrame({"makespan_ns": [1e6], "error": ["x " * 40]})
    wide = Table(Rows.of(frame), ["makespan_ns", "error"]).terminal()
    assert "x " * 39 in wide
    narrow = Table(Rows.of(frame), ["makespan_ns"]).terminal()
    assert "makespan (ms)" in narrow
    long = [name for name, field in FIELDS.items() if len(field.heading) > 15 and field.digits][:8]
    many = Table(Rows.of(pd.DataFrame([dict.fromkeys(long, 0.0)])), long).terminal().splitlines()
    assert max(map(len, many)) <= PAGE_WIDTH < sum(len(FIELDS[name].heading) for name in long)


@pytest.mark.parametrize(
    ("column", "value", "cell", "text"),
    [
        ("step_ns", 58_123_456, "58.1", "58.1 ms"),
        ("tokens_per_s", 1234.5, "1,234", "1,234 tokens/s"),
        ("bubble_fraction", 0.2501, "25.0 %", "25.0 %"),
        ("peak_memory_bytes", 3 * 2**30, "3,072.0", "3.00 GiB"),
        ("clock_error_ns", 1500, "1.5", "1.5 µs"),
        ("model_residual", -0.0001, "+0.0 %", "+0.0 %"),
        ("stages_per_rank", "any", "any", None),
        ("unheard_of", 12.3456789, "12.3456789", "12.346"),
        ("mfu", None, None, "–"),
    ],
)
def test_a_figure_is_written_in_its_unit(column, value, cell, text) -> None:
    if cell is not None:
        assert field_of(column).cell(value) == cell
    if text is not None:
        assert figure(column, value) == text


def test_a_detectable_change_is_headed_by_the_launches_that_detect_it() -> None:
    assert FIELDS["detectable_change"].heading == f"detectable ({NUM_LAUNCHES} launches)"


def test_directions_decide_what_is_better() -> None:
    assert {name: metric.higher_is_better for name, metric in METRICS.items()} == {
        "tokens_per_s": True,
        "bubble_fraction": False,
        "peak_memory_bytes": False,
        "step_ns": False,
    }
    assert [name for name, metric in METRICS.items() if metric.in_points] == ["bubble_fraction"]
    assert metric_of("mfu").higher_is_better is True
    assert metric_of("num_parameters").higher_is_better is None
    assert {field.direction for field in FIELDS.values()} == set(Direction)
