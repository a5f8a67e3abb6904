"""A store with a few runs in it, for whatever reads one, an empty one, scenes, and real ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stored_runs import demo_store
from tracked import store_in

from ppbench.store import Store

if TYPE_CHECKING:
    from ranks import Ranks


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


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Makes a copy of a scene in a folder; the scene itself is made when it is first asked for."""
    from scenes import make_scene

    made: dict[str, Path] = {}

    def copied(name: str, to: Path) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_scene(name, made[name])
        return Path(shutil.copytree(made[name], to))

    return copied


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four: two pipelines of two, as data parallelism has them."""
    import torch  # for those alone that ask: it takes seconds
    from ranks import Ranks

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: sums over threads round differently
    pool = Ranks(4)
    yield pool
    pool.stop()
    torch.set_num_threads(before)
