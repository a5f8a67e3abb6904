"""Figures as files: pictures, a page, or plotly's JSON; the same bytes for the same figure.

Pictures are drawn by kaleido in the local Chromium, without the network. The random ids that a
browser gives to the parts of an SVG and the dates in a PDF are removed.
"""

from __future__ import annotations

import html
import logging
import re
from dataclasses import dataclass

import plotly.graph_objects as go

from engine.packages import missing
from ppbench.errors import UsageError
from ppbench.report.scripts import library, script_json

_PICTURES = (".png", ".svg", ".pdf")
IMAGE_SUFFIXES = (*_PICTURES, ".html", ".json")
_WIDTH_PX, _HEIGHT_PX = 1100, 450
_SVG_ID = re.compile(r'id="defs-([0-9a-f]{6})"')
_PDF_DATE = re.compile(rb"/(CreationDate|ModDate) \(D:\d{14}")
_EPOCH = rb"/\1 (D:19700101000000"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';
 img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 0; background: {paper}; }}</style>
</head>
<body>
<div id="figure"></div>
<script>{library}</script>
<script type="application/json">{figure}</script>
<script>
const figure = JSON.parse(document.querySelector("script[type='application/json']").textContent);
Plotly.newPlot("figure", {{ ...figure, config: {{ responsive: true, displayModeBar: false }} }});
</script>
</body>
</html>
"""
_BROWSER_HINT = (
    "install Chromium (Debian: apt-get install chromium), or name a browser's path in BROWSER_PATH"
)


@dataclass(frozen=True)
class Size:
    """A size in CSS pixels, by default the figure's own; a PNG has `scale` times as many."""

    width: int | None = None
    height: int | None = None
    scale: float = 2.0


def drawn(figure: go.Figure, suffix: str, size: Size) -> str | bytes:
    """Return the content of a file with one of `IMAGE_SUFFIXES`. Raises UsageError."""
    width = size.width or figure.layout.width or _WIDTH_PX
    sized = go.Figure(figure)
    height = size.height or sized.layout.height or _HEIGHT_PX
    sized.update_layout(width=width, height=height)
    if suffix == ".json":
        return str(sized.to_json()) + "\n"
    if suffix == ".html":
        return _PAGE.format(
            title=html.escape(str(sized.layout.title.text or "ppbench")),
            paper=sized.layout.template.layout.paper_bgcolor,
            library=library(),
            figure=script_json(sized.to_plotly_json()),
        )
    try:
        import kaleido
        from kaleido import errors
    except ImportError as error:
        raise UsageError(f"{missing('kaleido', suffix)}, or write .html or .json") from error
    scale = size.scale if suffix == ".png" else 1
    options = {"format": suffix[1:], "width": width, "height": height, "scale": scale}
    # It logs every message that it does not understand, which is harmless.
    logging.getLogger("choreographer").setLevel(logging.CRITICAL)
    for number, trace in enumerate(sized.data):
        trace.uid = f"{number:06}"  # else the browser puts a random one into an SVG
    try:
        picture: bytes = kaleido.calc_fig_sync(
            sized.to_dict(), opts=options, kopts={"mathjax": False}
        )
    except errors.ChromeNotFoundError as error:
        raise UsageError(f"no browser found to draw the picture; {_BROWSER_HINT}") from error
    except (errors.BrowserFailedError, errors.BrowserClosedError) as error:
        message = str(error.args[0] if error.args else error).rstrip(".")
        raise UsageError(
            f"the browser failed to draw the picture: {message}; {_BROWSER_HINT}"
        ) from error
    return reproducible(picture)


def reproducible(picture: bytes) -> bytes:
    """Remove what differs between two drawings: the ids of an SVG, the dates of a PDF."""
    if picture.startswith(b"%PDF"):
        return _PDF_DATE.sub(_EPOCH, picture)
    if not picture.startswith(b"<svg"):
        return picture
    text = picture.decode()
    random_id = _SVG_ID.search(text)
    if random_id is None:
        return picture
    # Replaced only where an id is defined or referenced: a name may contain the same characters.
    references = re.compile(rf'((?:\bid="|url\(["\']?#|href="#)[\w-]*?){random_id[1]}')
    return references.sub(r"\g<1>000000", text).encode()
