"""Packed data: what comes out is what went in, and it can stand in a page."""

from __future__ import annotations

import base64
import string
import zlib

from ppbench.report.scripts import pack_bytes, pack_text


def test_what_is_packed_inflates_to_the_same_bytes():
    data = bytes(range(256)) * 100
    assert zlib.decompress(base64.b64decode(pack_bytes(data))) == data


def test_text_is_packed_as_utf_8():
    text = "</script> Schrödinger's “rank” ✓"
    assert zlib.decompress(base64.b64decode(pack_text(text))).decode("utf-8") == text


def test_packed_data_cannot_end_a_script():
    assert set(pack_text("</script>" * 99)) <= set(string.ascii_letters + string.digits + "+/=")


def test_packed_timelines_shrink():
    assert len(pack_text('{"x": [1, 2, 3]}' * 1000)) < 1000
