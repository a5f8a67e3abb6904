"""Figures as files: what `ppbench figure` does. Apart, since only it needs plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ppbench import figures
from ppbench.export.files import check_suffix, write_file
from ppbench.exporting import chosen
from ppbench.format import Theme
from ppbench.report.images import IMAGE_SUFFIXES, Size, drawn
from ppbench.results import Results
from ppbench.stored import open_store


def picture(
    name: str,
    names: Sequence[str],
    output: Path,
    size: Size,
    theme: Theme,
    results: Path,
    options: Mapping[str, object] | None = None,
) -> Path:
    """Draw one figure into a file; of the last sweep when no runs are named. Returns the path.

    `options` are those of `figures.timeline` that differ from its defaults.
    """
    suffix = check_suffix(output, IMAGE_SUFFIXES)
    store = open_store(results)
    runs = chosen(store, []) if names else Results(store, store.last_sweep())
    drawing = figures.draw(name, runs, names or None, theme, **(options or {}))
    write_file(output, [drawn(drawing, suffix, size)])
    return output
