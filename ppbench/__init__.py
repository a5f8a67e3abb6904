"""Benchmarking and profiling of pipeline-parallel training: sweeps, figures, reports, history.

Importing it costs nothing: torch is imported only by the workers and by `attach`, which a training
script takes from here, and pandas and plotly only by what is used of `load` and `figures`, which a
notebook takes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as of `typing`, which takes longer to import than all else up to `main`
if TYPE_CHECKING:
    from ppbench import figures
    from ppbench.attaching import attach
    from ppbench.results import load

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "figures", "load"]


def __getattr__(name: str) -> object:
    """`attach`, `load` and `figures`, imported when they are first asked for."""
    import importlib

    if name == "attach":
        return importlib.import_module("ppbench.attaching").attach
    if name == "figures":
        return importlib.import_module("ppbench.figures")
    if name == "load":
        return importlib.import_module("ppbench.results").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "attach", "figures", "load"]
