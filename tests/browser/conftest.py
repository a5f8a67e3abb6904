"""One browser for all tests, in which each has its own tab, and one page of each kind."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser
from made_pages import KINDS
from screens import NEEDED


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Where there is none the tests are skipped (`needs_browser`); in CI they fail here."""
    if CHROMIUM is None:
        pytest.fail(NEEDED)
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def page_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Makes the page of a kind, once for all workers: to make one takes seconds."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base

    def made(kind: str) -> Path:
        with (base / f"{kind}.made").open("a+") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            if not (path := note.read()):
                folder = base / kind
                folder.mkdir()
                path = str(KINDS[kind](folder))
                note.write(path)
        return Path(path)

    return made
