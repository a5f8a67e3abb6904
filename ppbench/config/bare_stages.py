"""Stages that a partition leaves without parameters, known before anything is started.

A list of layers with a 0 in it is deliberate and is left alone. What `model.partition =
"measured"` gives is known only to the run, which then has the caution `bare_stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from engine.model.answers import Facts, Identity
from engine.model.partition import Costs, balance, partition_layers
from ppbench.config.case import Case
from ppbench.config.models import identity_of
from ppbench.config.possible import num_stages_of


def notes_on_stages(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> list[str]:
    """A sentence for each way of cutting a model that leaves stages with nothing to train."""
    return list(dict.fromkeys(_notes(cases, facts)))


def _notes(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> Iterator[str]:
    seen: set[tuple[Identity, str, int]] = set()
    for case in cases:
        identity, partition = identity_of(case), case.model_partition
        known = facts.get(identity)
        if isinstance(partition, tuple) or known is None or known.costs is None:
            continue
        key = (identity, partition, num_stages_of(case))
        if key in seen:
            continue
        seen.add(key)
        if bare := stages_without(known.costs, partition, num_stages_of(case)):
            yield _note(case, bare)


def stages_without(costs: Costs, partition: str, num_stages: int) -> list[int]:
    """The stages without parameters; none for a partition that is decided by the run."""
    if partition == "measured":
        return []
    if partition == "parameters":
        layers = balance(costs, num_stages)
    else:
        layers = partition_layers(partition, len(costs.layers), num_stages)
    return [stage for stage, size in enumerate(costs.of_stages(layers)) if size == 0]


def _note(case: Case, bare: list[int]) -> str:
    num_stages = num_stages_of(case)
    stages = ", ".join(map(str, bare))
    have = f"stage {stages} has" if len(bare) == 1 else f"stages {stages} have"
    remedy = "other split points" if case.model_split == "trace" else "another model.partition"
    return (
        f"{case.model_preset} on {num_stages} stages (world_size {case.world_size}): {have} no "
        f"parameters, so nothing is trained there; use fewer ranks or stages per rank, or {remedy}"
    )
