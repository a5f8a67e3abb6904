"""The program of a case with `schedule = "auto"`: the solver's best over the placements there are.

emulated stages     the case's times              a limit in activations
a model             the costs of its layers       a limit in bytes, and memory as plans count it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.model.descriptions import Facts
from engine.model.partition import balance, partition_layers, times_to_balance
from engine.plan.action import Op
from engine.plan.model_costs import ModelCosts, StageCosts
from engine.plan.program import Program
from engine.plan.sizes import bytes_of, size_text
from engine.plan.walk import TransferModel
from ppbench.config.case import Case
from ppbench.config.programs import durations_of, link_ns_of, num_stages_of
from ppbench.errors import UsageError
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.fitting import Fit, Layout
from ppbench.planning.layout import Partition
from ppbench.planning.plan import AUTO
from ppbench.planning.search import preference
from ppbench.planning.solver.problem import Problem, counted
from ppbench.planning.solver.solver import solve
from ppbench.planning.solving import one_by_one, solved
from ppbench.planning.space import Shape, placements_of
from ppbench.planning.stages import StageTable, never_quicker

MOST_EFFORT = 0.3
"""The effort of the solver over all placements takes about a second."""
ACTIONS_OF_MOST = 1000
"""A step of as many computations is worth that; smaller ones take their share."""


class MemoryLimitError(UsageError):
    """No program keeps within the memory limit; the message has the least that would do."""


def effort_of(num_stages: int, num_microbatches: int) -> float:
    """The effort that a step of so many computations is worth."""
    return MOST_EFFORT * min(1.0, 3 * num_microbatches * num_stages / ACTIONS_OF_MOST)


def best_program(problems: Sequence[Problem]) -> Program:
    """The fastest program found for the same step on several placements, called `auto`.

    It is the same each time. Raises NoProgramError where a problem has no program.
    """
    of_all = effort_of(problems[0].placement.num_stages, problems[0].num_microbatches)
    solutions = [solve(problem, of_all / len(problems)) for problem in problems]
    best = min(solutions, key=lambda solution: solution.step_ns)
    return replace(best.program, schedule=AUTO)


def program_of_times(case: Case) -> Program:
    """The program of an emulated case; a limit counts activations of one microbatch of a stage."""
    limit = case.num_microbatches * case.stages_per_rank
    if case.memory_limit != Case.memory_limit:
        limit = int(case.memory_limit)
    links_ns = link_ns_of(case)
    mean_ns = round(sum(links_ns) / max(1, len(links_ns)))  # the solver knows one link
    given = case.num_microbatches, durations_of(case), limit, TransferModel(mean_ns)
    placements = placements_of(case.world_size, case.stages_per_rank)
    problems = (counted(placement, *given) for placement in placements)
    return best_program([replace(problem, meets=case.meets) for problem in problems])


def program_of_costs(case: Case, partition: Partition, costs: CostSet) -> Program:
    """The program of a model's case, for its layers by stage. Raises MemoryLimitError."""
    num_stages, limit = len(partition), case.memory_limit
    memory_bytes = None if limit == Case.memory_limit else bytes_of(limit)
    recompute = case.train_recompute_stages or (case.train_recompute,) * num_stages
    models = models_of(case, costs, set(recompute))
    if case.train_compile:
        models = {is_on: model.with_each(_left_whole) for is_on, model in models.items()}
    table, layout = StageTable(never_quicker(models)), Layout(partition, recompute)
    placements = placements_of(case.world_size, case.stages_per_rank)
    effort = effort_of(num_stages, case.num_microbatches) / len(placements)
    fits = []
    for placement in placements:
        shape = Shape(AUTO, placement, case.train_microbatch_size, case.num_microbatches)
        program = one_by_one(placement, case.num_microbatches)
        fits.append(Fit(shape, program, table, costs, "none", meets=case.meets))
    solutions = [solved(fit, layout, memory_bytes, effort) for fit in fits]
    found = [one for one in solutions if one is not None]
    if not found:
        least = min(max(fit.peaks(layout)) for fit in fits)
        raise MemoryLimitError(
            f"memory_limit {limit}: no program keeps within it; the least that would do is "
            f"{size_text(least)}. Recompute, take smaller microbatches or more ranks, or raise the "
            "limit"
        )
    program = replace(min(found, key=preference).program, schedule=AUTO)
    return with_whole_backwards(program) if case.train_compile else program


def partition_of(case: Case, costs: CostSet, facts: Facts) -> Partition:
    """The layers of each stage of a model's case. Raises PartitionError."""
    kind, num_stages = case.model_partition, num_stages_of(case)
    model = next(iter(costs.by_setting.values()))
    by: Sequence[float] = facts.part_sizes if kind == "parameters" else ()
    if kind == "measured":
        is_on = case.train_recompute
        by = times_to_balance(models_of(case, costs, {is_on})[is_on])
    if not by:
        return tuple(partition_layers(kind, len(model.layers), num_stages))
    return tuple(balance(by, num_stages))


def models_of(case: Case, costs: CostSet, modes: set[bool]) -> Mapping[bool, ModelCosts]:
    """The costs of a case's microbatches, by whether layers recompute. Raises UsageError."""
    settings = {is_on: Setting(case.train_microbatch_size, is_on) for is_on in modes}
    for setting in settings.values():
        if setting not in costs.by_setting:
            raise UsageError(f"{case.model_preset}, {setting}: no room to measure their costs")
    return {is_on: costs.by_setting[setting] for is_on, setting in settings.items()}


def _left_whole(layer: StageCosts) -> StageCosts:
    """The costs of a layer whose I does all of a backward, and W nothing."""
    return replace(layer, input_ns=layer.backward_ns, weight_ns=0, held_after_input=0)


def with_whole_backwards(program: Program) -> Program:
    """The program with whole backwards in place of I, and without W."""
    rows = tuple(
        tuple(a._replace(op=Op.B) if a.op is Op.I else a for a in row if a.op is not Op.W)
        for row in program.actions
    )
    return replace(program, actions=rows)
