"""The formats that every listing takes; apart, so that the command line can name them for free."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"
