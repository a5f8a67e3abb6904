"""Plans in emulated worlds, against the best of all pipelines as simulated with the true costs."""

import dataclasses

from exhaustive import best_step_ns, peak_bytes, stages_of, true_step_ns
from worlds import FAMILIES, MIB, measurement, world

from ppbench.planning.plan import NoPlanError
from ppbench.planning.planner import make_plan

EFFORT = 0.2


def true_stages(proposal, truth):
    """The true costs of a proposal's stages."""
    one = proposal.configuration
    by_mode = [
        stages_of(
            proposal.program,
            truth.by_setting[one.microbatch_size, mode],
            one.partition,
            truth.link,
        )
        for mode in (False, True)
    ]
    return [by_mode[recompute][stage] for stage, recompute in enumerate(one.recompute)]


def regret_and_hit(seed, made=world):
    """How much longer the first choice truly takes than the best; whether its interval holds it.

    None where nothing fits, which both say.
    """
    here = made(seed)
    best = best_step_ns(here.request, here.truth)
    try:
        first = make_plan(here.request, here.measured, effort=EFFORT).first
    except NoPlanError as error:
        assert best is None, f"world {seed}: {error}"
        return None
    assert best is not None, f"world {seed}: nothing fits"
    stages = true_stages(first, here.truth)
    limit = here.request.memory_bytes
    for rank, peak in enumerate(first.peak_bytes):
        assert peak == peak_bytes(first.program, stages, rank)
        assert limit is None or peak <= limit
    step = true_step_ns(first.program, stages, here.truth.link, here.request.meets)
    return step / best - 1, first.step_low_ns <= step <= first.step_high_ns


def test_the_first_choice_is_as_good_as_the_best_of_all_and_its_interval_holds_the_truth(
    is_thorough,
):
    num = 200 if is_thorough else 10
    outcomes = [one for one in map(regret_and_hit, range(num)) if one]
    within = sum(regret <= 0.01 for regret, _ in outcomes) / len(outcomes)
    hit = sum(is_hit for _, is_hit in outcomes) / len(outcomes)
    assert len(outcomes) >= 0.8 * num
    assert within >= (0.95 if is_thorough else 0.9)
    assert (0.85 <= hit <= 0.95) if is_thorough else hit >= 0.7


def test_the_solver_is_never_worse_than_the_families_alone():
    plain, more = world(1), world(1, (*FAMILIES, "auto"))
    families = make_plan(plain.request, plain.measured, effort=EFFORT)
    both = make_plan(more.request, more.measured, effort=EFFORT)
    assert both.first.step_ns <= families.first.step_ns
    assert all(proposal.bound_ns <= proposal.step_ns for proposal in both.proposals)


def two_way_world(seed):
    """A world whose ranks may be had by two pipelines, and whose copies sum 12 MiB a layer."""
    here = world(seed, ("chimera", "dualpipe"), most_layers=6)
    link = dataclasses.replace(here.truth.link, bytes_per_s=5e9)
    models = {
        setting: model.with_each(lambda layer: dataclasses.replace(layer, gradient_bytes=12 * MIB))
        for setting, model in here.truth.by_setting.items()
    }
    truth = dataclasses.replace(here.truth, by_setting=models, link=link)
    request = here.request
    if request.memory_bytes is not None and seed % 2:
        request = dataclasses.replace(request, memory_bytes=request.memory_bytes * 2)
    even = (request.ranks[0] + request.ranks[0] % 2,)
    request = dataclasses.replace(request, ranks=even, stages_per_rank=(2,), recompute="auto")
    return type(here)(request, truth, measurement(truth, seed + 1, 0.01))


def test_two_way_plans_are_as_good_as_the_best_of_all_two_way_pipelines(is_thorough):
    outcomes = [one for one in (regret_and_hit(n, two_way_world) for n in range(20)) if one]
    assert len(outcomes) >= 10
    assert sum(regret <= 0.01 for regret, _ in outcomes) >= 0.9 * len(outcomes)
    assert sum(is_hit for _, is_hit in outcomes) >= 0.7 * len(outcomes)
