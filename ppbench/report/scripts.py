"""What pages embed: figures as JSON, packed data, and the plotting library, which they may share.

The library is plotly.js as its package has it. It holds addresses of services that pages do not
use; their policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ppbench.display.formats import Assets
from ppbench.errors import UsageError
from ppbench.files import is_stream, whole_file

FOLDER = "assets"
PLOTTED = "chart plotted"
"""The class of what the plotting library draws: a page without it has no need of the library."""
_LEVEL = 6  # 9 takes ten times as long for one per cent
Figure = dict[str, Any]
"""A figure of plotly as plain data."""


@cache
def library() -> str:
    """Return plotly.js; to import plotly for it takes longer than to make a page of few runs."""
    place = find_spec("plotly")
    assert place is not None
    assert place.origin is not None
    script = Path(place.origin).parent / "package_data" / "plotly.min.js"
    return script.read_bytes().decode()


@cache
def shared_name() -> str:
    """Return the path of the shared file, from the folder of the pages; its text is in its name."""
    digest = hashlib.sha256(library().encode("utf-8")).hexdigest()[:12]
    return f"{FOLDER}/plotly-{digest}.min.js"


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
    if not path.exists():
        with whole_file(path, option) as file:
            file.write(library().encode("utf-8"))


def script_json(value: object) -> Markup:
    """Return JSON for a `<script>`: without `<` it can neither end nor start an element."""
    return Markup(plain_json(value).replace("<", "\\u003c"))  # noqa: S704 - escaped on this line


def plain_json(value: object) -> str:
    """Return JSON as plotly.js takes it: numbers that are not finite are null."""
    try:
        return _json(value)
    except ValueError:  # numbers that JSON does not have
        return _json(_with_nulls(value))


def _json(value: object) -> str:
    options: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return json.dumps(value, **options)


def _with_nulls(value: object) -> object:
    """Return a copy in which plain numbers that are not finite are null."""
    if isinstance(value, dict):
        return {key: _with_nulls(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def pack_bytes(data: bytes) -> str:
    """Return `data` deflated (zlib format, RFC 1950) in base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")
