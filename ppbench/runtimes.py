"""The runtimes by name; a new one is a line here.

A name maps to the place of its factory, which is imported only on the ranks that run it. Another
package adds a runtime by an entry point of the group `ppbench.runtimes`, whose name is the
runtime's and whose value is the factory:

    [project.entry-points."ppbench.runtimes"]
    mine = "my_package.runtime:MyRuntime"

Another package cannot replace a runtime of this table.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine import packages
from ppbench.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "ppbench.runtimes"
ENGINE: Final = "engine"

RUNTIMES: dict[str, str] = {
    ENGINE: "ppbench.run.runtimes.trained:EngineRuntime",
    "torch": "ppbench.run.runtimes.torch_pipelining:TorchRuntime",
    "single": "ppbench.run.runtimes.single:SingleRuntime",
}


def check_can_train() -> None:
    """Raise UsageError, with the fix, where this system or its packages cannot train anything."""
    if sys.platform != "linux":
        raise UsageError(
            f"measuring needs Linux, and this is {sys.platform}: measure on another machine; here, "
            "ls, show, explain, report, compare and query may read its store, which is not tried"
        )
    if (problem := packages.problem_of_torch()) is not None:
        raise UsageError(problem)
    ours = Path(packages.__file__).parent
    for other in (Path("engine/__init__.py"), Path("engine.py")):  # ranks find it first
        if other.is_file() and other.resolve().parent != ours.resolve():
            raise UsageError(
                f"{other}: hides the package engine that came with ppbench ({ours}) from the "
                "ranks, which look in the working directory first; start in another folder, or "
                "rename it"
            )


def is_known(name: str) -> bool:
    """Whether a runtime exists; installed packages are searched only for names not listed here."""
    return name in RUNTIMES or name in _installed()


def known_runtimes() -> list[str]:
    """All names: those listed here first, then those of installed packages."""
    return [*RUNTIMES, *sorted(_installed().keys() - RUNTIMES.keys())]


def load_factory(name: str) -> object:
    """The factory of a runtime: `(case, agreement, fabric, flight) -> Runtime`.

    Raises KeyError for an unknown name, and whatever importing the factory raises.
    """
    if name not in RUNTIMES:
        return _installed()[name].load()
    module, _, attribute = RUNTIMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def entry_of(name: str) -> EntryPoint | None:
    """The entry point of an installed package's runtime; None for any other name."""
    return None if name in RUNTIMES else _installed().get(name)


def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and most names are known

    return {entry.name: entry for entry in entry_points(group=GROUP)}
