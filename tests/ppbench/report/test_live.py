"""The report of a running sweep: what is written, when, and what is left when it ends."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from command import EMULATED_SWEEP
from stored_runs import run_row, store_with

from ppbench.cli.live import LiveReport
from ppbench.config.case import Case, Measure
from ppbench.config.reader import read_sweep
from ppbench.display.formats import Assets
from ppbench.run.job import Event, PlannedRun
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.run.sweep.progress import Display
from ppbench.store import Store

EMULATED = f"""{EMULATED_SWEEP}steps = 2

[grid]
schedule = ["afab", "1f1b"]
"""


def ended(index: int, run_id: str) -> Event:
    return {"event": "row", "index": index, "run_id": run_id, "status": "ok", "summary": ""}


@pytest.fixture
def report(tmp_path: Path):
    """Begin to report on a sweep, of which nothing is done; with the hook of its plan."""
    (tmp_path / "live.toml").write_text(EMULATED)
    read = read_sweep(tmp_path / "live.toml", [], "cpu")
    store = store_with(tmp_path / "results", [run_row(1, Case())])

    @contextlib.contextmanager
    def begin():
        reports = tmp_path / "reports"
        arguments = (Display(), read, reports, "ppbench sweep", Assets.inline, lambda _: None)
        with LiveReport(*arguments) as display:
            display.plans(plan_sweep(read, store, Choice()), store)
            yield display

    return begin


def test_a_page_refreshes_itself_until_the_sweep_is_stopped(report, tmp_path):
    item = PlannedRun(Case(), Measure(), 0, "key")
    with pytest.raises(KeyboardInterrupt), report() as display:
        (path,) = (tmp_path / "reports").iterdir()
        assert "No case has ended yet." in path.read_text()
        assert '<meta http-equiv="refresh"' in path.read_text()
        display.run_ids = ["before"]
        display.begin([item, item], ())
        assert "<strong>1 of 3 cases</strong>, running" in path.read_text()
        display.show({"event": "case", "index": 0, "run_id": "one"})
        stored = Store(tmp_path / "results").runs()["run_id"]
        for run_id in ("one", stored[0]):  # a second attempt is no further case
            display.show(ended(0, run_id))
            assert "<strong>2 of 3 cases</strong>, running" in path.read_text()
        assert '<meta http-equiv="refresh"' in path.read_text()
        raise KeyboardInterrupt
    assert 'id="live"' not in path.read_text()
    assert "refresh" not in path.read_text().partition("<body>")[0].partition("<style>")[0]


def test_of_a_stopped_sweep_without_an_ended_case_no_page_is_left(report, tmp_path):
    with pytest.raises(KeyboardInterrupt), report():
        raise KeyboardInterrupt
    assert list((tmp_path / "reports").iterdir()) == []
