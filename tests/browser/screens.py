"""Widths that pages are looked at, and where their pictures are kept.

PPBENCH_SCREENSHOTS names another folder for them.
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
SCREENSHOTS = Path(os.environ.get("PPBENCH_SCREENSHOTS") or Path(__file__).parent / "screenshots")


def keep(tab: Tab, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab.screenshot(SCREENSHOTS / f"{name}.png")
