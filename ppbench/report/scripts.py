"""The scripts of pages: figures as JSON, and the plotting library, which pages may share.

Plotly.js carries the addresses of map servers, of a service to which charts can be uploaded and of
pages about its parts. Pages use none of them, and a reader who searches a page for addresses should
find none, so they are taken out; only the names of XML namespaces stay. Notices of copyright stay.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from ppbench.display.formats import Assets
from ppbench.errors import UsageError
from ppbench.files import is_stream, whole_file

FOLDER = "assets"
_LEVEL = 9  # explicit, as the default may change
Picture = dict[str, Any]
"""A figure of plotly as plain data; its arrays are numpy's, of floats."""
_ADDRESS = re.compile(r"""https?://(?!www\.w3\.org/)[^\s"'`\\()<>$]*""")


@cache
def library() -> str:
    """Return plotly.js without addresses."""
    return _ADDRESS.sub("", get_plotlyjs())


@cache
def shared_name() -> str:
    """Return the path of the shared file, from the folder of the pages; its text is in its name."""
    digest = hashlib.sha256(library().encode("utf-8")).hexdigest()[:12]
    return f"{FOLDER}/plotly-{get_plotlyjs_version()}-{digest}.min.js"


def check_shareable(assets: Assets, page: Path) -> None:
    """Refuse a shared library beside a page that is not a file. Raises UsageError."""
    if assets is Assets.shared and is_stream(page):
        raise UsageError(
            f"{page}: not a file in a folder, so no library can lie beside it; "
            "name a file with -o, or leave --assets shared out"
        )


def write_shared(folder: Path, option: str) -> None:
    """Write the shared file for pages in `folder`, unless it is there. Raises StoreError."""
    path = folder / shared_name()
    if path.exists():
        return
    with whole_file(path, option) as file:
        file.write(library().encode("utf-8"))


def figure_json(figure: go.Figure | Picture) -> Markup:
    return _in_script(plain_json(figure))


def plain_json(figure: go.Figure | Picture) -> str:
    """Return the JSON of a figure; plain data is written as plotly would write it, but faster."""
    if isinstance(figure, go.Figure):
        return str(to_json_plotly(figure, engine="json"))
    text = json.dumps(figure, default=_typed_array, separators=(",", ":"), allow_nan=False)
    for char in "<>/":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def packed_figure(figure: go.Figure | Picture) -> str:
    return pack_text(plain_json(figure))


def pack_bytes(data: bytes) -> str:
    """Return `data` deflated (zlib format, RFC 1950) in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


def pack_text(text: str) -> str:
    """Return the text in UTF-8, packed by `pack_bytes`."""
    return pack_bytes(text.encode("utf-8"))


def _typed_array(values: npt.NDArray[np.float64]) -> dict[str, str]:
    """Return numbers as plotly.js takes them: their bytes in base64."""
    packed = base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")
    shape = {"shape": ", ".join(map(str, values.shape))} if values.ndim > 1 else {}
    return {"dtype": "f8", "bdata": packed, **shape}


def script_json(value: object) -> Markup:
    return _in_script(json.dumps(value, ensure_ascii=False))


def _in_script(text: str) -> Markup:
    """Mark JSON as safe in a `<script>`: without `<` it can neither end nor start an element."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line
