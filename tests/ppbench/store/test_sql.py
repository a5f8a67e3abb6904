"""SQL sees the rows of the store, each run once, and can neither read nor write anything else."""

from __future__ import annotations

import json
import random
import shutil

import duckdb
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


FILLED = ("runs", "steps", "ranks", "spans")
FORMS = [
    *("FROM {t}", "TABLE runs", "DESCRIBE {t}", "VALUES (1)"),
    "FROM (SUMMARIZE {t}) SELECT column_name, column_type, min, max, count",
    "SELECT count(*) FROM {t} JOIN {u} USING (run_id)",
    "SELECT count(*), min({c}), max(b.run_id) FROM {t} JOIN {u} b USING (run_id, {c})",
    "SELECT count(*) FROM {t} AS a NATURAL JOIN {u} AS b",
    "SELECT a.*, b.{c} FROM {t} a LEFT JOIN {u} b ON a.run_id = b.run_id",
    "SELECT a.run_id FROM {t} AS a ASOF JOIN {u} AS b USING ({c}, run_id)",
    "SELECT a.run_id, b.{c} FROM {t} a POSITIONAL JOIN {u} b",
    "SELECT * FROM {t} a SEMI JOIN {u} b USING (run_id) ORDER BY ALL LIMIT 3",
    "SELECT COLUMNS('.*_ns') FROM {t}",
    "SELECT max(COLUMNS(*)) FROM {t}",
    "SELECT COLUMNS(c -> c LIKE '%s%') FROM {t}",
    "SELECT * EXCLUDE ({c}) FROM {t}",
    "SELECT * REPLACE (upper(run_id) AS run_id) RENAME ({c} AS other) FROM {t}",
    "SELECT a.* EXCLUDE (run_id), n: length(a.run_id) FROM {t} AS a",
    "SELECT a FROM (SELECT run_id, {c} FROM {t}) AS a",
    "WITH runs AS (FROM {t} WHERE run_id LIKE '%1') FROM runs",
    "WITH s AS MATERIALIZED (FROM {t}) SELECT count(*) FROM s JOIN {u} USING (run_id)",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 4) FROM n, {t}",
    "SELECT run_id FROM {t} WHERE run_id IN (SELECT run_id FROM {u})",
    "SELECT run_id FROM {t} a WHERE EXISTS (FROM {u} b WHERE b.run_id = a.run_id)",
    "SELECT run_id, (SELECT max({c}) FROM {u} b WHERE b.run_id = a.run_id) FROM {t} a",
    "SELECT a.run_id, l FROM {t} a, LATERAL (SELECT length(a.run_id) AS l)",
    "SELECT run_id, row_number() OVER w FROM {t} WINDOW w AS (PARTITION BY run_id ORDER BY {c})",
    "SELECT run_id, {c} FROM {t} QUALIFY rank() OVER (PARTITION BY run_id ORDER BY {c}) = 1",
    "SELECT {c}, count(*) FROM {t} GROUP BY ALL HAVING count(*) > 1 ORDER BY ALL",
    "SELECT run_id, {c}, count(*) FROM {t} GROUP BY CUBE (run_id, {c})",
    "SELECT list_transform(list(run_id ORDER BY run_id), lambda r: r[-1]) FROM {t}",
    "SELECT [x FOR x IN list({c} ORDER BY {c}) IF x IS NOT NULL] FROM {t}",
    "FROM {t} UNION ALL BY NAME FROM {u}",
    "SELECT run_id FROM {t} EXCEPT SELECT run_id FROM {u} WHERE {c} IS NULL",
    "UNPIVOT {t} ON COLUMNS('.*_ns') INTO NAME n VALUE v",
    "PIVOT {t} ON run_id IN ('a', 'b') USING count(*)",
    "SELECT #1, #2 FROM {t}",
    'SELECT r.run_id.upper() AS "Run" FROM {t} AS "r" -- spans',
    "FROM query_table('{t}') SELECT count(*)",
    "SELECT no_such, {c} FROM {t}",
    "FROM {t} JOIN no_such USING (run_id)",
]


def filled_in(form, draw, depth=0):
    """The form with random columns and tables, some of which are other forms in brackets."""

    def table():
        if depth < 2 and draw.random() < 0.2:
            return f"({filled_in(draw.choice(FORMS), draw, depth + 1)}\n)"
        name = draw.choice(FILLED)
        return draw.choice([name, name, name.upper(), f'"{name.title()}"', f"main.{name}"])

    column = draw.choice(TABLES[draw.choice(FILLED)]).name
    return form.format(t=table(), u=table(), c=draw.choice(["run_id", column, f'"{column}"']))


def test_answers_are_those_of_duckdb_over_views_of_all_columns(demo):
    with duckdb.connect() as database:
        for name in FILLED:
            files = f"'{demo.folder}/{name}/*.parquet'"
            database.execute(f"CREATE VIEW {name} AS FROM read_parquet({files})")
        draw, num_answered = random.Random(0), 0
        for form in FORMS:
            text = filled_in(form, draw)
            try:
                expected = sorted(map(repr, database.execute(text).fetchall()))
            except duckdb.Error:
                with pytest.raises(UsageError):
                    ask(demo, text)
            else:
                assert sorted(map(repr, ask(demo, text))) == expected, text
                num_answered += 1
    assert num_answered > len(FORMS) / 2


def test_all_tables_are_there_where_none_is_named(demo):
    assert {name for (name,) in ask(demo, "SHOW TABLES")} == set(TABLES)
    assert ask(demo, "FROM query_table('ru' || 'ns') SELECT count(*)") == [(7,)]


def test_only_tables_that_are_named_are_opened(demo):
    for name in TABLES:
        if name != "runs":
            shutil.rmtree(demo.folder / name, ignore_errors=True)
            (demo.folder / name).mkdir()
            (demo.folder / name / "x.parquet").write_bytes(b"PAR1")
    store = Store(demo.folder, pytest.fail)
    assert ask(store, "SELECT count(measure_steps) AS n FROM Runs") == [(0,)]
    with pytest.raises(UsageError, match=r"query: Binder Error: .*no_column"):
        ask(store, "SELECT no_column FROM runs")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT 1; SELECT 2",
        "COPY runs TO 'out.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}/out.csv'",
        "WITH a AS (COPY (SELECT 1) TO '{store}/out.csv') FROM a",
        "PIVOT runs ON schedule",
        "SET enable_external_access = true",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_parquet('*.parquet')",
        "SELECT error('planned')",
    ],
)
def test_what_does_not_read_the_store_is_refused(demo, text):
    with pytest.raises(UsageError, match=r"^query: "):
        ask(demo, text.format(store=demo.folder))
    assert not (demo.folder / "out.csv").exists()


def test_answers_of_every_kind_can_be_printed(demo):
    text = (
        "SELECT 1 AS a, 1 AS a, 'inf'::DOUBLE i, [1, 2] l, DATE '2026-01-01' d, NULL::VARCHAR n, "
        "true b, 'x' AS step_ns, {'k': [0.1]} s, 1/3 AS third"
    )
    for how in Format:
        shown = output_of(answer_to, text, demo.folder, how=how)
        assert "2026-01-01" in shown
        assert "step_ns" in shown
        assert "0.3333333333333333" in shown
        assert "nan" not in shown
    (row,) = json.loads(output_of(answer_to, text, demo.folder, how=Format.json))["rows"]
    assert row["l"] == [1, 2]
    assert row["s"] == {"k": [0.1]}
    assert row["n"] is None
    assert (
        output_of(answer_to, "SELECT 1 WHERE false", demo.folder, how=Format.json)
        == '{\n  "rows": []\n}'
    )
