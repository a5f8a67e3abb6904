"""Costs that were measured, put into other programs: closed forms as oracle."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from engine.plan.action import CODES, Op
from engine.plan.lower import Policy, lower
from engine.plan.messages import Edge
from engine.plan.program import EVALUATE
from engine.plan.schedules.registry import SCHEDULES, build_program
from ppbench.analysis.costs import (
    Costs,
    measured_costs,
    share_of_difference,
    slow_link,
    slow_stage,
    stage_ns,
    variation,
    with_link_like_others,
    with_stage_like_others,
)
from ppbench.analysis.running import Following
from ppbench.analysis.transfers import messages
from ppbench.analysis.whatif import (
    Inapplicable,
    Modelled,
    Posting,
    as_modelled,
    needs_halves,
    other_schedules,
    same_program,
    without_outliers,
)

POSTING = Posting(Policy.EARLY, 1)
PROGRAM = lower(build_program("1f1b", 4, 8))
EQUAL = Costs({Op.F: (100,) * 4, Op.B: (200,) * 4}, {})


def run_of(costs, program=PROGRAM):
    return Modelled.alone(program, costs, POSTING)


def answers(costs, program=PROGRAM):
    run = run_of(costs, program)
    given = [*same_program(run), *other_schedules(run)]
    return {answer.question: answer for answer in given}


def test_what_ran_in_slices_would_in_every_schedule_that_can():
    slices, costs = (0.25,) * 4, Costs({Op.F: (20,) * 4}, {})
    program = lower(build_program("1f1b", 4, 2, mode=EVALUATE, slices=slices))
    others = answers(costs, program)
    assert others["zbv, 2 stages per rank"].step_ns == 8 * 20 + 6 * 10
    costs = Costs({Op.F: (25,) * 4, Op.B: (50,) * 4}, {})
    sliced = build_program("seq1f1b", 4, 2, slices=slices)
    others = answers(costs, lower(replace(sliced, schedule="csv:mine.csv")))
    assert others["seq1f1b"].step_ns == 8 * 75 + 3 * 75
    assert others["1f1b"].step_ns == 2 * 300 + 3 * 300
    whole = answers(EQUAL)["seq1f1b"]
    assert whole.reason == "takes microbatches in slices; this run has whole ones"


def test_steps_in_a_row_gain_what_lone_ones_cannot_show():
    halves = Costs(dict.fromkeys((Op.F, Op.I, Op.W), (100,) * 4), {})
    program = lower(build_program("zb_h1", 4, 8))
    for following, gain in (
        (None, 0),
        (Following((50,) * 4, meets=True), 0),
        (Following((50,) * 4, meets=False), 300),  # zb_h2 has no bubble: 24 F, I and W
    ):
        run = Modelled.alone(program, halves, POSTING, following)
        others = {other.question: other for other in other_schedules(run)}
        now, rival = as_modelled(run), others["zb_h2"]
        assert now.step_ns - rival.step_ns == gain
        assert now.step_ns == 2700 + (50 if following else 0)
        assert rival.idle_ns == 4 * (300 - gain)


def test_the_run_as_modelled_has_the_closed_form_of_its_schedule():
    assert as_modelled(run_of(EQUAL)).step_ns == 11 * 300
    assert as_modelled(run_of(EQUAL)).bubble_fraction == pytest.approx(3 / 11)
    assert as_modelled(run_of(EQUAL)).held == 4


def test_other_schedules_have_theirs_at_the_same_costs():
    by_question = answers(EQUAL)
    assert by_question["afab"].step_ns == 11 * 300
    assert by_question["afab"].held == 8
    assert by_question["interleaved_1f1b, 2 stages per rank"].step_ns == 8 * 300 + 3 * 300 // 2
    assert by_question["zb_h1"].step_ns == 8 * 300 + 3 * (100 + 100 - 100)
    assert by_question["zbv, 2 stages per rank"].step_ns == 8 * 300 + 3 * 100 // 2
    assert "1f1b" not in by_question


def test_every_registered_schedule_is_answered_or_refused_with_its_reason():
    by_question = answers(EQUAL, lower(build_program("1f1b", 4, 6)))
    names = {question.partition(",")[0] for question in by_question} | {"1f1b"}
    assert names >= set(SCHEDULES)
    refused = by_question["dualpipev, 2 stages per rank"]
    assert isinstance(refused, Inapplicable)
    assert "at least 2 x world_size" in refused.reason


def test_free_transfers_and_both():
    linked = Costs({Op.F: (100, 160, 100, 40), Op.B: (200, 320, 200, 80)}, {Edge(0, 1): 70})
    by_question = answers(linked)
    assert by_question["perfect balance, free transfers"].step_ns == 11 * 300
    assert by_question["free transfers"].step_ns < as_modelled(run_of(linked)).step_ns


def test_the_slowest_stage_and_link_are_told_and_made_like_the_others():
    costs = Costs(
        {Op.F: (100, 150, 100, 100), Op.B: (200, 300, 200, 200)},
        {Edge(1, 2): 40, Edge(2, 1): 60, Edge(0, 1): 10, Edge(2, 3): 10},
    )
    stage, link = slow_stage(costs), slow_link(costs)
    assert (stage.index, stage.ns, stage.others_ns, stage.ratio) == (1, 450, 300, 1.5)
    assert (link.index, link.ns, link.others_ns) == (1, 50, 10)
    by_question = {answer.question: answer for answer in without_outliers(run_of(costs))}
    assert list(by_question) == ["stage 1 like the others", "link 1-2 like the others"]
    free = Costs(costs.by_stage, {})
    (alone,) = without_outliers(run_of(free))
    assert alone.step_ns == 11 * 300
    assert alone.idle_ns == 4 * 3 * 300
    fast = with_link_like_others(costs, 1).by_channel
    assert fast == dict.fromkeys(costs.by_channel, 10)


def test_where_nothing_stands_out_nothing_is_told():
    assert list(without_outliers(run_of(EQUAL))) == []
    usual = {Edge(0, 1): 40, Edge(1, 2): 50, Edge(2, 3): 45}
    for link_costs in ({}, usual):
        assert slow_link(Costs(EQUAL.by_stage, link_costs)) is None
    for forward in ((1,), (100, 200)):  # of two, nobody can tell which is unlike the other
        assert slow_stage(Costs({Op.F: forward, Op.B: forward}, {})) is None


def test_a_model_cut_more_finely_or_coarsely_keeps_its_cost_where_it_is():
    # All work is in the model's first half. A V puts that on rank 0 and 1 in turn: stages 0 and 1.
    lopsided = Costs({Op.F: (100, 0), Op.B: (200, 0)}, {})
    by_question = answers(lopsided, lower(build_program("1f1b", 2, 4)))
    assert by_question["perfect balance"].step_ns == 5 * 150
    assert by_question["looped_bfs, 2 stages per rank"].step_ns == 5 * 150
    assert by_question["afab"].step_ns == 4 * 300
    whole = Costs({Op.F: (50, 50, 0, 0), Op.B: (100, 100, 0, 0)}, {})
    looped = lower(build_program("interleaved_1f1b", 2, 4))
    assert answers(whole, looped)["afab"].step_ns == 4 * 300


def test_a_head_stays_whole_on_the_last_piece_of_a_model_cut_more_finely():
    headed = Costs({Op.F: (100, 100, 100, 160), Op.B: (200, 200, 200, 320)}, {})
    by_question = answers(headed)
    # Rank 3 computes 8 microbatches of 50 + 110 forward, twice that backward, and waits for the
    # first one: three stages of 50 before, and three after it.
    assert by_question["looped_bfs, 2 stages per rank"].step_ns >= 8 * 480 + 3 * 150
    halved = Costs({Op.F: (50,) * 6 + (80, 80), Op.B: (100,) * 6 + (160, 160)}, {})
    looped = lower(build_program("looped_bfs", 4, 8, 2))
    spread_ns = as_modelled(run_of(halved, looped)).step_ns
    kept = Costs({Op.F: (50,) * 7 + (110,), Op.B: (100,) * 7 + (220,)}, {})
    kept_ns = as_modelled(run_of(kept, looped)).step_ns
    assert by_question["looped_bfs, 2 stages per rank"].step_ns == kept_ns != spread_ns


def test_halves_are_known_only_to_a_run_that_split_its_backward():
    assert needs_halves(EQUAL)
    assert not needs_halves(Costs({Op.F: (1,), Op.I: (1,), Op.W: (1,)}, {}))


def spans_of(costs):
    """Rows of (op, stage, duration)."""
    rows = [(0, 0, op, stage, n, 0, ns) for n, (op, stage, ns) in enumerate(costs)]
    return pd.DataFrame(
        rows, columns=["step", "rank", "op", "stage", "microbatch", "start_ns", "end_ns"]
    ).assign(num_bytes=0, replica=0)


def costs_of(rows, num_stages=2):
    spans = spans_of(rows)
    return measured_costs(spans, messages(spans), num_stages)


def test_stages_without_any_variation_keep_their_own_means():
    costs = costs_of([("F", 0, 10), ("F", 0, 10), ("F", 1, 11), ("F", 1, 11)])
    assert costs.by_stage[Op.F] == (10, 11)
    assert costs_of([("F", 0, 10), ("F", 1, 20)]).by_stage[Op.F] == (10, 20)


def test_stages_that_chance_alone_tells_apart_are_equal():
    drawn = np.random.default_rng(0)
    rows = [("F", stage, ns) for stage in (0, 1) for ns in drawn.normal(1000, 100, 40)]
    costs = costs_of(rows)
    assert costs.by_stage[Op.F][0] == costs.by_stage[Op.F][1]
    assert variation(spans_of(rows), costs) == pytest.approx(0.1, rel=0.1)


def test_a_real_difference_is_kept_nearly_whole():
    drawn = np.random.default_rng(0)
    rows = [
        ("F", s, ns) for s, mean in ((0, 1000), (1, 1500)) for ns in drawn.normal(mean, 100, 40)
    ]
    first, second = costs_of(rows).by_stage[Op.F]
    assert second / first == pytest.approx(1.5, rel=0.03)


def test_the_share_that_is_no_chance_is_one_less_the_inverse_of_f():
    from scipy.stats import f_oneway

    drawn = np.random.default_rng(1)
    groups = {s: drawn.normal(1000 + 60 * s, 100, 30) for s in range(3)}
    statistic = f_oneway(*groups.values()).statistic
    assert share_of_difference(groups) == pytest.approx(1 - 1 / statistic)


def test_costs_cover_every_computation_and_send_of_a_program():
    costs = Costs({Op.F: (1, 2, 3, 4), Op.B: (5, 6, 7, 8)}, {Edge(2, 1): 9})
    took = costs.by_kind(PROGRAM)
    kinds = [(3, Op.B), (2, Op.SEND_B), (0, Op.SEND_F)]
    assert [took[CODES[op] * PROGRAM.num_stages + stage] for stage, op in kinds] == [8, 9, 0]


MIXED = {Op.F: (100, 100), Op.B: (200, None), Op.I: (None, 120), Op.W: (None, 80)}
"""A program in which one stage does whole backwards and the other halves."""


def test_a_stage_that_does_no_such_op_is_left_out_of_its_mean():
    assert Costs(MIXED, {}).balanced().by_stage == MIXED
    assert stage_ns(Costs(MIXED, {})) == [300, 300]
    assert with_stage_like_others(Costs(MIXED, {}), 0).by_stage == MIXED


def test_both_kinds_of_backward_on_all_stages_count_once():
    each = Costs({Op.F: (15,) * 3, Op.B: (30,) * 3, Op.I: (10,) * 3, Op.W: (20,) * 3}, {})
    assert stage_ns(each) == [45, 45, 45]
