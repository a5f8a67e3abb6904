"""A report of many runs: its timelines are drawn by a second process, and the page is the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from command import ppbench
from stored_runs import run_row, store_with

from ppbench.config.case import Case
from ppbench.report.pages import beside
from ppbench.report.pages.beside import LEAST_RUNS
from ppbench.report.pages.report import report_runs
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")


def test_a_second_process_draws_the_same_timelines_and_tells_of_damage_once(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = [Case(num_microbatches=2 + n) for n in range(LEAST_RUNS)]
    rows = [run_row(n, case, resume_key=f"{n}") for n, case in enumerate(cases)]
    store_with(tmp_path / "results", rows)
    damaged, *_ = sorted((tmp_path / "results" / "spans").glob("*.parquet"))
    damaged.write_bytes(b"PAR1")
    done = ppbench("report", "-o", "other.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(damaged.name) == 1
    page = (tmp_path / "other.html").read_text("utf-8")
    assert page.count("application/x-ppbench-figure") >= LEAST_RUNS - 1
    assert f"{damaged.name}: damaged" in page
    store = Store(Path("results"))
    with_threads = report_runs(store, [], tmp_path / "this.html", tmp_path / "reports")
    assert with_threads.read_text("utf-8") == page
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(beside, "_draw", end_at_once)
    after_a_kill = report_runs(store, [], tmp_path / "killed.html", tmp_path / "reports")
    assert after_a_kill.read_text("utf-8") == page


def end_at_once(*_: object) -> None:
    """As a process that the kernel kills."""
    os._exit(9)
