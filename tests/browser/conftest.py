"""One browser for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
