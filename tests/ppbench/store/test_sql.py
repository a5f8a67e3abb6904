"""SQL sees the rows of the store, each run once, and can neither read nor write anything else."""

from __future__ import annotations

import json
import shutil

import pytest
from command import output_of

from ppbench.cli.runs import query as answer_to
from ppbench.display.formats import Format
from ppbench.errors import UsageError
from ppbench.store import TABLES, Store
from ppbench.store.reader import COMPACTED


def ask(store, text):
    return store.query(text)[1]


def numbers_of(store):
    text = " UNION ALL ".join(f"SELECT '{t}' AS name, count(*) AS n FROM {t}" for t in TABLES)
    return dict(ask(store, text))


def test_every_table_is_a_view_with_the_rows_that_the_store_has(demo):
    ids = demo.runs(["run_id"])["run_id"]
    expected = {name: len(demo.table(name, ids)) for name in TABLES}
    assert numbers_of(demo) == expected
    demo.compact(pytest.fail)
    assert numbers_of(demo) == expected


def test_runs_are_each_there_once_when_a_killed_compaction_left_both_files(demo, tmp_path):
    expected = numbers_of(demo)
    for name in ("runs", "spans"):
        shutil.copytree(demo.folder / name, tmp_path / "copy" / name)
    demo.compact(pytest.fail)
    for name in ("runs", "spans"):
        (path,) = (demo.folder / name / COMPACTED).iterdir()
        old = "\n".join(one.name for one in (tmp_path / "copy" / name).iterdir())
        path.with_name(f"_{path.stem}.replaces").write_text(old)
    shutil.copytree(tmp_path / "copy", demo.folder, dirs_exist_ok=True)
    assert numbers_of(demo) == expected
    path.with_name("_gone.replaces").write_text(path.name)  # its own file never came
    assert numbers_of(demo) == expected


def test_only_tables_that_are_named_are_opened(demo):
    for name in TABLES:
        if name != "runs":
            shutil.rmtree(demo.folder / name, ignore_errors=True)
            (demo.folder / name).mkdir()
            (demo.folder / name / "x.parquet").write_bytes(b"PAR1")
    store = Store(demo.folder, pytest.fail)
    assert ask(store, "SELECT count(measure_steps) AS steps FROM Runs AS spans") == [(0,)]
    with pytest.raises(UsageError, match=r"query: Binder Error: .*no_column"):
        ask(store, "SELECT no_column FROM runs")
    with pytest.raises(UsageError, match=r"query: Catalog Error: .*no_table"):
        ask(store, "SELECT * FROM no_table")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT 1; SELECT 2",
        "COPY runs TO 'out.csv'",
        "SET enable_external_access = true",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_parquet('*.parquet')",
        "SELECT error('planned')",
    ],
)
def test_what_does_not_read_the_store_is_refused(demo, text):
    with pytest.raises(UsageError, match=r"^query: "):
        ask(demo, text)


def test_answers_of_every_kind_can_be_printed(demo):
    text = (
        "SELECT 1 AS a, 1 AS a, 'inf'::DOUBLE i, [1, 2] l, DATE '2026-01-01' d, NULL::VARCHAR n, "
        "true b, 'x' AS step_ns, {'k': [0.1]} s, 1/3 AS third"
    )
    for how in Format:
        shown = output_of(answer_to, text, demo.folder, how)
        assert "2026-01-01" in shown
        assert "step_ns" in shown
        assert "0.3333333333333333" in shown
        assert "nan" not in shown
    (row,) = json.loads(output_of(answer_to, text, demo.folder, Format.json))
    assert row["l"] == [1, 2]
    assert row["s"] == {"k": [0.1]}
    assert row["n"] is None
    assert output_of(answer_to, "SELECT 1 WHERE false", demo.folder, Format.json) == "[]"
