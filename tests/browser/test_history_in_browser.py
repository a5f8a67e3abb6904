"""The page of a history in a real browser: commits open, by pointer and by keys, and it fits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import keep, needs_browser

from ppbench.config.case import Case

sys.path.append(str(Path(__file__).parents[1] / "ppbench"))
from histories import Runs, Told, five

from ppbench.analysis.compare import METRICS
from ppbench.analysis.history import tell
from ppbench.report.history import HistoryPage, write_history
from ppbench.tracking.series import Wanted, read_history
