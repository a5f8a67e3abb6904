"""A store with a few runs in it, for whatever reads one, and an empty one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stored_runs import demo_store
from tracked import store_in

from ppbench.store import Store


@pytest.fixture(scope="session")
def _demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_store(tmp_path_factory.mktemp("demo") / "results").folder


@pytest.fixture
def demo(_demo_folder: Path, tmp_path: Path) -> Store:
    """A copy for each test: to copy files takes a tenth of writing them as tables."""
    return Store(shutil.copytree(_demo_folder, tmp_path / "results"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store that `tracked` writes to."""
    return store_in(tmp_path)
