"""The report of a running sweep: what is written, by whom, and what is left when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stored_runs import demo_store

from engine.flight import Phase
from ppbench.cli.live import ReportingDisplay
from ppbench.config.case import Case, Measure
from ppbench.report.pages.live import (
    LivePage,
    LiveReport,
    _newest_lines,
    beside,
    forget,
    write_live,
    write_stopped,
)
from ppbench.run.job import PlannedRun
from ppbench.run.sweep.progress import Display
from ppbench.store import Store

PATIENCE_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return demo_store(tmp_path / "results")


@pytest.fixture
def page(tmp_path: Path, store: Store) -> LivePage:
    path = tmp_path / "reports" / "demo-s.html"
    return LivePage(
        str(path), str(store.folder), "demo", "ppbench sweep demo.toml", "text", "inline"
    )


def until(check, patience_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_live_page_says_how_far_the_sweep_is_and_the_file_beside_it_when_it_was_written(
    store, page
):
    path = Path(page.path)
    write_live(page, [], "0 cases")
    assert "No case has ended yet." in path.read_text()
    write_live(page, list(store.runs()["run_id"][:2]), "2 of 7 cases")
    text = path.read_text()
    assert "<strong>2 of 7 cases</strong>, running" in text
    assert "script-src 'unsafe-inline' &#39;self&#39; file:;" in text
    stamp = json.loads(beside(path).read_text().removeprefix("ppbenchLive(").removesuffix(");\n"))
    assert f'data-stamp="{stamp}"' in text
    write_stopped(page, list(store.runs()["run_id"][:2]))
    assert 'id="live"' not in path.read_text()
    assert not beside(path).exists()
    forget(path)


def test_of_a_stopped_sweep_without_an_ended_case_no_page_is_left(page):
    write_live(page, [], "0 cases")
    write_stopped(page, [])
    assert list(Path(page.path).parent.iterdir()) == []


def test_states_that_have_passed_are_left_out():
    reading, writing = os.pipe()
    os.write(writing, b"page\n1\n2\n3")
    lines = _newest_lines(reading)
    assert [next(lines), next(lines)] == ["page", "2"]
    os.write(writing, b"3\n4\n")
    assert next(lines) == "4"
    os.close(writing)
    assert list(lines) == []
    os.close(reading)


def test_the_process_writes_with_the_lowest_priority_and_not_while_it_is_held(store, page):
    ids, path = list(store.runs()["run_id"]), Path(page.path)
    report = LiveReport(page)
    report.show(ids[:1], "1 of 7 cases")
    until(path.exists)
    assert os.getpriority(os.PRIO_PROCESS, report._process.pid) == 19
    until(lambda: report.hold() or report._is_held)
    before = path.stat().st_mtime_ns
    report.show(ids[:2], "2 of 7 cases")
    status = Path(f"/proc/{report._process.pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    assert path.stat().st_mtime_ns == before
    report.close()  # what was asked for is written all the same
    assert "2 of 7 cases" in path.read_text()
    assert report._process.returncode == 0


def test_the_process_ends_with_a_sweep_that_is_killed_and_the_last_page_is_whole(page, tmp_path):
    program = (
        "import dataclasses, json, sys, time\n"
        "from ppbench.report.pages.live import LivePage, LiveReport, write_live\n"
        "page = LivePage(**json.loads(sys.argv[1]))\n"
        "write_live(page, [], '0 cases')\n"
        "report = LiveReport(page)\n"
        "while not report._is_held:\n"
        "    report.hold()\n"
        "    time.sleep(0.1)\n"
        "print(report._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, json.dumps(page.__dict__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sweep:
        pid = int(sweep.stdout.readline())
        sweep.kill()
    until(lambda: not _is_alive(pid))
    assert Path(page.path).read_text().rstrip().endswith("</html>")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Noted:
    """Stands for the process: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def show(self, run_ids, done) -> None:
        self.told.append(f"show {len(run_ids)}: {done}")

    def hold(self) -> None:
        self.told.append("hold")

    def go_on(self) -> None:
        self.told.append("go on")


def test_the_page_is_written_between_cases_and_held_while_something_is_measured(store):
    item = PlannedRun(Case(), Measure(), 0, "key")
    noted = Noted()
    display = ReportingDisplay(Display(), noted, ["before"])
    display.begin([item, item], ())
    display.case_begins(0)
    for phase in (Phase.CONNECTS, Phase.BUILDS, Phase.PEAK):
        display.phase_begins(phase)
    display.step_ends(1, 2, 1.0, 1.0)
    display.phase_begins(Phase.STORES)
    display.case_ends(0, "ok", "one", "")
    assert noted.told == [
        "show 1: 1 of 3 cases",
        *("go on", "go on", "go on", "hold", "hold", "go on", "go on"),
        "show 2: 2 of 3 cases",
    ]
    assert display.run_ids == ["before", "one"]
