"""What all tests share: the order of their files, and a collector that has little to look through."""

from __future__ import annotations

import gc

import pytest

LONGEST = (
    "test_failures",
    "test_nodes",
    "test_real_repository",
    "test_living_workers",
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What is imported by now stays."""
    gc.freeze()
