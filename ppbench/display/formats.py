"""What output can look like; apart, so that the command line can name it for free."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class ExportFormat(StrEnum):
    """How the store is written out: a table of it, or figures for a tracker of benchmarks."""

    csv = "csv"
    parquet = "parquet"
    markdown = "markdown"
    bencher = "bencher"
    github = "github"
    otava = "otava"


TRACKERS = (ExportFormat.bencher, ExportFormat.github, ExportFormat.otava)


class Theme(StrEnum):
    """What a picture is drawn on."""

    light = "light"
    dark = "dark"
