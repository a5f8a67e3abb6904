"""The index of a folder of reports: rebuilt from what lies there, each time something is added.

Rebuilt rather than appended to: a deleted report goes, and of two sweeps that end together the
later writes what both have made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ppbench.errors import StoreError
from ppbench.report.about import INDEX, REPORT, TIMELINE, About, read_about
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


def render_index(folder: Path) -> str:
    """The index as HTML: reports and timelines, newest first."""
    pages = entries(folder)
    return render(
        "index.html",
        title="Reports",
        about=About(kind=INDEX, title="Reports"),
        reports=[page for page in pages if page.about.kind == REPORT],
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
