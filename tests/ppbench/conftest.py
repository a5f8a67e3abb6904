"""A store with a few runs in it, for whatever reads one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stored_runs import demo_store

from ppbench.store import Store


@pytest.fixture(scope="session")
def _demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_store(tmp_path_factory.mktemp("demo") / "results").folder


@pytest.fixture
def demo(_demo_folder: Path, tmp_path: Path) -> Store:
    """A copy for each test: to copy files takes a tenth of writing them as tables."""
    return Store(shutil.copytree(_demo_folder, tmp_path / "results"))
