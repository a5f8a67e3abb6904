"""How pages are made: templates whose text is escaped, files that are whole or not there."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from ppbench.errors import StoreError
from ppbench.report.packed import pack_bytes, pack_text

_TEMPLATES = Path(__file__).parent / "templates"


def environment() -> jinja2.Environment:
    """Templates, with plotly.js as `plotly_js` and filters that put a figure in a `<script>`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["plotly_js"] = Markup(get_plotlyjs())  # noqa: S704 - plotly's own, not user text
    made.filters["figure_json"] = figure_json
    made.filters["packed_figure"] = lambda figure: pack_text(to_json_plotly(figure, engine="json"))
    made.filters["packed"] = pack_bytes
    return made


def figure_json(figure: go.Figure) -> Markup:
    """The figure for a `<script>`: without any `<` it can neither end the element nor start one."""
    text = to_json_plotly(figure, engine="json")
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line


def write_page(path: Path, text: str, option: str = "-o") -> None:
    """Aside first, then renamed: a reader never meets half a page.

    Raises StoreError, naming the option to change, when it cannot be done.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}; choose another path with {option} FILE"
        ) from error
