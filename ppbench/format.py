"""What output can look like; apart, so that the command line can name it for free."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class TableFormat(StrEnum):
    """How a table of the store is written out."""

    csv = "csv"
    parquet = "parquet"
    markdown = "markdown"


class Theme(StrEnum):
    """What a picture is drawn on."""

    light = "light"
    dark = "dark"
