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
