"""Tests of one turn of an arm on a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch.distributed as dist

from ppbench.run.job import PlannedRun
from ppbench.run.runtimes.runtime import RankContext
from ppbench.run.worker.measure import Arm
from ppbench.run.worker.node import Node


def test_a_window_holds_the_steps_and_samples_lie_around_it(tmp_path, monkeypatch):
    """Ranks begin after the node's sample: an older one would count the load of another turn."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    events: list[str] = []

    def steps(numbers: range) -> list[SimpleNamespace]:
        events.append("steps")
        return [SimpleNamespace(loss=1.0, num_tokens=8, spans=[], early=[]) for _ in numbers]

    member = SimpleNamespace(
        case=SimpleNamespace(world_size=2, device="cpu", replicas=1, train_clip_norm=1.0),
        runtime=SimpleNamespace(steps=steps),
        fabric=SimpleNamespace(clock=SimpleNamespace(error_ns=0)),
        wait=lambda: events.append("wait"),
    )
    node = SimpleNamespace(sample=lambda: events.append("sample"))
    item = SimpleNamespace(measure=None)
    arm = Arm(
        cast(PlannedRun, item),
        cast(RankContext, member),
        cast(Node, node),
        lambda *_: None,
        None,
        tmp_path,
    )
    arm.turn(0, 3)
    assert events == ["sample", "wait", "steps", "sample", "wait"]
