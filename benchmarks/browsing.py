"""Times how pages open, in the headless Chromium of the browser tests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.surroundings import ROOT

sys.path.append(str(ROOT / "tests" / "browser"))
from chromium import CHROMIUM, Browser, Tab

WIDTH = 1440
DRAWN = """(async () => {
  while (!(%s)) await new Promise((done) => setTimeout(done, 1));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now();
})()"""

Visit = Callable[[Path], Tab]


@contextmanager
def opened_browser() -> Iterator[Visit]:
    """Yield a function that opens pages, all in the same browser."""
    if CHROMIUM is None:
        sys.exit("Chromium was not found; install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        yield lambda page: Tab(browser, page, WIDTH)


def number_of(tab: Tab, script: str) -> float:
    return float(str(tab.evaluate(script)))


def drawn_ms(tab: Tab, is_drawn: str) -> float:
    """Milliseconds from the start of navigation until the expression is true of the page drawn."""
    return number_of(tab, DRAWN % is_drawn)


def close(tab: Tab) -> None:
    """Close a page; raises if it reported any problem."""
    assert tab.problems() == []
    tab.close()
