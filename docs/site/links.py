"""Checks a built site: every link leads somewhere in it, and no page asks the network for anything.

Links to other sites are not followed: a build must not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "iframe": ("src",),
    "object": ("data",),
    "embed": ("src",),
}
"""Attributes whose address a browser loads by itself."""
_IN_STYLE = re.compile(r"(?:url\(|@import\s+)[\"']?\s*((?:https?:)?//[^\"')\s]+)")
_KINDS_OF_LINK = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}
"""Kinds of `<link>` that make a request; `canonical` or `next` only name a page."""


@dataclass
class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses that it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and not _KINDS_OF_LINK & set(values.get("rel", "").split()):
            return
        self.loaded += [values[name] for name in _LOADED.get(tag, ()) if name in values]


def problems_of(site: Path) -> list[str]:
    """Find the broken links of a built site, and name each on a line."""
    pages = {path: _read(path) for path in _html(site)}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [f"{name}: loads {address}" for address in page.loaded if is_elsewhere(address)]
        inside = [a for a in (*page.links, *page.loaded) if not is_elsewhere(a)]
        wrong += [f"{name}: {problem}" for a in inside if (problem := _dead(a, path, pages))]
    styles = ((path, path.read_text()) for path in sorted(site.rglob("*.css")))
    wrong += [f"{path.relative_to(site)}: loads {address}" for path, text in styles
              for address in _IN_STYLE.findall(text)]  # fmt: skip
    return wrong


def _html(site: Path) -> Iterator[Path]:
    """The pages of a site; the theme's static files have templates among them."""
    yield from (path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts)


def is_elsewhere(address: str) -> bool:
    """Whether an address is on another host."""
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https", "mailto")


def _read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def _dead(address: str, source: Path, pages: dict[Path, Page]) -> str | None:
    """Why an address leads nowhere; None if it is good."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "javascript", "blob"):
        return None
    target = source if not parts.path else (source.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return f"{address} leads to no file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in _anchors(pages[target]):
        return f"{address} leads to no anchor"
    return None


def _anchors(page: Page) -> set[str]:
    return {*page.anchors, "top"}
