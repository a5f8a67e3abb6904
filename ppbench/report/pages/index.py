"""The index of a folder of reports, rebuilt from the folder whenever a page is added.

Rebuilding rather than appending drops deleted reports, and of two sweeps that end together the
later one lists the pages of both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ppbench.errors import StoreError, UsageError
from ppbench.report.pages.provenance import HISTORY, INDEX, REPORT, TIMELINE, About, read_about
from ppbench.report.pages.templates import render, write_page

NAME = "index.html"


@dataclass(frozen=True)
class Entry:
    """A page of the folder: its file name and its summary."""

    name: str
    about: About

    @property
    def address(self) -> str:
        return quote(os.fsencode(self.name))


def write_index(folder: Path) -> None:
    """Write `folder/index.html`. Raises StoreError if it fails or another file is there."""
    path = folder / NAME
    if path.exists() and not _is_ours(path):
        raise StoreError(
            f"{path}: not an index written by ppbench, so it is not overwritten; "
            "rename it, or choose another folder with --reports DIR"
        )
    write_page(path, render_index(folder), option="--reports")


def update_index(folder: Path, tell: Callable[[str], None]) -> None:
    """Write the index; a failure is only a warning, since the results are already stored."""
    try:
        write_index(folder)
    except StoreError as error:
        tell(f"warning: {error}")


def check_not_index(path: Path, folder: Path) -> None:
    """Raise UsageError if a page would overwrite the index."""
    if path.resolve() == (folder / NAME).resolve():
        raise UsageError(f"{path}: this is the index of the reports; choose another name with -o")


def render_index(folder: Path) -> str:
    """Return the index as HTML: reports, histories and timelines, each newest first."""
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
    """Return the pages of ppbench in the folder, newest first; other files are ignored."""
    paths = sorted(path for path in folder.glob("*.html") if not path.name.startswith("."))
    summaries = [(path.name, read_about(path)) for path in paths]
    pages = [Entry(name, about) for name, about in summaries if about is not None]
    return sorted(pages, key=lambda entry: entry.about.measured, reverse=True)


def _is_ours(path: Path) -> bool:
    about = read_about(path)
    return about is not None and about.kind == INDEX
