"""Plans: what is proposed, what is refused and why, and what is said."""

import contextlib
import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import FAMILIES, HEAD, LAYER, MIB, costs_of, world

from engine.plan.action import Action, Op
from engine.plan.check import check
from engine.plan.lower import lower
from engine.plan.model_costs import NOTHING, LinkCosts, ModelCosts
from engine.plan.predict import predict
from engine.plan.program import Program, loop_placement, two_way_placement, v_placement
from engine.plan.rules import ProgramError
from engine.plan.sizes import size_text
from engine.plan.slices import shares_of
from ppbench.config.case import Case
from ppbench.display.units import size as size_of
from ppbench.planning.handover import case_of
from ppbench.planning.plan import Loss, NoPlanError, PlanRequest
from ppbench.planning.planner import make_plan
from ppbench.planning.search import Search
from ppbench.planning.stages import durations_of
from ppbench.planning.words import as_dict

AGAIN = replace(LAYER, backward_ns=3e6, input_ns=2.1e6, held_after_forward=MIB)
COSTS = costs_of(
    {
        (size, recompute): ModelCosts(LAYER, (layer,) * 8, HEAD)
        for size in (1, 2)
        for recompute, layer in ((False, LAYER), (True, AGAIN))
    },
    LinkCosts(1e5, 1e10, 0.05),
)
REQUEST = PlanRequest((2,), None, 8, 128, FAMILIES, (1, 2), (1,))
EFFORT = 0.05


@functools.cache
def plan(**changes):
    return make_plan(replace(REQUEST, **changes), COSTS, effort=EFFORT)


SOLVED = {"schedules": ("1f1b", "zb_h1", "auto"), "memory_bytes": 210 * MIB}


def test_programs_of_proposals_are_legal_and_run_without_a_deadlock():
    for proposal in (*plan().proposals, *plan(**SOLVED).proposals):
        check(proposal.program)
        lower(proposal.program)
        configuration = proposal.configuration
        assert sum(configuration.layers) == 8
        assert configuration.global_batch == 8
        assert proposal.program.num_stages == len(configuration.recompute)


def test_proposals_come_in_order_and_say_what_they_are_sure_of():
    found = plan()
    steps = [proposal.step_ns for proposal in found.proposals]
    assert steps == sorted(steps)
    for one in found.proposals:
        assert one.bound_ns <= one.step_ns
        assert one.step_low_ns < one.step_ns < one.step_high_ns
        assert 0 <= one.bubble_fraction < 1
        assert one.tokens_per_s == pytest.approx(8 * 128 / one.step_ns * 1e9)
        assert all(low <= high for low, high in zip(one.peak_bytes, one.peak_bytes, strict=True))


def test_the_same_question_has_the_same_answer():
    assert plan(**SOLVED) == plan.__wrapped__(**SOLVED)


def test_what_is_known_exactly_has_no_interval():
    exact = costs_of(
        {
            setting: replace(
                model,
                before=replace(model.before, error=0),
                layers=tuple(replace(layer, error=0) for layer in model.layers),
                after=replace(model.after, error=0),
            )
            for setting, model in COSTS.by_setting.items()
        },
        replace(COSTS.link, error=0),
    )
    first = make_plan(REQUEST, exact, effort=EFFORT).first
    assert first.step_low_ns == first.step_ns == first.step_high_ns


def test_less_memory_makes_stages_recompute_and_is_never_quicker():
    free = plan(schedules=("1f1b",)).first
    assert not any(free.configuration.recompute)
    steps, needs = [free.step_ns], max(free.peak_bytes)
    for limit in (needs - 1, needs * 9 // 10, needs * 8 // 10):
        found = plan(schedules=("1f1b",), memory_bytes=limit)
        assert max(found.first.peak_bytes) <= limit
        steps.append(found.first.step_ns)
    assert steps == sorted(steps)
    assert any(found.first.configuration.recompute)


def test_without_recomputation_nothing_recomputes_and_with_all_everything_does():
    assert not any(any(one.configuration.recompute) for one in plan(recompute="none").proposals)
    assert all(all(one.configuration.recompute) for one in plan(recompute="all").proposals)


@pytest.mark.parametrize("attention", [0.0, 0.4])
def test_slices_are_planned_where_they_are_asked_for(attention):
    """Every stage of two layers; messages are free, so that the step is a closed form."""
    free = replace(COSTS, link=LinkCosts())
    request = replace(REQUEST, ranks=(4,), schedules=("seq1f1b", "1f1b"), stages_per_rank=(1,))
    whole = make_plan(request, free, effort=EFFORT)
    assert {one.configuration.schedule for one in whole.proposals} == {"1f1b"}
    slices = shares_of((32,) * 4, attention)
    found = make_plan(replace(request, slices=slices), free, effort=EFFORT)
    by_name = {one.configuration.schedule: one for one in found.proposals}
    sliced, plain = by_name["seq1f1b"], by_name["1f1b"]
    assert (sliced.configuration.num_slices, plain.configuration.num_slices) == (4, 1)
    assert sliced.program.slices == slices
    assert max(sliced.peak_bytes) < max(plain.peak_bytes)
    assert sliced.bound_ns <= sliced.step_ns
    assert any(note.startswith("A slice is taken to need its share") for note in found.notes)
    assert attention or sliced.step_ns < plain.step_ns
    case = Case(schedule="seq1f1b", slices_number=4, slices_attention=attention)
    handed = [case_of(one.configuration, case, Path("mine.csv")) for one in (sliced, plain)]
    assert [one.slices_number for one in handed] == [4, 1]
    assert [one.slices_attention for one in handed] == [attention, 0.0]  # no key without effect
    listed = replace(case, slices_lengths=(50, 30, 28, 20))
    handed = [case_of(one.configuration, listed, Path("mine.csv")) for one in (sliced, plain)]
    assert [one.slices_lengths for one in handed] == [listed.slices_lengths, "even"]


@pytest.mark.parametrize("lengths", [(64, 64), (96, 32), (32, 96)])
def test_the_bound_of_slices_is_never_above_the_least_step_of_any_order(lengths):
    """Two microbatches of two slices on two ranks: all 70 x 70 orders that are legal."""
    slices = shares_of(lengths, 0.2)
    free = replace(COSTS, link=LinkCosts())
    given = {"schedules": ("seq1f1b",), "stages_per_rank": (1,), "global_batch": 2}
    request = replace(REQUEST, slices=slices, recompute="none", **given)
    proposal = make_plan(request, free, effort=EFFORT).first
    configuration = proposal.configuration
    stages = Search(request, free, lambda *_: None, 0).table(1, 1, 2)
    durations = durations_of(stages.of_all(configuration.partition, configuration.recompute))
    # Of a microbatch a rank has F0, F1, B1 and B0 in this order.
    chains = [[(Op.F, 2 * m), (Op.F, 2 * m + 1), (Op.B, 2 * m + 1), (Op.B, 2 * m)] for m in (0, 1)]
    rows = []
    for places in itertools.combinations(range(8), 4):
        left = [iter(chain) for chain in chains]
        rows.append([next(left[at not in places]) for at in range(8)])
    steps = []
    for orders in itertools.product(rows, repeat=2):
        actions = [tuple(Action(r, *one) for one in row) for r, row in enumerate(orders)]
        program = Program("drawn", loop_placement(2), 4, actions, slices=slices)
        with contextlib.suppress(ProgramError):  # they wait for each other
            steps.append(predict(program, durations).makespan_ns)
    assert len(steps) > 100
    assert proposal.bound_ns <= min(steps)
    assert min(steps) <= proposal.step_ns


def test_the_frontier_is_quicker_the_more_memory_there_is():
    here = world(8)
    found = make_plan(here.request, here.measured, effort=EFFORT)
    memories = [point.memory_bytes for point in found.frontier]
    steps = [point.step_ns for point in found.frontier]
    assert memories == sorted(memories)
    assert steps == sorted(steps, reverse=True)
    assert found.first.step_ns in steps


def test_where_nothing_fits_the_least_memory_is_said_and_it_does():
    with pytest.raises(NoPlanError, match="the least that would do is") as refused:
        plan(memory_bytes=30 * MIB)
    least = refused.value.least
    assert refused.value.key == "memory"
    assert f"step of {least.step_ns / 1e6:.1f} ms" in str(refused.value)
    assert plan(memory_bytes=least.memory_bytes).first.step_ns <= least.step_ns
    with pytest.raises(NoPlanError):
        plan(memory_bytes=least.memory_bytes - 1)


def test_what_needs_the_least_memory_is_proposed_though_the_search_misses_it(monkeypatch):
    with pytest.raises(NoPlanError) as refused:
        plan(memory_bytes=30 * MIB)
    least = refused.value.least.memory_bytes
    monkeypatch.setattr(Search, "run", lambda _search: None)
    assert max(plan(memory_bytes=least).first.peak_bytes) <= least
    with pytest.raises(NoPlanError):
        plan(memory_bytes=least - 1)


@pytest.mark.parametrize("schedule", ["auto", "interleaved_1f1b"])
@pytest.mark.parametrize("left", [4 * MIB, 20 * MIB])
def test_stages_whose_actions_take_unequal_memory_fit_into_the_least_that_is_said(schedule, left):
    first = replace(LAYER, held_after_input=left, transient_bytes=30 * MIB)
    model = ModelCosts(NOTHING, (first, LAYER, LAYER, LAYER), NOTHING)
    costs = costs_of({(1, False): model}, LinkCosts())
    request = PlanRequest((2,), MIB, 4, 128, (schedule,), (2,), (1,))
    with pytest.raises(NoPlanError) as refused:
        make_plan(request, costs, effort=EFFORT)
    least = refused.value.least.memory_bytes
    assert f"the least that would do is {size_text(least)}, for {schedule}" in str(refused.value)
    first_choice = make_plan(replace(request, memory_bytes=least), costs, effort=EFFORT).first
    assert max(first_choice.peak_bytes) <= least
    assert first_choice.bound_ns <= first_choice.step_ns
    with pytest.raises(NoPlanError):
        make_plan(replace(request, memory_bytes=least - 1), costs, effort=EFFORT)


def test_layers_are_moved_for_the_solver_where_level_ones_do_not_fit():
    full = replace(LAYER, static_bytes=400 * MIB)
    model = ModelCosts(NOTHING, (full, full, full, *(LAYER,) * 3), NOTHING)  # level: 3 and 3
    costs = costs_of({(1, False): model}, LinkCosts())
    request = PlanRequest((2,), 880 * MIB, 4, 128, ("auto",), (1,), (1,))
    assert max(make_plan(request, costs, effort=EFFORT).first.peak_bytes) <= 880 * MIB


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"microbatch_sizes": (3,)}, "microbatch_sizes", "none divides the global batch of 8"),
        ({"microbatch_sizes": (4,)}, "microbatch_sizes", "no costs for microbatches of 4"),
        ({"schedules": ("1f1b",), "stages_per_rank": (2,)}, "stages_per_rank", "no schedule of"),
        ({"ranks": (16,)}, "stages_per_rank", "a model of 8 layers"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_key(changes, key, words):
    with pytest.raises(NoPlanError, match=words) as refused:
        plan(**changes)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("changes", "link", "words"),
    [
        ({"forward_ns": 1e300}, LinkCosts(), "would take years"),
        ({"error": 1e300}, LinkCosts(), "would take years"),
        ({}, LinkCosts(0, 1e-300), "would take years"),
        ({"held_after_forward": 2**62}, LinkCosts(), "more than 1 EiB"),
        ({"forward_ns": 0, "backward_ns": 0.3, "input_ns": 0.3}, LinkCosts(), "whole nanosecond"),
    ],
)
def test_costs_out_of_range_are_refused(changes, link, words):
    model = ModelCosts(NOTHING, (replace(LAYER, weight_ns=0, **changes),) * 2, NOTHING)
    with pytest.raises(NoPlanError, match=words) as refused:
        make_plan(REQUEST, costs_of({(1, False): model}, link), effort=EFFORT)
    assert refused.value.key == "costs"


def test_missing_costs_are_named():
    notes = plan(microbatch_sizes=(1, 4)).notes
    assert notes == ("There are no costs for microbatches of 4: left out.",)
    alone = costs_of({(1, False): COSTS.by_setting[1, False]}, COSTS.link)
    found = make_plan(REQUEST, alone, effort=EFFORT)
    assert "nothing is recomputed" in found.notes[0]


def test_a_slow_link_is_said_to_limit_it():
    slow = costs_of(COSTS.by_setting, LinkCosts(8e6, 1e9, 0))
    found = make_plan(replace(REQUEST, schedules=("1f1b",)), slow, effort=EFFORT)
    assert found.losses[0].cause == "link"
    assert found.faster_link_ns < found.first.step_ns
    assert "the link between ranks" in " ".join(found.sentences)


def test_layers_that_cannot_be_cut_are_said_to_limit_it():
    model = COSTS.by_setting[1, False]
    heavy = replace(LAYER, forward_ns=2e7, backward_ns=4e7, input_ns=2e7, weight_ns=2e7)
    uneven = costs_of({(1, False): replace(model, layers=(heavy, *(LAYER,) * 3))}, LinkCosts())
    found = make_plan(replace(REQUEST, global_batch=32), uneven, effort=EFFORT)
    assert found.losses[0].cause == "imbalance"


@pytest.mark.parametrize(("schedule", "factor"), [("auto", 1.3), ("auto", 2), ("zb_h1", 2)])
def test_no_more_is_lost_to_the_bubble_than_the_table_says(schedule, factor):
    """A step of 0.3 % bubble was said to be 4.7 % shorter without one."""
    names = ("forward_ns", "backward_ns", "input_ns", "weight_ns")
    heavy = replace(LAYER, **{name: factor * getattr(LAYER, name) for name in names})
    model = replace(COSTS.by_setting[1, False], layers=(heavy, *(LAYER,) * 5))
    costs = costs_of({(1, False): model}, COSTS.link)
    found = make_plan(replace(REQUEST, schedules=(schedule,)), costs, effort=EFFORT)
    without_ns = next(one.step_ns for one in found.losses if one.cause == "schedule")
    assert 1 - without_ns / found.first.step_ns <= found.first.bubble_fraction + 1e-6


def test_the_words_say_where_no_other_program_has_less_of_a_bubble():
    found = plan(schedules=("1f1b",))
    bubble = Loss("schedule", found.first.step_ns * 9 // 10)
    best = replace(found.first, bound_ns=found.first.step_ns)
    text = "the bubble of the schedule, which any other program of these stages has too: the step"
    for first, is_said in ((best, True), (replace(best, bound_ns=best.step_ns // 2), False)):
        said = replace(found, proposals=(first,), losses=(bubble,)).sentences
        assert any(text in sentence for sentence in said) == is_said


def test_the_words_and_the_table_say_what_the_plan_does():
    found = plan(schedules=("1f1b", "zb_h1"))
    text = " ".join(found.sentences)
    assert "Run zb_h1 with 1 stage per rank on 2 ranks, 8 microbatches of 1 sequence" in text
    assert f"{100 * found.gain:.1f} % faster than the best 1F1B" in text
    frame = found.frame
    assert list(frame["schedule"]) == ["zb_h1", "1f1b"]
    assert frame["step_ns"].is_monotonic_increasing
    assert as_dict(found)["baseline"]["step_ns"] == found.baseline.step_ns


def test_the_interval_of_a_step_says_what_it_leaves_out():
    found = plan(schedules=("1f1b", "zb_h1"))
    low, high = (f"{ns / 1e6:.1f} ms" for ns in (found.first.step_low_ns, found.first.step_high_ns))
    assert low != high
    (text,) = [text for text in found.sentences if f"{low} to {high}" in text]
    assert text.startswith("If nothing but the costs of layers and link is off, ")
    assert text.endswith("what else the machine does is left out.")
    sure = replace(found.first, step_low_ns=found.first.step_ns, step_high_ns=found.first.step_ns)
    alone = replace(found, proposals=(sure, *found.proposals[1:]))
    assert not any("probability" in text for text in alone.sentences)


def test_the_words_say_how_near_a_registered_schedule_and_the_best_possible_are():
    found = plan(**SOLVED)
    assert found.first.configuration.schedule == "auto"
    registered = found.registered
    longer = 100 * (registered.step_ns / found.first.step_ns - 1)
    name = registered.configuration.schedule
    assert name in ("1f1b", "zb_h1")
    need = size_of(max(registered.peak_bytes))
    expected = f"{name}, which needs no program of its own, takes {longer:.1f} % longer, in {need}."
    assert expected in found.sentences
    tied = "The errors of the costs are larger than what is between these two."
    assert (tied in found.sentences) == (registered.step_low_ns <= found.first.step_high_ns)
    fields = as_dict(found)
    assert fields["registered"]["step_ns"] == registered.step_ns
    assert fields["registered_loss"] == pytest.approx(longer / 100)
    left = fields["most_left"]
    assert left == 1 - found.first.bound_ns / found.first.step_ns
    assert f"{found.first.bound_ns / 1e6:.1f} ms: at most {100 * left:.1f} % are left." in " ".join(
        found.sentences
    )


def test_a_registered_first_choice_is_itself_the_best_registered_one():
    found = plan(schedules=("1f1b",), stages_per_rank=(1,))
    assert found.registered == found.first
    assert "no program of its own" not in " ".join(found.sentences)
    assert plan(schedules=("auto",)).registered is None


def told_with(found, **changes):
    """The sentences of a plan whose first choice has another configuration."""
    first = replace(found.first, configuration=replace(found.first.configuration, **changes))
    return replace(found, proposals=(first, *found.proposals[1:])).sentences


def test_the_words_say_which_rank_has_which_layers():
    found = plan(schedules=("zbv",), stages_per_rank=(2,))
    assert (
        "Rank 0: stage 0 (embedding), stage 3 (layer 7, head). "
        "Rank 1: stage 1 (layers 0 to 3), stage 2 (layers 4 to 6)."
    ) in told_with(found, layers=(0, 4, 3, 1))


def test_two_ways_have_both_copies_of_a_stage_with_their_parameters_and_sums():
    gradients = replace(LAYER, gradient_bytes=5 * MIB)
    model = ModelCosts(NOTHING, (gradients,) * 4, NOTHING)
    costs = costs_of({(1, False): model}, LinkCosts(0, 5e9))
    request = replace(REQUEST, schedules=("chimera",), stages_per_rank=(2,))
    first = make_plan(request, costs, effort=EFFORT).first
    assert sum(first.configuration.layers) == 4
    assert len(first.configuration.recompute) == 4
    assert "Rank 0: stage 0 (embedding, layers 0 to 1), stage 3 (as stage 1)." in " ".join(
        make_plan(request, costs, effort=EFFORT).sentences
    )
    # Of 4 layers each rank keeps all, and their gradients; it holds a microbatch at least.
    assert min(first.peak_bytes) >= 4 * (20 + 5) * MIB + 2 * 10 * MIB
    free = make_plan(request, replace(costs, link=LinkCosts()), effort=EFFORT).first
    sums_ns = 4 * round(5 * MIB / 5e9 * 1e9)
    assert first.step_ns - free.step_ns >= sums_ns
    assert first.bound_ns >= free.bound_ns + sums_ns


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (loop_placement(9, 2), "round the ranks"),
        (v_placement(9), "down the ranks and back up"),
        (two_way_placement(9), "down the ranks, and a copy of each up them"),
    ],
)
def test_of_many_ranks_the_words_say_how_stages_lie_on_them(placement, words):
    nine = {"ranks": 9, "stages_per_rank": 2, "placement": placement, "layers": (1,) * 18}
    assert f"Stages go {words}." in told_with(plan(), **nine)
