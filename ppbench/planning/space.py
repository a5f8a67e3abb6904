"""The space of a plan: which pipelines there are, with a bound on the step of each.

    schedule x ranks x stages per rank x microbatch size      a `Shape`, whose program is known
             x layers by stage x recomputation by stage       solved for a shape, see `fitting`

The number of microbatches follows from the global batch. A shape's bound needs no program: the
heaviest rank bears at least its share of the model, and no layer is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.plan.model_costs import ModelCosts
from engine.plan.program import Placement, loop_placement, v_placement
from engine.plan.schedules.registry import ShapeError, find_schedule, shape_of
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.plan import AUTO, PlanRequest


class Shape(NamedTuple):
    """A pipeline without the layers of its stages."""

    schedule: str
    placement: Placement
    microbatch_size: int
    num_microbatches: int
    num_slices: int = 1  # that each microbatch comes in

    @property
    def ranks(self) -> int:
        return self.placement.world_size

    @property
    def stages_per_rank(self) -> int:
        return self.placement.num_stages // self.placement.world_size

    @property
    def key_of_costs(self) -> tuple[int, int, int]:
        """The costs of its stages depend on this; `Search.table` takes it."""
        return self.microbatch_size, self.directions, self.num_slices

    @property
    def directions(self) -> int:
        """The pipelines that go over its ranks, each with all of the model."""
        return self.placement.directions


def shapes(request: PlanRequest, costs: CostSet) -> Iterator[Shape]:
    """Every shape that a schedule can have and that the model has layers for."""
    for ranks in request.ranks:
        for size in sizes_of(request, costs):
            model = model_of(request, costs, size)
            num_microbatches = request.global_batch // size
            for schedule in request.schedules:
                for v in request.stages_per_rank:
                    if schedule == AUTO:
                        placements = placements_of(ranks, v)
                    else:
                        try:
                            shape_of(schedule, ranks, num_microbatches, v)
                        except ShapeError:
                            continue
                        placements = [find_schedule(schedule).place(ranks, v)]
                    num_slices = 1
                    if schedule != AUTO and find_schedule(schedule).in_slices is not None:
                        num_slices = len(request.slices)  # with none it is another schedule
                    for placement in placements if num_slices else []:
                        if sum(least_layers(model, placement.depth)) <= len(model.layers):
                            yield Shape(schedule, placement, size, num_microbatches, num_slices)


def placements_of(world_size: int, stages_per_rank: int) -> list[Placement]:
    """Where the solver may put stages: in loops over the ranks, or in ways down and up them."""
    placements = [loop_placement(world_size, stages_per_rank)]
    if stages_per_rank > 1 and world_size > 1:
        placements.append(v_placement(world_size, stages_per_rank))
    return placements


def sizes_of(request: PlanRequest, costs: CostSet) -> list[int]:
    """The microbatch sizes that divide the global batch and have the costs that are needed."""
    known = sorted({size for size, _ in costs.by_setting})
    wanted = request.microbatch_sizes or known
    recompute = request.recompute == "all"
    divisors = [size for size in wanted if request.global_batch % size == 0]
    return [size for size in divisors if (size, recompute) in costs.by_setting]


def model_of(request: PlanRequest, costs: CostSet, size: int) -> ModelCosts:
    """The costs without recomputation, unless all layers recompute."""
    return costs.by_setting[Setting(size, request.recompute == "all")]


def least_layers(model: ModelCosts, depth: int) -> list[int]:
    """The fewest layers that each part may have: no stage may be without anything to train."""
    least = [1] * depth
    if depth > 1:
        least[0] -= model.before.forward_ns > 0
        least[-1] -= model.after.forward_ns > 0
    return least


def least_step_ns(shape: Shape, model: ModelCosts) -> float:
    """A bound on the step of every program and partition of a shape.

    All microbatches pass the heaviest rank, which bears at least the mean of all ranks, and at
    least the heaviest layer. Of two directions each has half of the microbatches.
    """
    alone, placement = [layer.quickest_ns for layer in model.parts], shape.placement
    share = (sum(alone) + 2 * model.action_ns * placement.depth) / shape.ranks
    return shape.num_microbatches * max(share, max(alone) / placement.directions)
