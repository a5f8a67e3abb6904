"""One browser for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import CHROMIUM, Browser, missing


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Where there is none the tests are skipped; not in CI, which has to have one."""
    if CHROMIUM is None:
        missing("a browser: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
