"""Predicted steps of a run with replicas, if these shared, or came together, in another way.

An all-reduce is a reduce-scatter and a gather after it, which take the same time each (Patarasuk
and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). So the collectives of one policy tell what those of
another take:

    policy             UNSHARD     REDUCE_GRAD
    DDP, ZeRO-1        none        all-reduce
    ZeRO-2             none        reduce-scatter
    ZeRO-3, window     gather      reduce-scatter

ZeRO-1 and ZeRO-2 also gather what the optimizer has updated, which is no part of the step that is
predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.plan.action import Op
from engine.plan.collectives import (
    CollectivePolicy,
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    add_collectives,
)
from ppbench.analysis.whatif import Inapplicable, Modelled, WhatIf

POLICY_NOTE = (
    "An all-reduce is assumed to take as long as a reduce-scatter and a gather; what ZeRO-1 and "
    "ZeRO-2 gather after the optimizer is no part of the step."
)
EARLIER = "gather one stage earlier"
_NAMES: dict[type[CollectivePolicy], str] = {
    NoCollectives: "none",
    DataParallel: "DDP",
    Zero1: "ZeRO-1",
    Zero2: "ZeRO-2",
    Zero3: "ZeRO-3",
    TorchWindow: "torch's window",
}


def other_sharing(run: Modelled) -> Iterator[WhatIf | Inapplicable]:
    """The program that ran, with free collectives, replicas alike, and other policies."""
    if run.lowered.has_collectives:
        yield replace(run, costs=run.costs.without_collectives()).answer("free collectives")
    if len(run.costs.own) == 1:
        return
    if any(own != run.costs.mean for own in run.costs.own):
        yield replace(run, costs=run.costs.alike()).answer("replicas alike")
    if not run.lowered.has_backward:  # no gradients are shared
        return
    now, moving = run.policy, run.costs.moving
    others: list[tuple[str, CollectivePolicy]] = []
    if not run.is_written:
        match now:
            case Zero3():
                look_ahead = now.look_ahead + 1
                others = [(EARLIER, Zero3(max(now.residency, look_ahead + 1), look_ahead))]
            case TorchWindow():
                others = [(EARLIER, TorchWindow(now.max_active_stages + 1))]
            case Zero2():
                when = "once for a stage" if now.every_backward else "after every backward"
                others = [(f"gradients summed {when}", Zero2(not now.every_backward))]
    for other in (DataParallel(), Zero2(), Zero3()):
        if type(other) is not type(now) and not (_sums_whole(other) and _sums_whole(now)):
            others.append((f"{_NAMES[type(other)]} instead of {_NAMES[type(now)]}", other))
    reducing = {stage: ns for (op, stage), ns in moving.items() if op is Op.REDUCE_GRAD}
    for question, policy in others:
        under: dict[tuple[Op, int], int] = {}  # the times of its collectives
        if run.emulated is not None:
            under = {**run.emulated, **moving}
        elif not reducing:
            reason = "this run has timed no collective, from which others could be told"
            yield Inapplicable(question, reason)
            continue
        else:
            for stage, ns in reducing.items():
                half = ns // 2 if _sums_whole(now) else ns
                gather = moving.get((Op.UNSHARD, stage), half)
                under[Op.UNSHARD, stage] = gather
                under[Op.REDUCE_GRAD, stage] = half
                if _sums_whole(policy):
                    under[Op.REDUCE_GRAD, stage] = ns if _sums_whole(now) else ns + gather
        lowered, costs = add_collectives(run.lowered, policy), replace(run.costs, moving=under)
        if lowered.actions != run.lowered.actions:
            yield replace(run, lowered=lowered, costs=costs).answer(question)


def _sums_whole(policy: CollectivePolicy) -> bool:
    """Whether every replica gets the whole sum of the gradients."""
    return isinstance(policy, DataParallel | Zero1)
