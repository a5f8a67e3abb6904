"""Costs measured here, by a process of its own that has torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from engine.model.descriptions import CostRequest
from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.config.described import ask
from ppbench.errors import UsageError
from ppbench.planning.cost_set import MEASURED, CostSet, Setting

OnProgress = Callable[[str], None]


def part_of(answered: dict[str, Any]) -> StageCosts:
    """The costs of a part of a model that was measured alone."""
    return StageCosts(**answered | {"layers": ()})


def measure_costs(request: CostRequest, on_progress: OnProgress | None = None) -> CostSet:
    """Measure the costs of a model's layers on this machine, and of a link where it is asked for.

    `on_progress` receives a line for each part of the work, among them those of settings that have
    no room and are left out. Blocks until the process is over. Raises UsageError with what cannot
    be measured.
    """
    tell = on_progress or (lambda _line: None)
    name = request.identity.spec.name
    answer = ask("costs", dataclasses.asdict(request), f"{name}: costs cannot be measured", tell)
    if (problem := answer.get("problem")) is not None:
        raise UsageError(
            f"{name}: costs cannot be measured: {problem['key']}: {problem['message']}"
        )
    for left_out in answer["left_out"]:
        setting = Setting(left_out["microbatch_size"], left_out["recompute"])
        tell(f"{name}, {setting}: left out: {left_out['reason']}")
    if not answer["costs"]:
        reasons = "; ".join(str(left_out["reason"]) for left_out in answer["left_out"])
        raise UsageError(
            f"{name}: costs cannot be measured in any setting: {reasons}; ask for smaller "
            "microbatches, or give costs in a file"
        )
    by_setting = {
        Setting(measured["microbatch_size"], measured["recompute"]): ModelCosts(
            part_of(measured["before"]),
            tuple(map(part_of, measured["layers"])),
            part_of(measured["after"]),
            measured["action_ns"],
        )
        for measured in answer["costs"]
    }
    return CostSet(
        name,
        request.identity.spec.dtype,
        request.seq_len,
        str(request.optimizer.get("name", "adamw")),
        request.device,
        MEASURED,
        by_setting,
        LinkCosts() if answer["link"] is None else LinkCosts(**answer["link"]),
        str(answer.get("device_name", "")),
    )
