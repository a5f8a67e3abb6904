"""Rendering of pages, and the index of a folder of them.

plotly.js is inlined once where a page has charts, or shared (see `ppbench.report.scripts`), and
figures are data.
Large data is deflated and encoded in base64: a figure shrinks to about a fifth, the browser does
not parse it before it is needed, and the alphabet cannot end a `<script>`; `unpack.js` unpacks it.
The pages' policy forbids every network request.

The index is made anew from the folder whenever a page is added. Rebuilding rather than appending
drops deleted reports, and of two sweeps that end together the later one lists the pages of both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from ppbench.console import note
from ppbench.display.document import Block, Picture, Result, Section, Text
from ppbench.display.fields import Field
from ppbench.display.formats import Assets
from ppbench.display.rows import Rows, Written
from ppbench.display.tables import Table
from ppbench.errors import StoreError, UsageError
from ppbench.files import whole_file
from ppbench.report.pages.provenance import (
    COMPARISON,
    HISTORY,
    INDEX,
    PLAN,
    REPORT,
    TIMELINE,
    About,
    read_about,
)
from ppbench.report.scripts import (
    PLOTTED,
    check_shareable,
    library,
    shared_name,
    write_shared,
)

if TYPE_CHECKING:
    from ppbench.report.timeline.timelines import Timeline

_TEMPLATES = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True)
class Live:
    """What a page says of its sweep while that is running."""

    done: str  # `3 of 8 cases`
    written: str  # the time of the write, UTC


_SCRIPTS = (
    *("unpack", "columns", "spans", "paint", "timeline", "replicas", "steering"),
    *("points", "charts", "figures", "tables", "history", "filters", "page", "copying"),
)
"""The scripts of a page that draws; without, tables are sorted and commands copied."""


def page(
    result: Result,
    about: About,
    subtitle: str = "",
    *,
    assets: Assets = Assets.inline,
    live: Live | None = None,
    timelines: Mapping[str, Timeline] | None = None,
    has_contents: bool = False,
) -> str:
    """Return the document of a command as a page of its own.

    `timelines` are those that it draws, by their names; a page of tables alone has None.
    """
    content = result.html()
    has_charts = f'class="{PLOTTED}"' in content
    sections = [one for one in result.blocks if isinstance(one, Section) and one.name]
    contents = [(one.name, one.heading or one.name.capitalize()) for one in sections]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=about.title,
            about=about,
            subtitle=subtitle,
            live=live,
            contents=contents if has_contents else [],
            content=Markup(content),  # noqa: S704 - the blocks escape what others wrote
            timelines=timelines or {},
            has_charts=has_charts,
            shared_library=shared_name() if assets is Assets.shared else "",
            scripts=("tables", "copying") if timelines is None else _SCRIPTS,
        )
    )


def part(template: str, **values: object) -> Picture:
    """Return a part of a page that is a template of its own."""
    return Picture(of_page=_environment().get_template(template).render(values))


@cache
def _environment() -> jinja2.Environment:
    """Return the templates, with `plotly_js`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["plotly_js"] = Markup(library())  # noqa: S704 - plotly's own, not user text
    return made


def write_page(path: Path, text: str, option: str = "-o", assets: Assets = Assets.inline) -> None:
    """Write a page to a temporary file and rename it, so that readers never see half a page.

    With shared `assets`, the plotting library is written beside it first. Raises StoreError, which
    names the option to change, if that fails.
    """
    check_shareable(assets, path)
    if assets is Assets.shared and shared_name() in text:
        write_shared(path.parent, option)
    with whole_file(path, option) as file:
        file.write(text.encode("utf-8"))


NAME = "index.html"
_LISTED = {
    REPORT: (
        "Reports",
        ("report", "file", "measured", "cases", "runs", "failed", "answer", "commit"),
    ),
    COMPARISON: ("Comparisons", ("comparison", "file", "measured", "cases", "runs", "commit")),
    PLAN: ("Plans", ("plan", "file", "answer")),
    HISTORY: ("Over commits", ("history", "file", "measured", "cases", "runs", "newest commit")),
    TIMELINE: ("Timelines", ("timeline", "measured", "commit")),
}
"""The heading of the pages of a kind, and what is shown of each."""
_COUNTS = ("cases", "runs", "failed")


def write_index(folder: Path) -> None:
    """Write `folder/index.html`. Raises StoreError if it fails or another file is there."""
    path = folder / NAME
    if path.exists() and ((about := read_about(path)) is None or about.kind != INDEX):
        raise StoreError(
            f"{path}: not an index written by ppbench, so it is not overwritten; "
            "rename it, or choose another folder with --reports DIR"
        )
    write_page(path, render_index(folder), option="--reports")


@contextlib.contextmanager
def listed(path: Path, folder: Path) -> Iterator[None]:
    """Update the index of `folder` after the page `path` was written there.

    Raises UsageError if the page would overwrite the index.
    """
    if path.resolve() == (folder / NAME).resolve():
        raise UsageError(f"{path}: this is the index of the reports; choose another name with -o")
    yield
    if path.parent.resolve() == folder.resolve():
        update_index(folder)


def update_index(folder: Path) -> None:
    """Write the index; a failure is only a warning, since the results are already stored."""
    try:
        write_index(folder)
    except StoreError as error:
        note(f"warning: {error}")


def render_index(folder: Path) -> str:
    """Return the index as HTML: the pages by their kind, each newest first."""
    found, sections = entries(folder), list[Block]()
    for kind, (heading, columns) in _LISTED.items():
        rows = [
            {
                columns[0]: Written(about.title, about.title, f"./{quote(os.fsencode(name))}"),
                "file": name,
                "measured": about.measured[:16] or "planned",
                "cases": about.num_cases,
                "runs": about.num_runs,
                "failed": about.num_failures,
                "answer": about.answer or None,
                "commit": about.commit or None,
                "newest commit": about.commit or None,
            }
            for name, about in found
            if about.kind == kind
        ]
        fields = {name: Field(name, is_number=name in _COUNTS) for name in columns}
        if rows:
            table = Table(Rows.of_records(rows), fields, name=heading)
            sections.append(Section(kind, heading, [table]))
    subtitle = "Every report in this folder, newest first. Times are UTC."
    none: list[Block] = [Text("None yet; ppbench sweep FILE writes one.")]
    return page(Result(sections or none), About(kind=INDEX, title="Reports"), subtitle)


def entries(folder: Path) -> list[tuple[str, About]]:
    """Return the pages of ppbench in the folder, newest first; other files are ignored."""
    paths = sorted(path for path in folder.glob("*.html") if not path.name.startswith("."))
    pages = [(path.name, about) for path in paths if (about := read_about(path)) is not None]
    return sorted(pages, key=lambda entry: entry[1].measured, reverse=True)
