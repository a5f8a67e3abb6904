"""Describes models to those who have no torch: what they are, and what their layers cost here.

    python -m engine.describe facts < request.json     a list of `Identity`s -> their `Facts`
    python -m engine.describe costs < request.json     a `CostRequest` -> see `engine.costs`

A process of its own. The answer is one line of JSON; progress is told on standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from engine import device_variables
from engine.costs import answer_to
from engine.model.descriptions import CostRequest, Identity
from engine.model.facts import facts_of
from engine.run.heap import keep_freed_memory


def facts(request: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(facts_of(Identity(**identity))) for identity in request]


def costs(request: dict[str, Any]) -> dict[str, Any]:
    keep_freed_memory()
    identity = Identity(**request.pop("identity"))
    settings = tuple((int(size), bool(recompute)) for size, recompute in request.pop("settings"))
    return answer_to(CostRequest(identity, settings=settings, **request))


def main() -> None:
    device_variables.prepare(os.environ)  # also for the other rank of a link
    questions: dict[str, Callable[[Any], object]] = {"facts": facts, "costs": costs}
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what factories and libraries print is not part of the answer
        answer.write(json.dumps(questions[sys.argv[1]](request)) + "\n")


if __name__ == "__main__":
    main()
