"""Finds the program of `schedule = "auto"` for a model: by its layers' costs, measured here.

    costs of layers --partition--> stages --limit in bytes--> problem --solver--> program

    limit of a rank = memory_limit - parameters, gradients, optimizer - what an action needs

Rank 0 does this for all (`engine.connection`): no two would measure the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.configuration import AUTOCAST, TrainerConfig, data_spec_of, recomputed_stages
from engine.model.stage_module import Model
from engine.plan.model_costs import StageCosts
from engine.plan.program import Program
from engine.plan.schedules.registry import ScheduleError
from engine.plan.simulate import Durations
from engine.plan.sizes import size_text
from engine.run.layer_costs import measure_model_costs
from ppbench.planning.solver.choice import best_program, placements_of, with_whole_backwards
from ppbench.planning.solver.problem import Problem


class MemoryLimitError(ScheduleError):
    """No program keeps within the memory limit; the message has the least that would do."""


def found_program(
    config: TrainerConfig, model: Model, partition: Sequence[range], device: torch.device
) -> Program:
    """The program of a step, for the costs of the stages on this device; not yet checked.

    Takes seconds. Raises MemoryLimitError, and what measuring raises.
    """
    recomputed = recomputed_stages(config, len(partition))
    # What recomputes has nothing to keep for a later half, and what is compiled is left whole.
    whole = {stage for stage, is_on in enumerate(recomputed) if is_on or config.compile}
    limit = config.limit_bytes
    if config.world_size == 1 and limit is None:
        costs = [_EQUAL] * len(partition)  # a rank alone waits for nobody
    else:
        data, dtype = data_spec_of(config, model), AUTOCAST[config.autocast]
        shape = (data.microbatch_size, data.longest)
        autocast = None if dtype is None else torch.autocast(device.type, dtype)
        measured = {  # of all stages, each of its layers as they are run there
            is_on: measure_model_costs(
                model, shape, device, autocast, config.optimizer, recompute=is_on
            ).of_stages(partition)
            for is_on in set(recomputed)
        }
        costs = [measured[is_on][stage] for stage, is_on in enumerate(recomputed)]
    # Nanoseconds and bytes; a whole backward is an I that leaves nothing for a W.
    halves = [
        (one.backward_ns, 0, 0)
        if stage in whole
        else (one.input_ns, one.weight_ns, one.held_after_input)
        for stage, one in enumerate(costs)
    ]
    inputs, weights, left = zip(*halves, strict=True)
    held = tuple(max(one.held_after_forward, kept) for one, kept in zip(costs, left, strict=True))
    forwards = tuple(one.forward_ns for one in costs)
    durations = Durations(forwards, inputs, weights, tuple(one.backward_ns for one in costs))
    num_microbatches = config.data.num_microbatches
    problems, least = [], []
    for placement in placements_of(config.world_size, config.stages_per_rank or 1):
        fixed = []  # what each rank needs besides activations: its stages' own, an action's most
        for rank in range(config.world_size):
            own = [costs[stage] for stage in placement.stages_of(rank)]
            static_bytes = sum(stage.static_bytes for stage in own)
            fixed.append(static_bytes + max(stage.transient_bytes for stage in own))
        limits: tuple[int, ...]
        if placement.world_size == 1:
            limits = (sum(held),)  # one microbatch after the other takes no longer
        elif limit is None:
            limits = (sum(held) * num_microbatches,) * placement.world_size
        else:
            limits = tuple(limit - own_bytes for own_bytes in fixed)
        optimizers = tuple(
            sum(costs[stage].optimizer_ns for stage in placement.stages_of(rank))
            for rank in range(placement.world_size)
        )
        problem = Problem(
            placement,
            num_microbatches,
            durations,
            limits,
            held,
            left,
            optimizer_ns=optimizers,
            meets=bool(config.optimizer.clip_norm) or config.replicas > 1,
        )
        needs = [own + least for own, least in zip(fixed, problem.least_limits, strict=True)]
        if limit is None or max(needs) <= limit:
            problems.append(problem)
        least.append((max(needs), needs.index(max(needs)), fixed))
    if not problems:
        assert limit is not None
        needed, rank, fixed = min(least)
        raise MemoryLimitError(
            f"memory_limit {size_text(limit)}: no program keeps within it; the least that would do "
            f"is {size_text(needed)}: rank {rank} needs {size_text(fixed[rank])} whatever it "
            f"holds, and {size_text(needed - fixed[rank])} for one microbatch. Recompute, take "
            "smaller microbatches or more ranks, or raise the limit"
        )
    return with_whole_backwards(best_program(problems), whole)


_EQUAL = StageCosts(1, 2, 1, 1, 1, 1, 0, 0, 0, 0)
