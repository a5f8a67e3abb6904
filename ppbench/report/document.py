"""HTML from a template, and HTML into a file: what every page has in common.

plotly.js is inlined once and figures are embedded as data, rather than through plotly's own
`to_html`: that repeats its settings per figure, gives every chart a random id and draws all of
them at once. The pages' policy forbids every network request.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from functools import cache
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from ppbench.errors import StoreError
from ppbench.report.packed import pack_bytes, pack_text

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """A template filled in; user text is escaped unless a filter here says that it is safe."""
    return _environment().get_template(template).render(**values)


def write(path: Path, text: str, option: str = "-o") -> None:
    """Aside first, then renamed: a reader never meets half a page.

    Raises StoreError when the file cannot be written; `option` is what chooses another.
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


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "figure_json": _figure_json,
        "packed": pack_bytes,
        "packed_figure": _packed_figure,
        "script_json": _script_json,
    }
    # plotly's own library, not user text
    environment.globals["plotly_js"] = Markup(get_plotlyjs())  # noqa: S704
    return environment


def _figure_json(figure: go.Figure) -> Markup:
    return _in_script(to_json_plotly(figure, engine="json"))


def _packed_figure(figure: go.Figure) -> str:
    """The figure for a `<script>` that is read only when its chart is opened."""
    return pack_text(to_json_plotly(figure, engine="json"))


def _script_json(value: object) -> Markup:
    return _in_script(json.dumps(value, ensure_ascii=False))


def _in_script(text: str) -> Markup:
    """JSON for a `<script>`: without any `<` it can neither end the element nor start one."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line
