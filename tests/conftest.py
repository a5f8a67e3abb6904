"""What all tests share: the order of their files, and that what takes long is imported once."""

from __future__ import annotations

import gc
import multiprocessing

import pytest

LONGEST = (
    "test_failures",
    "test_nodes",
    "test_real_repository",
    "test_living_workers",
    "test_listening",
    "test_private_folder",
    "test_faults",
    "test_train",
    "test_torch_runtime",
    "test_overhead",
    "test_check",
    "test_learning",
    "test_store_compaction",
    "test_attach",
    "test_runtimes",
    "test_cli",
)
"""Files that take half a minute or more. Begun last, one would go on alone when all is done."""

multiprocessing.set_forkserver_preload(
    [
        "ppbench.store",
        "engine.trainer",
        "engine.model.pretrained",
        "torch._dynamo",  # torch imports it for fake tensors and for the first optimizer
        "transformers.models.llama.modeling_llama",
    ]
)
"""There is one such server in a process: what its first user asks for is all that it imports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run randomised campaigns with all their examples; without it, with a sample of them",
    )


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a randomised campaign runs all its examples rather than a sample."""
    return bool(request.config.getoption("--thorough"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What is imported by now stays."""
    gc.freeze()
