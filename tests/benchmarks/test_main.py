"""`python -m benchmarks`: what it says as benchmarks end, and that one failure stops no other."""

import io
import subprocess
import sys

from rich.console import Console

from benchmarks.__main__ import Ended, _run_all
from benchmarks.surroundings import ROOT


def test_a_failure_is_told_with_its_last_lines_and_the_next_one_runs(tmp_path):
    text = io.StringIO()
    failed = _run_all(["no_such_one", "nor_this"], Console(file=text, width=200), tmp_path, 0)
    assert failed == ["no_such_one", "nor_this"]
    lines = text.getvalue().splitlines()
    assert lines[0] == "no_such_one ..."
    assert lines[1].endswith("FAILED with exit code 1")
    assert "No module named benchmarks.no_such_one" in lines[2]
    assert lines[3] == "nor_this ..."


def test_the_time_of_a_run_is_in_minutes_and_seconds():
    assert Ended("store", 125.4, 2, "").in_words().split()[:2] == ["store", "2:05"]


def test_an_unknown_benchmark_is_wrong_usage():
    command = [sys.executable, "-m", "benchmarks", "--only", "nosuch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'nosuch'" in done.stderr
