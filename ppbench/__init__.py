"""Benchmarking and profiling of pipeline-parallel training: sweeps, figures, reports, history.

Most commands are functions here too, which return data. Importing the package is cheap: each name
is imported when it is first used. See docs/reference/python.md.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like that of `typing`, whose import would take longer than all others
if TYPE_CHECKING:
    from ppbench import figures
    from ppbench.cli.commands import answer
    from ppbench.commits.check import check
    from ppbench.commits.comparison import compare
    from ppbench.commits.noise import noise
    from ppbench.commits.series import history
    from ppbench.explanation import explain
    from ppbench.external.attach import attach
    from ppbench.prediction import simulate
    from ppbench.recommendation.question import plan
    from ppbench.results import load
    from ppbench.run.sweep.control import sweep

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "answer",
    "attach",
    "check",
    "compare",
    "explain",
    "figures",
    "history",
    "load",
    "noise",
    "plan",
    "simulate",
    "sweep",
]
_PLACES = {
    "answer": "ppbench.cli.commands",
    "attach": "ppbench.external.attach",
    "check": "ppbench.commits.check",
    "compare": "ppbench.commits.comparison",
    "explain": "ppbench.explanation",
    "figures": "ppbench",
    "history": "ppbench.commits.series",
    "load": "ppbench.results",
    "noise": "ppbench.commits.noise",
    "plan": "ppbench.recommendation.question",
    "simulate": "ppbench.prediction",
    "sweep": "ppbench.run.sweep.control",
}
"""The module of each name."""


def __getattr__(name: str) -> object:
    """Import a name of `__all__` when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "figures":
        return importlib.import_module("ppbench.figures")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


def _check_engine() -> None:
    """Raise ImportError where another package hides the engine that came with this one."""
    try:
        from engine import packages  # noqa: F401
    except ImportError as error:
        import sys

        found = getattr(sys.modules.get("engine"), "__file__", None) or "a folder without a package"
        raise ImportError(
            f"engine: Python finds {found} under this name, and not the package that came with "
            f"{__path__[0]}; rename the other one, or start Python where it is not found first"
        ) from error


_check_engine()
