"""A store that is not there is one error, whichever command asks."""

import shlex

import pytest
from recordings import ppbench

READERS = [
    "ls", "ls --format json", "ls --where status=ok", "query 'SELECT 1'", "compact", "show last",
    "explain last", "report", "report x", "timeline last", "timeline last --terminal",
    "trace last", "export --format csv", "export --format bencher", "figure throughput -o f.json",
    "history", "compare a b", "compare --across schedule", "check",
]  # fmt: skip


@pytest.mark.parametrize("words", READERS)
def test_a_missing_store_is_the_same_error_for_every_command(words, tmp_path):
    done = ppbench([*shlex.split(words), "--results", "none/of/this"], tmp_path)
    assert done.stdout == ""
    assert done.stderr == "error: none/of/this: no runs here yet; start with: ppbench sweep FILE\n"
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", ["ls", "show last", "report", "timeline last", "export --format csv"]
)
def test_so_is_a_store_without_runs(words, tmp_path):
    (tmp_path / "results").mkdir()
    done = ppbench(shlex.split(words), tmp_path)
    assert done.stderr == "error: results: no runs here yet; start with: ppbench sweep FILE\n"
    assert done.exit_code == 2


def test_an_unknown_figure_is_named_with_all_others_before_anything_else(tmp_path):
    (tmp_path / "results").mkdir()
    done = ppbench(["figure", "nosuch"], tmp_path)
    assert done.stderr.startswith('error: figure: unknown "nosuch". Known: timeline, ')
    close = ppbench(["figure", "throughputs"], tmp_path)
    assert 'did you mean "throughput"' in close.stderr


def test_an_unknown_schedule_suggests(tmp_path):
    assert 'did you mean "1f1b"' in ppbench(["schedules", "draw", "1f1v"], tmp_path).stderr
    done = ppbench(["schedules", "draw", "nosuch"], tmp_path)
    assert done.stderr.startswith('error: unknown schedule "nosuch". Known: afab, 1f1b, ')
