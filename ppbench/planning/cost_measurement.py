"""Costs measured here, by a process of its own that has torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from engine.model.descriptions import CostRequest
from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.errors import UsageError
from ppbench.planning.cost_set import MEASURED, CostSet, Setting

COMMAND = (sys.executable, "-m", "engine.costs")
_NOISE = ("USDT:", "[W")  # what torch's profiler prints

OnProgress = Callable[[str], None]


def measure_costs(request: CostRequest, on_progress: OnProgress | None = None) -> CostSet:
    """Measure the costs of a model's layers on this machine, and of a link where it is asked for.

    `on_progress` receives a line for each part of the work, among them those of settings that have
    no room and are left out. Blocks until the process is over. Raises UsageError with what cannot
    be measured.
    """
    tell = on_progress or (lambda _line: None)
    answer = _answer_to(request, tell)
    name = request.identity.model
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
            LayerCosts(**measured["costs"]["before"]),
            tuple(LayerCosts(**layer) for layer in measured["costs"]["layers"]),
            LayerCosts(**measured["costs"]["after"]),
            measured["costs"]["action_ns"],
        )
        for measured in answer["costs"]
    }
    return CostSet(
        name,
        request.identity.dtype,
        request.seq_len,
        str(request.optimizer.get("name", "adamw")),
        request.device,
        MEASURED,
        by_setting,
        LinkCosts() if answer["link"] is None else LinkCosts(**answer["link"]),
        str(answer.get("device_name", "")),
    )


def _answer_to(request: CostRequest, tell: OnProgress) -> dict[str, Any]:
    """Run the process; its notes are passed on, and the last of them explain its failure."""
    last = "no output"
    with tempfile.TemporaryFile("w+") as question, tempfile.TemporaryFile("w+") as answer:
        json.dump(dataclasses.asdict(request), question)
        question.seek(0)
        with subprocess.Popen(
            COMMAND, stdin=question, stdout=answer, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    if text := line.strip():
                        last = text
                        if not text.startswith(_NOISE):
                            tell(text)
            except BaseException:
                process.kill()
                raise
        answer.seek(0)
        lines = answer.read().splitlines()
    if process.returncode != 0 or not lines:
        raise UsageError(
            f"{request.identity.model}: costs cannot be measured; python -m engine.costs ended "
            f"with exit code {process.returncode}: {last}"
        )
    result: dict[str, Any] = json.loads(lines[-1])
    return result
