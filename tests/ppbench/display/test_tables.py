"""Tables fit the terminal, whatever they hold, and say what they leave out."""

import json
from unittest import mock

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from stored_runs import run_row

from ppbench.config.case import Case
from ppbench.display.document import Result, render
from ppbench.display.fields import WORKLOAD
from ppbench.display.fitting import Column, fit
from ppbench.display.formats import Format
from ppbench.display.rows import Rows, View
from ppbench.display.tables import Table
from ppbench.errors import UsageError
from ppbench.store import Store

WIDTHS = (80, 100, 120)
LONG = "a message that is much longer than any terminal is wide, since somebody wrote a whole page "


def as_terminal(number):
    """Within it, tables are drawn for a terminal of that many columns."""
    return mock.patch.dict("os.environ", {"FORCE_COLOR": "1", "COLUMNS": str(number)})


def table(frame, columns=None, view=None, essential=()):
    return written(frame, Format.table, columns, view, essential)


def written(frame, how, columns=None, view=None, essential=()):
    rows = Rows.of(frame)
    shown = list(frame) if columns is None else columns
    return render(Result([Table(rows, shown, essential)], rows), how, view or View())


cells = st.one_of(
    st.none(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=150)
)
names = st.one_of(
    st.sampled_from(["run_id", "case", *WORKLOAD, "tokens_per_s", "error", "bubble_fraction"]),
    st.text("abcdefgh ijk", min_size=1, max_size=40),
)


@st.composite
def frames(draw):
    columns = draw(st.lists(names, min_size=1, max_size=12, unique=True))
    rows = draw(st.integers(0, 6))
    kinds = st.lists(cells, min_size=rows, max_size=rows)
    return pd.DataFrame({name: pd.Series(draw(kinds), dtype=object) for name in columns})


@given(frames(), st.sampled_from(WIDTHS))
def test_any_table_fits_and_no_row_is_wrapped(frame, number):
    with as_terminal(number):
        lines = table(frame).splitlines()
    assert all(cell_len(line) <= number for line in lines)
    (rule,) = [place for place, line in enumerate(lines) if set(line.strip()) == {"─"}]
    below = lines[rule + 1 :]
    note = next((n for n, line in enumerate(below) if line.startswith(" no room for ")), None)
    assert len(below[:note]) == len(frame)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.booleans()), min_size=1, max_size=15),
    st.integers(20, 150),
)
def test_what_is_laid_out_fits_and_holds_the_first_column(shapes, limit):
    columns = [
        Column(f"c{n}", "a heading of words", (width,), n, is_text, is_essential or n == 0)
        for n, (width, is_text, is_essential) in enumerate(shapes)
    ]
    layout = fit(columns, limit)
    assert layout.total <= limit
    assert layout.columns[0] is columns[0]
    kept = {column.name for column in layout.columns}
    left_out = [column for column in columns if column.name not in kept]
    if any(column.is_essential for column in left_out):
        assert all(column.is_essential for column in layout.columns)


def test_what_all_rows_share_is_said_once_above_them():
    frame = pd.DataFrame(
        {
            "run_id": ["a", "b"],
            "device": "cpu",
            "world_size": 2,
            "num_microbatches": 8,
            "bubble_fraction": [0.25, 0.5],
        }
    )
    first, *rest = table(frame).splitlines()
    assert first == " cpu, ranks 2, microbatches 8"
    assert rest[0].split() == ["run", "bubble"]
    assert rest[2].split() == ["a", "25.0", "%"]


def test_one_row_keeps_its_columns_where_there_is_room():
    frame = pd.DataFrame([{"run_id": "a", "device": "cpu", "world_size": 2}])
    assert table(frame).splitlines()[0].split() == ["run", "device", "ranks"]


def test_what_has_no_room_is_named_with_what_shows_it():
    frame = pd.DataFrame(
        [
            {"run_id": n, "commit": f"c{n}" * 9, **{f"figure_{k}": n for k in range(20)}}
            for n in "ab"
        ]
    )
    with as_terminal(80):
        text = " ".join(table(frame).split())
    assert " no room for commit, figure_" in text
    assert text.endswith("; --columns shows them")


def test_a_long_text_is_cut_before_a_column_is_left_out():
    frame = pd.DataFrame(
        {"run_id": ["a", "b"], "error": [f"{LONG}1", f"{LONG}2"], "tokens_per_s": [1, 2]}
    )
    with as_terminal(60):
        text = table(frame)
    assert "…" in text
    assert "no room" not in text


def test_columns_and_order_apply_to_every_format():
    frame = pd.DataFrame({"run_id": ["a", "b", "c"], "world_size": [2, None, 4], "loss": [1, 2, 3]})
    view = View.of(["ranks,run_id"], "-ranks")
    assert json.loads(written(frame, Format.json, ["loss"], view))["rows"] == [
        {"world_size": 4, "run_id": "c"},
        {"world_size": 2, "run_id": "a"},
        {"world_size": None, "run_id": "b"},
    ]
    assert written(frame, Format.csv, None, view).splitlines()[0] == "world_size,run_id"
    assert written(frame, Format.markdown, None, view).splitlines()[0] == "| ranks | run |"
    assert table(frame, ["loss"], view).splitlines()[2].split() == ["4", "c"]
    up = written(frame, Format.csv, None, View.of(["run_id"], "ranks"))
    assert up.splitlines() == ["run_id", "a", "c", "b"]


def test_rows_of_numbers_and_words_are_sorted_numbers_first():
    frame = pd.DataFrame({"seq_len": ["variable", 64, 8]})
    assert written(frame, Format.csv, None, View.of(None, "seq_len")).split() == [
        *("seq_len", "8", "64", "variable")
    ]


@pytest.mark.parametrize("option", ["--columns", "--sort"])
def test_an_unknown_column_suggests(option):
    frame = pd.DataFrame({"world_size": [1], "tokens_per_s": [2]})
    view = View.of(["rank"], None) if option == "--columns" else View.of(None, "-rank")
    with pytest.raises(UsageError, match=f'{option}: unknown column "rank"; did you mean "ranks"'):
        written(frame, Format.csv, None, view)


def test_a_column_is_taken_by_its_heading_too():
    frame = pd.DataFrame({"tokens_per_s": [2], "bubble_fraction": [0.5]})
    assert written(frame, Format.csv, None, View.of(["tokens/s", "Bubble"], None)).splitlines() == [
        "tokens_per_s,bubble_fraction",
        "2,0.5",
    ]


def test_ids_with_equal_ends_are_shortened_to_what_tells_them_apart(tmp_path):
    store = Store(tmp_path)
    known = ["20260101T000000001-abcdef", "20260101T000000012-abcdef", "20260101T000000002-123456"]
    for run_id in known:
        store.write_run({**run_row(1, Case()), "run_id": run_id}, {})
    short = store.short_ids(known)
    assert short[known[2]] == "123456"
    assert len(set(short.values())) == 3
    assert all(store.find(short[run_id])["run_id"] == run_id for run_id in known)
