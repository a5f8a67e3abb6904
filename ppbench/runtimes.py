"""Every runtime by name: the one place to add a line when a runtime is added.

A name and where its factory is; what stands there is imported on the ranks alone, by those that run
it. Another package adds one by an entry point of the group `ppbench.runtimes`, whose name is the
runtime's and whose value is the factory:

    [project.entry-points."ppbench.runtimes"]
    mine = "my_package.runtime:MyRuntime"

A name of ours cannot be taken by another package.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Final

GROUP: Final = "ppbench.runtimes"
ENGINE: Final = "engine"

RUNTIMES: dict[str, str] = {
    ENGINE: "ppbench.run.runtimes.engine:EngineRuntime",
    "torch": "ppbench.run.runtimes.torch_pipelining:TorchRuntime",
    "single": "ppbench.run.runtimes.single:SingleRuntime",
}


def is_known(name: str) -> bool:
    """Looks at what is installed only for a name that is not ours."""
    return name in RUNTIMES or name in _installed()


def known_runtimes() -> list[str]:
    """Ours first, then those of installed packages."""
    return [*RUNTIMES, *sorted(_installed().keys() - RUNTIMES.keys())]


def load_factory(name: str) -> object:
    """What makes a runtime: `(case, agreement, fabric, flight) -> ppbench.run.runtimes.Runtime`.

    Raises KeyError for a name that is not known, and whatever importing it raises.
    """
    if name not in RUNTIMES:
        return _installed()[name].load()
    module, _, attribute = RUNTIMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def entry_of(name: str) -> EntryPoint | None:
    """What an installed package says of its runtime; None for ours and for what is not there."""
    return None if name in RUNTIMES else _installed().get(name)


def _installed() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}
