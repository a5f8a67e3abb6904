"""A pipeline-parallel trainer whose schedule is data and whose every action is timed.

Reading order: `plan` (what should happen), `model` (what a stage is made of), `run` (making it
happen), `trainer` (one configuration, ready to step), `train` (the command line).

What a program that trains needs is here in one import. Each name is imported when it is first
used, so that `engine.plan` needs no torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like that of `typing`, whose import would take longer than all others
if TYPE_CHECKING:
    from engine.model.data import DataError, DataSpec
    from engine.model.spec import ModelSpec
    from engine.plan.lower import Policy
    from engine.run.clock import DeviceClock, HostClock, clock_for
    from engine.run.optimizer import OptimizerSpec
    from engine.run.p2p.fabric import Fabric
    from engine.trainer import StepResult, Trainer, TrainerConfig, agree

__all__ = [
    "DataError",
    "DataSpec",
    "DeviceClock",
    "Fabric",
    "HostClock",
    "ModelSpec",
    "OptimizerSpec",
    "Policy",
    "StepResult",
    "Trainer",
    "TrainerConfig",
    "agree",
    "clock_for",
]
_PLACES = {
    "DeviceClock": "engine.run.clock",
    "DataError": "engine.model.data",
    "DataSpec": "engine.model.data",
    "Fabric": "engine.run.p2p.fabric",
    "HostClock": "engine.run.clock",
    "ModelSpec": "engine.model.spec",
    "OptimizerSpec": "engine.run.optimizer",
    "Policy": "engine.plan.lower",
    "StepResult": "engine.trainer",
    "Trainer": "engine.trainer",
    "TrainerConfig": "engine.trainer",
    "agree": "engine.connection",
    "clock_for": "engine.run.clock",
}
"""The module of each name."""


def __getattr__(name: str) -> object:
    """Import a name of `__all__` when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
