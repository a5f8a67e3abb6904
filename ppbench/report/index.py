"""The index of a folder of reports: rebuilt from what lies there, each time something is added.

Rebuilt rather than appended to: a deleted report goes, and of two sweeps that end together the
later writes what both have made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ppbench.errors import StoreError, UsageError
from ppbench.report.about import HISTORY, INDEX, REPORT, TIMELINE, About, read_about
from ppbench.report.writing import render, write_page

NAME = "index.html"


@dataclass(frozen=True)
class Entry:
    """A page of the folder: its file's name, and what it says of itself."""

    name: str
    about: About

    @property
    def address(self) -> str:
        return quote(os.fsencode(self.name))


def write_index(folder: Path) -> None:
    """Write `folder/index.html`. Raises StoreError when that cannot be, or would undo another's."""
    path = folder / NAME
    if path.exists() and not _is_ours(path):
        raise StoreError(
            f"{path}: not an index written by ppbench, so it stays as it is; "
            "rename it, or keep reports elsewhere with --reports DIR"
        )
    write_page(path, render_index(folder), option="--reports")


def update_index(folder: Path, tell: Callable[[str], None]) -> None:
    """What is measured and written counts; an index that cannot be is no reason to fail."""
    try:
        write_index(folder)
    except StoreError as error:
        tell(f"warning: {error}")


def check_not_index(path: Path, folder: Path) -> None:
    """Raises UsageError where a page would take the place of the index."""
    if path.resolve() == (folder / NAME).resolve():
        raise UsageError(f"{path}: the index of the reports is here; choose another name with -o")


def render_index(folder: Path) -> str:
    """The index as HTML: reports, histories and timelines, each newest first."""
    pages = entries(folder)
    return render(
        "index.html",
        title="Reports",
        about=About(kind=INDEX, title="Reports"),
        reports=[page for page in pages if page.about.kind == REPORT],
        histories=[page for page in pages if page.about.kind == HISTORY],
        timelines=[page for page in pages if page.about.kind == TIMELINE],
    )


def entries(folder: Path) -> list[Entry]:
    """ppbench's own pages in the folder, newest first; anything else is passed over."""
    paths = sorted(path for path in folder.glob("*.html") if not path.name.startswith("."))
    told = [(path.name, read_about(path)) for path in paths]
    found = [Entry(name, about) for name, about in told if about is not None]
    return sorted(found, key=lambda entry: entry.about.measured, reverse=True)


def _is_ours(path: Path) -> bool:
    about = read_about(path)
    return about is not None and about.kind == INDEX
