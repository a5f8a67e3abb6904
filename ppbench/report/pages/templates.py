"""Rendering of pages: templates with escaped text, figures embedded as data, files written whole.

plotly.js is inlined once and figures are data, rather than the output of plotly's own `to_html`,
which repeats its settings per figure, gives every chart a random id and draws all charts at once.
Large data is deflated and encoded in base64: a figure shrinks to about a fifth, the browser does
not parse it before it is needed, and the alphabet cannot end a `<script>`; `unpack.js` unpacks it.
The pages' policy forbids every network request.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from ppbench.files import whole_file

_LEVEL = 9  # explicit, as the default may change
_TEMPLATES = Path(__file__).parents[1] / "templates"


def render(template: str, **values: object) -> str:
    """Fill in a template; text is escaped unless a filter here marks it as safe."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> jinja2.Environment:
    """Return the templates, with `plotly_js` and the filters that embed figures."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["plotly_js"] = Markup(get_plotlyjs())  # noqa: S704 - plotly's own, not user text
    made.filters["figure_json"] = figure_json
    made.filters["script_json"] = script_json
    made.filters["packed_figure"] = packed_figure
    made.filters["packed"] = pack_bytes
    return made


def figure_json(figure: go.Figure) -> Markup:
    return _in_script(to_json_plotly(figure, engine="json"))


def packed_figure(figure: go.Figure) -> str:
    return pack_text(to_json_plotly(figure, engine="json"))


def script_json(value: object) -> Markup:
    return _in_script(json.dumps(value, ensure_ascii=False))


def _in_script(text: str) -> Markup:
    """Mark JSON as safe in a `<script>`: without `<` it can neither end nor start an element."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line


def write_page(path: Path, text: str, option: str = "-o") -> None:
    """Write a page to a temporary file and rename it, so that readers never see half a page.

    Raises StoreError, which names the option to change, if that fails.
    """
    with whole_file(path, option) as file:
        file.write(text.encode("utf-8"))


def pack_bytes(data: bytes) -> str:
    """Return `data` deflated (zlib format, RFC 1950) in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


def pack_text(text: str) -> str:
    """Return the text in UTF-8, packed by `pack_bytes`."""
    return pack_bytes(text.encode("utf-8"))
