"""The program of `schedule = "auto"`: which placement, within which limit, by which costs."""

import re

import pytest
from worlds import HEAD, LAYER, MIB, costs_of

from engine.model.descriptions import Facts
from engine.plan.check import check
from engine.plan.model_costs import NOTHING, LinkCosts, ModelCosts
from engine.plan.period import period_ns
from engine.plan.predict import Durations, predict
from engine.plan.program import loop_placement, v_placement
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import build_program
from ppbench.config.case import Case
from ppbench.planning.automatic import (
    MemoryLimitError,
    best_program,
    partition_of,
    program_of_costs,
)
from ppbench.planning.cost_set import Setting
from ppbench.planning.fitting import Fit, Layout
from ppbench.planning.solver.problem import NoProgramError, counted
from ppbench.planning.space import Shape, placements_of
from ppbench.planning.stages import StageTable

COSTS = costs_of({(1, False): ModelCosts(NOTHING, (LAYER,) * 8, HEAD)}, LinkCosts(1e5, 1e10, 0.05))


def problems(p, v, m, durations, limit):
    return [counted(place, m, durations, limit) for place in placements_of(p, v)]


def test_one_stage_per_rank_is_a_loop_and_several_are_tried_as_a_v_too():
    assert placements_of(4, 1) == [loop_placement(4)]
    assert placements_of(4, 2) == [loop_placement(4, 2), v_placement(4)]
    assert placements_of(1, 3) == [loop_placement(1, 3)]


@pytest.mark.parametrize(("p", "v", "limit"), [(4, 1, 4), (2, 2, 4)])
def test_the_program_is_no_slower_than_any_schedule_within_the_limit(p, v, limit):
    m = 6
    durations = Durations(*(tuple(10 + (3 * s + k) % 5 for s in range(p * v)) for k in range(3)))
    found = best_program(problems(p, v, m, durations, limit))
    assert found.schedule == "auto"
    check(found)
    assert max(peak_activations(found)) <= limit
    makespan = predict(found, durations).makespan_ns
    names = {1: ("1f1b", "zb_h1", "afab", "zb_h2"), 2: ("zbv", "interleaved_1f1b", "v_min")}[v]
    rivals = [program for name in names if (program := build_program(name, p, m, v))]
    fitting = [rival for rival in rivals if max(peak_activations(rival)) <= limit]
    assert fitting
    assert all(makespan <= predict(rival, durations).makespan_ns for rival in fitting)


def test_a_limit_below_one_microbatch_has_no_program():
    with pytest.raises(NoProgramError):
        best_program(problems(2, 2, 3, Durations((1,) * 4, (1,) * 4, (1,) * 4), 1))


def case_of(**changes):
    return Case(**{"schedule": "auto", "world_size": 2, "num_microbatches": 6, **changes})


def needs_of(case, program, costs=COSTS):
    """The most that any rank needs, as plans count it."""
    partition = partition_of(case, costs, Facts())
    shape = Shape("auto", program.placement, 1, case.num_microbatches)
    models = {case.train_recompute: costs.by_setting[Setting(1, case.train_recompute)]}
    fit = Fit(shape, program, StageTable(models), costs, "none", meets=case.meets)
    layout = Layout(partition, (case.train_recompute,) * program.num_stages)
    return fit.candidate(layout, 0).most_bytes


def found(case):
    return program_of_costs(case, partition_of(case, COSTS, Facts()), COSTS)


def test_no_rank_needs_more_than_the_limit_down_to_the_least_that_is_said():
    with pytest.raises(MemoryLimitError, match="memory_limit 1 MiB: no program keeps") as caught:
        found(case_of(memory_limit="1 MiB"))
    least = float(re.search(r"least that would do is ([0-9.]+) MiB", str(caught.value))[1])
    steps = []
    for limit in (least, 1.2 * least, 1.5 * least, 4 * least):
        case = case_of(memory_limit=f"{limit:.2f} MiB")
        program = found(case)
        check(program)
        assert needs_of(case, program) <= limit * MIB
        steps.append(period_ns(program, Durations((4, 4), (4, 4), (4, 4)), meets=False))
    assert steps[-1] < steps[0]
    with pytest.raises(MemoryLimitError):
        found(case_of(memory_limit=f"{0.99 * least:.2f} MiB"))


def test_compiled_stages_have_whole_backwards():
    ops = {str(action.op) for row in found(case_of(train_compile=True)).actions for action in row}
    assert ops == {"F", "B"}


def test_with_one_microbatch_only_a_v_has_no_rank_that_waits_for_the_others_to_turn_back():
    assert found(case_of(stages_per_rank=2, num_microbatches=1)).placement == v_placement(2)


@pytest.mark.parametrize(
    ("partition", "expected"), [("uniform", [4, 4]), ("measured", [5, 3]), ((2, 6), [2, 6])]
)
def test_layers_are_put_on_stages_as_the_ranks_will(partition, expected):
    """A head as long as two layers."""
    layers = partition_of(case_of(model_partition=partition), COSTS, Facts())
    assert list(map(len, layers)) == expected
