"""One browser for all tests; each has its own tab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import CHROMIUM, Browser
from screens import NEEDED


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Where there is none the tests are skipped (`needs_browser`); in CI they fail here."""
    if CHROMIUM is None:
        pytest.fail(NEEDED)
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
