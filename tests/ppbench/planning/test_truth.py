"""Plans in emulated worlds, against the best of all pipelines as simulated with the true costs."""

from exhaustive import best_step_ns, peak_bytes, true_step_ns
from worlds import FAMILIES, world

from ppbench.planning.plan import NoPlanError
from ppbench.planning.planner import make_plan

EFFORT = 0.2


def true_stages(proposal, truth):
    """The true costs of a proposal's stages."""
    configuration = proposal.configuration
    last = len(configuration.layers) - 1
    owned = zip(configuration.partition, configuration.recompute, strict=True)
    return [
        truth.by_setting[configuration.microbatch_size, recompute].of_stage(
            layers, is_first=stage == 0, is_last=stage == last
        )
        for stage, (layers, recompute) in enumerate(owned)
    ]


def regret_and_hit(seed):
    """How much longer the first choice truly takes than the best; whether its interval holds it.

    None where nothing fits, which both say.
    """
    here = world(seed)
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
