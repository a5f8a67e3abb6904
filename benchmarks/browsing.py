"""The headless Chromium of the browser tests, to time how pages open in it."""

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
    """Opens pages in one browser."""
    if CHROMIUM is None:
        sys.exit("Chromium was not found; install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        yield lambda page: Tab(browser, page, WIDTH)


def number_of(tab: Tab, script: str) -> float:
    return float(str(tab.evaluate(script)))


def drawn_ms(tab: Tab, is_drawn: str) -> float:
    """From the start of navigation until the screen has what the expression asks for."""
    return number_of(tab, DRAWN % is_drawn)


def close(tab: Tab) -> None:
    """Raises if the page complained of anything."""
    assert tab.problems() == []
    tab.close()
