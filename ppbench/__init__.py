"""Benchmarking and profiling of pipeline-parallel training: sweeps, figures, reports, history.

Importing it costs nothing: torch is imported only by the workers, and pandas and plotly only by
what is used of `load` and `figures`, which a notebook takes from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppbench import figures
    from ppbench.results import load

__version__ = "0.1.0"
__all__ = ["__version__", "figures", "load"]


def __getattr__(name: str) -> object:
    """`load` and `figures`, imported when they are first asked for."""
    if name == "figures":
        return importlib.import_module("ppbench.figures")
    if name == "load":
        return importlib.import_module("ppbench.results").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "figures", "load"]
