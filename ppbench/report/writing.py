"""How pages are made: templates whose text is escaped, files that are whole or not there.

plotly.js is inlined once and figures are embedded as data, rather than through plotly's own
`to_html`: that repeats its settings per figure, gives every chart a random id and draws all of
them at once. The pages' policy forbids every network request.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from ppbench.files import whole_file
from ppbench.report.packed import pack_bytes, pack_text

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """A template filled in; user text is escaped unless a filter here says that it is safe."""
    return environment().get_template(template).render(**values)


@cache
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
    """JSON for a `<script>`: without any `<` it can neither end the element nor start one."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line


def write_page(path: Path, text: str, option: str = "-o") -> None:
    """Aside first, then renamed: a reader never meets half a page.

    Raises StoreError, naming the option to change, when it cannot be done.
    """
    with whole_file(path, option) as file:
        file.write(text.encode("utf-8"))
