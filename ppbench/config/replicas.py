"""Combinations of the settings of replicas and their shards that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engine.model.descriptions import Problem
from ppbench.config.case import Case
from ppbench.config.programs import num_stages_of, sharding_of

_ONLY_OF: Final = {
    "residency": "zero3",
    "look_ahead": "zero3",
    "every_backward": "zero2",
    "max_active_stages": "torch",
}
"""The policy that each further setting of `[sharding]` is for."""


def decisive(case: Case) -> Case:
    """The settings of a case by which transfers and collectives are placed, and no others."""
    names = [name for name in vars(case) if name.startswith(("transfer_", "sharding_"))]
    kept = {name: getattr(case, name) for name in (*names, "replicas")}
    return Case(**kept)


def emulated_collectives(case: Case) -> dict[str, tuple[float, ...]]:
    """What replicas of emulated stages take, by its name in `[emulated]`."""
    names = ("gather_ms", "reduce_ms", "replica_factors")
    return {name: getattr(case, f"emulated_{name}") for name in names}


def problems_of_sharding(case: Case) -> Iterator[Problem]:
    """Problems of the settings of `[sharding]` with each other and with the replicas."""
    policy = case.sharding_policy
    if case.replicas == 1 and policy != Case.sharding_policy:
        message = f'"{policy}" is for replicas, of which there is 1; exclude it, or set replicas'
        yield Problem("sharding.policy", message)
    for name, owner in _ONLY_OF.items():
        field = f"sharding_{name}"
        if policy != owner and getattr(case, field) != getattr(Case, field):
            message = f'applies only with sharding.policy = "{owner}", got "{policy}"'
            yield Problem(f"sharding.{name}", message)
            return
    try:
        sharding_of(case)
    except ValueError as error:
        yield Problem("sharding.look_ahead", str(error))


def problems_of_emulated_replicas(case: Case) -> Iterator[Problem]:
    """Problems of what emulated replicas take."""
    given = emulated_collectives(case)
    num_factors, num_stages = len(given.pop("replica_factors")), num_stages_of(case)
    if num_factors not in (0, case.replicas):
        message = f"{num_factors} factors for replicas = {case.replicas}; give one for each"
        yield Problem("emulated.replica_factors", message)
    for name, listed in given.items():
        if len(listed) not in (0, 1, num_stages):
            message = f"{len(listed)} times for {num_stages} stages; give one number, or one each"
            yield Problem(f"emulated.{name}", message)


def problems_of_torch_replicas(case: Case) -> Iterator[Problem]:
    """Problems of replicas with torch's schedules, whose stages torch shares, too."""
    if case.replicas == 1:
        return
    if case.sharding_policy in ("zero1", "zero2"):
        message = f'"torch" has no policy "{case.sharding_policy}". It has: none, ddp, zero3, torch'
        yield Problem("sharding.policy", message)
    if case.sharding_max_active_stages != Case.sharding_max_active_stages:
        message = f'"torch" unshards {Case.sharding_max_active_stages} stages, got '
        message += str(case.sharding_max_active_stages)
        yield Problem("sharding.max_active_stages", message)
