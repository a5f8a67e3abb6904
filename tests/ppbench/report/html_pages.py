"""Pages as a browser reads them."""

import base64
import json
import zlib
from html.parser import HTMLParser

from ppbench.report.scripts import library


class Page(HTMLParser):
    """A page as a browser reads it: its elements, its text and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self._open = ""
        self.feed(page.replace(library(), "/* plotly.js */"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in ("script", "td"):
            (self.scripts if tag == "script" else self.cells).append("")

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data
            if self.cells and self.tags[-1][0] in ("td", "a", "code", "span"):
                self.cells[-1] += data

    def handle_endtag(self, tag):
        self._open = ""

    def links(self) -> list[str]:
        return [attrs["href"] for tag, attrs in self.tags if tag == "a"]

    def blocks(self, kind: str) -> list[str]:
        """Data blocks of a type, in the page's order."""
        kinds = [attrs.get("type") for tag, attrs in self.tags if tag == "script"]
        return [text for each, text in zip(kinds, self.scripts, strict=True) if each == kind]

    def figures(self) -> list[dict]:
        """Those over all cases, which are drawn as soon as they are seen."""
        return [data for data in self._data() if isinstance(data, dict)]

    def cases(self) -> list[dict]:
        (cases,) = [data for data in self._data() if isinstance(data, list)]
        return cases

    def timelines(self) -> list[dict]:
        """What their columns mean; it is unpacked when they are opened."""
        packed = self.blocks("application/x-ppbench-timeline")
        return [json.loads(zlib.decompress(base64.b64decode(text))) for text in packed]

    def about(self) -> str:
        (content,) = [a["content"] for _, a in self.tags if a.get("name") == "ppbench-report"]
        return content

    def _data(self) -> list:
        return [json.loads(text) for text in self.blocks("application/json")]
