"""Data that a page carries compressed, and unpacks only when somebody looks: timelines mostly.

Deflate in base64, rather than JSON in the open: a figure shrinks to about a fifth, the browser
need not parse what is never opened, and the alphabet cannot end a `<script>`. `unpack.js` is the
other end.
"""

from __future__ import annotations

import base64
import zlib

_LEVEL = 9  # named, so that the bytes do not follow zlib's idea of a default


def pack_bytes(data: bytes) -> str:
    """`data` deflated (zlib's format, RFC 1950), as base64."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


def pack_text(text: str) -> str:
    """`pack_bytes` of the text in UTF-8."""
    return pack_bytes(text.encode("utf-8"))
