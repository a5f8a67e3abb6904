"""The report of a running sweep in a real browser: it refreshes itself from disk, and stops."""

from __future__ import annotations

import contextlib

import pytest
from chromium import Browser, Tab
from processes import wait_until
from screens import DESK, needs_browser
from stored_runs import run_row, store_with

from ppbench.config.case import Case
from ppbench.report.pages.report import render_report
from ppbench.report.pages.templates import Live, write_page
from ppbench.store import Store

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

    def holds() -> bool:
        with contextlib.suppress(Exception):  # the page that was asked is gone
            return bool(tab.evaluate(check))
        return False

    wait_until(holds, check, PATIENCE_S, every_s=0.2)


def test_an_open_page_shows_the_next_state_keeps_its_place_and_ends_with_the_sweep(
    browser: Browser, store: Store
) -> None:
    runs = store.runs()
    path = store.folder.parent / "page.html"

    def write(num: int, live: Live | None) -> None:
        facts = {"title": "demo", "command": "ppbench sweep", "sweep_text": "text"}
        write_page(path, render_report(store, runs.head(num), **facts, live=live))

    write(2, Live("2 of 3 cases", "10:00:00"))
    tab = Tab(browser, path, DESK, "light")
    shown = "document.getElementById('live')?.textContent ?? ''"
    until(tab, f"{shown}.startsWith('2 of 3 cases, running')")
    until(tab, "document.readyState === 'complete'")
    box = "[...document.querySelectorAll('#filters input')].find((one) => one.value === 'afab')"
    tab.evaluate(f"{box}.click()")
    tab.evaluate("scrollTo(0, 400)")
    write(3, None)
    until(tab, "document.readyState === 'complete' && !document.getElementById('live')")
    assert tab.evaluate(f"{box}.checked")
    until(tab, "Math.abs(scrollY - 400) < 80")
    assert {name.split("/")[-1].split("?")[0] for name in tab.requests()} <= {path.name}
