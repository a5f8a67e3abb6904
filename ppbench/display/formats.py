"""Output formats and themes; this module imports nothing, so that `--help` stays fast."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class ExportFormat(StrEnum):
    """How the store is exported: as a table, or as figures for Bencher."""

    csv = "csv"
    parquet = "parquet"
    markdown = "markdown"
    bencher = "bencher"


class Assets(StrEnum):
    """Where a page has the plotting library: in itself, or in a file that pages share."""

    inline = "inline"
    shared = "shared"


class Theme(StrEnum):
    """The background of a picture."""

    light = "light"
    dark = "dark"
