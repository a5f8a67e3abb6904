"""Predicted steps of a run if something were different, at its measured costs.

Each prediction replays a program with the run's mean costs, so it compares with the run as
modelled, not as measured: all of them leave out jitter and host time between actions. Where there
are replicas, they are replayed together, each with its own mean costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import pandas as pd

from engine.plan.action import Op
from engine.plan.collectives import (
    CollectivePolicy,
    NoCollectives,
    add_collectives,
    with_sums_of_copies,
)
from engine.plan.lower import Policy, lower
from engine.plan.messages import Edge
from engine.plan.program import Program, from_json
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, ScheduleError, build_program
from ppbench.analysis.collectives import Moving
from ppbench.analysis.costs import (
    Costs,
    slow_link,
    slow_stage,
    with_link_like_others,
    with_stage_like_others,
)
from ppbench.analysis.replicas import ReplicaCosts
from ppbench.analysis.running import Following, steps_of

LEAST_GAIN = 0.005
"""Smallest share of the step that removing an outlier must save to be reported."""
LIKE_OTHERS = "like the others"
HALVES_NOTE = "I and W are assumed to take half of B each: this run did not split its backward."


@dataclass(frozen=True)
class Posting:
    """The policy of posting receives; see `engine.plan.lower`."""

    policy: Policy
    look_ahead: int

    def lower(self, program: Program) -> Program:
        """The program with its transfers. Raises ProgramError if it could hang."""
        return lower(program, self.policy, self.look_ahead)


def posting_of(run: pd.Series) -> Posting:
    """How a run posted its receives."""
    return Posting(Policy(run["transfer_policy"]), int(run["transfer_look_ahead"]))


@lru_cache(maxsize=4)  # launches of one case follow each other, and have one program
def program_in(text: str, posting: Posting) -> Program:
    """The lowered program of a run's row, without collectives."""
    return posting.lower(from_json(text))


@dataclass(frozen=True)
class Modelled:
    """A run as it is modelled: its program with transfers and collectives, and its costs."""

    lowered: Program
    costs: ReplicaCosts
    posting: Posting
    policy: CollectivePolicy
    is_written: bool = False  # whether its file says where the collectives are, not the policy
    emulated: Moving | None = None  # the times of emulated collectives, the same for every policy
    following: Following | None = None  # how its steps follow each other, if they do

    @classmethod
    def alone(
        cls, lowered: Program, costs: Costs, posting: Posting, following: Following | None = None
    ) -> Modelled:
        """A run of one replica."""
        own = ReplicaCosts(costs, (costs,), {})
        return cls(lowered, own, posting, NoCollectives(), following=following)

    def changed(self, change: Callable[[Costs], Costs]) -> Modelled:
        """The same with other costs of computations and messages, for each replica."""
        return replace(self, costs=self.costs.changed(change))

    def answer(self, question: str) -> WhatIf:
        """What its step takes."""
        program, times = self.lowered, self.costs.times(self.lowered)
        ((step_ns, by_replica),) = steps_of(program, [(times, self.following)])
        idle_ns = sum(map(sum, by_replica))
        capacity_ns = len(by_replica) * program.world_size * step_ns
        share = program.world_size / program.placement.depth / program.num_slices
        held = max(peak_activations(program.compute_only())) * share
        return WhatIf(question, step_ns, idle_ns, idle_ns / max(1, capacity_ns), held)


@dataclass(frozen=True)
class WhatIf:
    """A prediction; `held` is in microbatches of a rank's whole share of the model."""

    question: str
    step_ns: int
    idle_ns: int  # of all ranks
    bubble_fraction: float
    held: float


@dataclass(frozen=True)
class Inapplicable:
    """A schedule that does not allow this run's shape, and the reason."""

    question: str
    reason: str


def as_modelled(run: Modelled) -> WhatIf:
    """The run itself as modelled."""
    return run.answer("as it is")


def without_outliers(run: Modelled) -> Iterator[WhatIf]:
    """The program that ran, with its slow stage or link like the others.

    An answer that saves less than `LEAST_GAIN` of the step is left out.
    """
    stage, link = slow_stage(run.costs.mean), slow_link(run.costs.mean)
    changed = {}
    if stage is not None:
        changed[f"stage {stage.index}"] = run.changed(
            lambda costs: with_stage_like_others(costs, stage.index)
        )
    if link is not None:
        changed[f"link {link.index}-{link.index + 1}"] = run.changed(
            lambda costs: with_link_like_others(costs, link.index)
        )
    now = as_modelled(run)
    for name, equalized in changed.items():
        answer = equalized.answer(f"{name} {LIKE_OTHERS}")
        if answer.step_ns < (1 - LEAST_GAIN) * now.step_ns and answer.idle_ns < now.idle_ns:
            yield answer


def same_program(run: Modelled) -> Iterator[WhatIf]:
    """The program that ran, with perfect balance, with free transfers, and with both."""
    balanced = run.changed(Costs.balanced)
    yield balanced.answer("perfect balance")
    yield run.changed(_without_transfers).answer("free transfers")
    yield balanced.changed(_without_transfers).answer("perfect balance, free transfers")


def _without_transfers(costs: Costs) -> Costs:
    return replace(costs, by_channel={})


def other_schedules(run: Modelled) -> Iterator[WhatIf | Inapplicable]:
    """Every other registered schedule with the same ranks, microbatches and policy.

    A schedule with another number of stages gets the same model, cut differently: a stage's cost is
    spread evenly over its part, but for embedding and head. A message costs the mean of its
    direction in this run.
    """
    lowered, placements = run.lowered, [run.lowered.placement]
    for name, schedule in SCHEDULES.items():
        v = schedule.stages_per_rank.default
        question = f"{name}, {v} stages per rank" if v > 1 else name
        if name == lowered.schedule and v * lowered.world_size == lowered.num_stages:
            continue
        if schedule.in_slices is not None and not lowered.slices:
            yield Inapplicable(question, "takes microbatches in slices; this run has whole ones")
            continue
        shape = lowered.world_size, lowered.num_microbatches // lowered.num_slices, v
        slices = lowered.slices if schedule.takes_slices(lowered.mode) else ()
        try:
            program = build_program(name, *shape, mode=lowered.mode, slices=slices)
        except ScheduleError as error:
            yield Inapplicable(question, str(error))
            continue
        if not lowered.has_backward and program.placement in placements:  # it is the same program
            continue
        placements.append(program.placement)
        yield _with_program(run, program).answer(question)


def needs_halves(costs: Costs) -> bool:
    """Whether the costs of the backward's halves are unknown (see HALVES_NOTE)."""
    return Op.B in costs.by_stage and None in costs.by_stage.get(Op.I, (None,))


def _with_program(run: Modelled, program: Program) -> Modelled:
    # What is an action of a slice now may be one of a whole microbatch.
    longer = run.lowered.num_slices / program.num_slices
    # The model's parts; two directions have copies of each.
    num_stages, num_now = program.placement.depth, run.lowered.placement.depth
    lowered = run.posting.lower(program)
    if len(run.costs.own) > 1:
        lowered = add_collectives(lowered, run.policy)
    else:
        lowered = with_sums_of_copies(lowered)
    slices = [
        (cut * num_now / num_stages, (cut + 1) * num_now / num_stages) for cut in range(num_stages)
    ]

    def recut(costs: Costs) -> Costs:
        """The same total costs, for the model cut into equal slices.

        What the first and the last stage take beyond the ones between is their embedding and their
        head, which stay whole on the first and the last slice.
        """
        of_stages = []  # F, B, I and W of each stage: the backward is both halves, or is halved
        for stage in range(run.lowered.num_stages):
            given = {op: of_op[stage] for op, of_op in costs.by_stage.items()}
            whole, first, second = given.get(Op.B), given.get(Op.I), given.get(Op.W)
            if first is None or second is None:
                whole = whole or 0  # without a backward
                first, second = whole // 2, whole - whole // 2
            backward = first + second if whole is None else whole
            of_stages.append((given[Op.F] or 0, backward, first, second))
        copies = [of_stages[part::num_now] for part in range(num_now)]
        totals = [tuple(map(statistics.mean, zip(*each, strict=True))) for each in copies]
        by_stage = {}
        for op, of_op in zip((Op.F, Op.B, Op.I, Op.W), zip(*totals, strict=True), strict=True):
            layers, beyond = list(map(float, of_op)), [0.0, 0.0]
            if num_now > 2 and num_stages != num_now:
                typical = statistics.median(layers[1:-1])
                beyond = [max(0.0, layers[at] - typical) for at in (0, -1)]
            layers[0] -= beyond[0]
            layers[-1] -= beyond[1]
            pieces = [
                sum(
                    ns * max(0.0, min(end, stage + 1) - max(begin, stage))
                    for stage, ns in enumerate(layers)
                )
                for begin, end in slices
            ]
            pieces[0] += beyond[0]
            pieces[-1] += beyond[1]
            pieces = [ns * longer for ns in pieces]
            by_stage[op] = tuple(map(round, pieces)) * program.placement.directions
        by_channel: dict[Edge, int] = {}
        for hop in (1, -1):  # a message costs the mean of its direction
            ends = costs.by_channel.items()
            known = [ns for channel, ns in ends if channel.target - channel.source == hop]
            mean = round(longer * sum(known) / len(known)) if known else 0
            by_channel |= {Edge(stage, stage + hop): mean for stage in range(program.num_stages)}
        return Costs(by_stage, by_channel)

    moving = run.costs.moving
    if program.num_stages != run.lowered.num_stages:  # all stages are alike
        num_parts = num_now if run.emulated is not None else num_stages
        num_parts *= run.lowered.placement.directions
        sums: dict[Op, int] = {}
        for (op, _), ns in moving.items():
            sums[op] = sums.get(op, 0) + ns
        moving = {
            (op, stage): round(ns / num_parts)
            for op, ns in sums.items()
            for stage in range(program.num_stages)
        }
    costs = replace(run.costs.changed(recut), moving=moving)
    return replace(run, lowered=lowered, costs=costs)
