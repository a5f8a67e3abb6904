"""Widths that pages are looked at, and their pictures for whoever wants to look too.

PPBENCH_SCREENSHOTS names the folder for them. Without it none is made: one takes a second.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chromium import CHROMIUM, Tab

DESK, PHONE = 1440, 390
NEEDED = "needs a browser: apt-get install chromium"
IS_CI = os.environ.get("CI") == "true"  # which has to have one
needs_browser = pytest.mark.skipif(CHROMIUM is None and not IS_CI, reason=NEEDED)
SCREENSHOTS = os.environ.get("PPBENCH_SCREENSHOTS")


def assert_sound(tab: Tab, page: Path) -> None:
    """It reports no problem, requests nothing but itself, and is no wider than the screen."""
    assert tab.problems() == []
    assert tab.requests() == [page.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def keep(tab: Tab, name: str) -> None:
    """Write the page's picture where pictures are wanted."""
    if SCREENSHOTS:
        folder = Path(SCREENSHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        tab.screenshot(folder / f"{name}.png")
