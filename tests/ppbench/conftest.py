"""A store with a few runs in it, for whatever reads one."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_runs import demo_store

from ppbench.store import Store


@pytest.fixture
def demo(tmp_path: Path) -> Store:
    return demo_store(tmp_path / "results")
