"""The report of a running sweep in a real browser: it refreshes itself from disk, and stops."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import DESK, keep, needs_browser

from ppbench.config.case import Case
from ppbench.report.pages.live import LivePage, forget, write_live
from ppbench.report.pages.report import write_report
from ppbench.store import Store

sys.path.append(str(Path(__file__).parent.parent / "ppbench"))
from stored_runs import run_row, store_with

pytestmark = needs_browser
PATIENCE_S = 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """AFAB and 1F1B, and a failure after them: what a page of more would show is not asked here."""
    cases = Case(schedule="afab"), Case(schedule="1f1b"), Case(seq_len=512)
    rows = [run_row(n, case, resume_key=str(n)) for n, case in enumerate(cases)]
    rows[-1] |= {"status": "oom", "error": "out of memory"}
    return store_with(tmp_path_factory.mktemp("live") / "results", rows)


def until(tab: Tab, check: str) -> None:
    """Wait for something to hold on the page, which may be loading anew meanwhile."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if tab.evaluate(check):
                return
        except Exception:  # the page that was asked is gone
            if time.monotonic() > end_s:
                raise
        assert time.monotonic() < end_s, check
        time.sleep(0.2)


def test_an_open_page_shows_each_state_keeps_its_place_and_ends_with_the_sweep(
    browser: Browser, store: Store
) -> None:
    runs = store.runs()
    path = store.folder.parent / "page.html"
    page = LivePage(str(path), str(store.folder), "demo", "ppbench sweep", "text", "inline")
    write_live(page, list(runs["run_id"][:2]), "2 of 3 cases")
    tab = Tab(browser, path, DESK, "light")
    shown = "document.getElementById('live')?.textContent ?? ''"
    until(tab, f"{shown}.startsWith('2 of 3 cases, running')")
    until(tab, "document.readyState === 'complete'")
    keep(tab, "live-desk")
    box = "[...document.querySelectorAll('#filters input')].find((one) => one.value === 'afab')"
    tab.evaluate(f"{box}.click()")
    tab.evaluate("scrollTo(0, 400)")
    write_live(page, list(runs["run_id"]), "3 of 3 cases")
    until(tab, f"{shown}.startsWith('3 of 3 cases, running')")
    until(tab, "document.readyState === 'complete'")
    assert tab.evaluate(f"{box}.checked")
    until(tab, "Math.abs(scrollY - 400) < 80")
    write_report(path, store, runs, title="demo", command="ppbench sweep", sweep_text="text")
    forget(path)
    until(tab, "document.readyState === 'complete' && !document.getElementById('live')")
    names = [name.split("/")[-1].split("?")[0] for name in tab.requests()]
    assert set(names) <= {path.name, "page.live.js"}


def test_a_page_whose_sweep_was_killed_says_so_and_looks_no_more(
    browser: Browser, store: Store
) -> None:
    path = store.folder.parent / "killed.html"
    page = LivePage(str(path), str(store.folder), "demo", "ppbench sweep", "text", "inline")
    write_live(page, [], "0 cases")
    forget(path)
    tab = Tab(browser, path, DESK, "dark")
    until(
        tab,
        "document.getElementById('live').textContent === 'The sweep was stopped after 0 cases.'",
    )
