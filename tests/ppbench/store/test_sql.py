import shutil
import subprocess
import sys

import pandas as pd
import pytest
from command import output_of

from ppbench.cli.runs import query as answer_to
from ppbench.display.formats import Format
from ppbench.errors import UsageError
from ppbench.store import TABLES
from ppbench.store.snapshot import COMPACTED
from ppbench.store.sql import query


def ask(store, text, on_skip=pytest.fail):
    return query(store.folder, text, on_skip)


def numbers_of(store, on_skip=pytest.fail):
    text = " UNION ALL ".join(f"SELECT '{t}' AS name, count(*) AS n FROM {t}" for t in TABLES)
    return dict(ask(store, text, on_skip).itertuples(index=False))


def test_every_table_is_a_view_with_the_rows_that_the_store_has(demo):
    ids = demo.runs(["run_id"])["run_id"]
    expected = {name: len(demo.table(name, ids)) for name in TABLES}
    assert numbers_of(demo) == expected
    demo.compact(pytest.fail)
    assert numbers_of(demo) == expected


def test_runs_are_each_there_once_when_a_killed_compaction_left_both_files(demo, tmp_path):
    expected = numbers_of(demo)
    shutil.copytree(demo.folder, tmp_path / "copy")
    demo.compact(pytest.fail)
    shutil.copytree(tmp_path / "copy", demo.folder, dirs_exist_ok=True)
    assert numbers_of(demo) == expected
    (path,) = (demo.folder / "spans" / COMPACTED).iterdir()
    shutil.copy(path, path.with_name("copy.parquet"))
    assert numbers_of(demo) == expected
    assert list(demo.runs()["run_id"]) == list(
        ask(demo, "SELECT run_id FROM runs ORDER BY 1")["run_id"]
    )


def test_files_that_cannot_be_read_are_named_and_the_rest_answers(demo):
    demo.compact(pytest.fail)
    runs = demo.folder / "runs"
    (runs / "x.parquet").write_bytes(b"PAR1")
    pd.DataFrame({"foo": [1]}).to_parquet(runs / COMPACTED / "y.parquet")
    (path,) = (demo.folder / "spans" / COMPACTED).iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    told = []
    found = numbers_of(demo, told.append)
    assert (found["runs"], found["spans"]) == (7, 0)
    for name in ("x.parquet", "y.parquet", path.name):
        assert sum(name in text for text in told) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
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
        "SELECT 1 AS a, 1 AS a, 'inf'::DOUBLE i, [1, 2] l, DATE '2026-01-01' d, NULL n, true b, "
        "'x' AS step_ns, {'k': 1} s"
    )
    for how in Format:
        shown = output_of(answer_to, text, demo.folder, how)
        assert "2026-01-01" in shown
        assert "step_ns" in shown
    assert output_of(answer_to, "SELECT 1 WHERE false", demo.folder, Format.json) == "[]"


def test_without_duckdb_the_command_to_install_it_is_told(demo):
    script = (
        "import sys; sys.modules['duckdb'] = None; from ppbench.cli import main; "
        f"sys.argv[1:] = ['query', 'SELECT 1', '--results', {str(demo.folder)!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    told = (
        "needs duckdb, which is not installed; install it in ppbench's folder: "
        "python -m pip install -e '.[sql]'"
    )
    assert done.stderr == f"error: query: {told}\n"
