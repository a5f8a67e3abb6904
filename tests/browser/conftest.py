"""One browser for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import CHROMIUM, Browser
from screens import NEEDED


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Where there is none the tests are skipped (`needs_browser`); in CI they fail here."""
    if CHROMIUM is None:
        pytest.fail(NEEDED)
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
