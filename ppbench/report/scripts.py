"""The scripts of pages: figures as JSON, and the plotting library, which pages may share.

Plotly.js carries the addresses of map servers, of a service to which charts can be uploaded and of
pages about its parts. Pages use none of them, and a reader who searches a page for addresses should
find none, so they are taken out; only the names of XML namespaces stay. Notices of copyright stay.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from ppbench.display.formats import Assets
from ppbench.errors import UsageError
from ppbench.files import is_stream, whole_file

if TYPE_CHECKING:  # plotly's own code takes longer to import than a page of few runs to make
    import plotly.graph_objects as go

FOLDER = "assets"
_LEVEL = 6  # 9 takes ten times as long for one per cent
Picture = dict[str, Any]
"""A figure of plotly as plain data; its arrays are numpy's, of floats."""
_ADDRESS = re.compile(r"""https?://(?!www\.w3\.org/)[^\s"'`\\()<>$]*""")


@cache
def library() -> str:
    """Return plotly.js without addresses; `get_plotlyjs` would import most of plotly."""
    place = find_spec("plotly")
    assert place is not None
    assert place.origin is not None
    script = Path(place.origin).parent / "package_data" / "plotly.min.js"
    return _ADDRESS.sub("", script.read_bytes().decode())


@cache
def shared_name() -> str:
    """Return the path of the shared file, from the folder of the pages; its text is in its name."""
    from plotly.offline import get_plotlyjs_version

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
    if not isinstance(figure, dict):
        from plotly.io.json import to_json_plotly

        return str(to_json_plotly(figure, engine="json"))
    ordered = _in_order(figure)
    try:
        text = _json(ordered)
    except ValueError:  # numbers that JSON does not have
        text = _json(_with_nulls(ordered))
    for char in "<>/":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _json(figure: object) -> str:
    return json.dumps(figure, default=_plain, separators=(",", ":"), allow_nan=False)


def _in_order(value: Any, name: str = "") -> Any:
    """Return a copy with keys in plotly's order: sorted, a trace's type behind all others."""
    if isinstance(value, dict) and name != "meta":
        keys = sorted(value, key=lambda key: (key == "type" and name == "data", key))
        return {key: _in_order(value[key], key) for key in keys}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_in_order(one, name) for one in value]
    return value


def _with_nulls(value: object) -> object:
    """Return a copy in which plain numbers that are not finite are null, as plotly writes them."""
    if isinstance(value, dict):
        return {key: _with_nulls(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(values: npt.NDArray[Any] | np.generic) -> object:
    """Return numbers of numpy as plotly.js takes them, in base64, and texts as a list."""
    if isinstance(values, np.generic):
        return values.item()
    if values.dtype.kind not in "fiu":
        return values.tolist()
    packed = base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")
    shape = {"shape": ", ".join(map(str, values.shape))} if values.ndim > 1 else {}
    return {"dtype": "f8", "bdata": packed, **shape}


def pack_bytes(data: bytes) -> str:
    """Return `data` deflated (zlib format, RFC 1950) in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


def script_json(value: object) -> Markup:
    return _in_script(json.dumps(value, ensure_ascii=False))


def _in_script(text: str) -> Markup:
    """Mark JSON as safe in a `<script>`: without `<` it can neither end nor start an element."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line
