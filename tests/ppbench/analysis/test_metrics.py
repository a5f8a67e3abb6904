"""Hand-written spans, exact expected figures."""

import pandas as pd
import pytest
from spans import TWO_RANKS

from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.walk import TransferModel
from ppbench.analysis.metrics import (
    chosen_step,
    rank_figures,
    run_figures,
    step_figures,
    windows,
)
from ppbench.errors import UsageError


def test_a_step_alone_lasts_from_its_first_start_to_its_last_end_and_the_makespan_leaves_out_opt():
    (step,) = step_figures(TWO_RANKS, windows(TWO_RANKS, 2), {5: 55}).to_dict("records")
    assert step["step"] == 5
    assert step["makespan_ns"] == 590 - 100
    assert step["optimizer_ns"] == 50
    assert step["step_ns"] == 640 - 100
    assert step["tokens_per_s"] == 55 / (540 / 1e9)


def test_a_step_of_a_training_lasts_from_the_end_of_the_one_before_it_on_each_rank():
    """The second begins on rank 1 while rank 0 is still in the first: 540 alone, 500 in a row."""
    second = TWO_RANKS.assign(step=6)
    second[["start_ns", "end_ns"]] += 500
    third = second.assign(step=7)
    third[["start_ns", "end_ns"]] += 700
    spans = pd.concat([TWO_RANKS, second, third], ignore_index=True)
    spans.loc[(spans["step"] == 6) & (spans["rank"] == 0) & (spans["op"] == "F"), "start_ns"] += 60
    found = windows(spans, 2).loc[[6, 7]]
    assert (found["end_ns"] - found["begin_ns"]).tolist() == [500, 500, 700, 700]
    steps = step_figures(spans, windows(spans, 2), {5: 1, 6: 1, 7: 1}).set_index("step")
    assert steps["step_ns"].tolist() == [540, 500, 700]
    assert steps["makespan_ns"].tolist() == [490, 490 - 60, 490]
    busy = 450 - 60 + 70
    assert steps["bubble_fraction"][6] == pytest.approx(1 - busy / (2 * 500))
    alone = step_figures(spans, windows(spans, 2, [7]), {5: 1, 6: 1, 7: 1}).set_index("step")
    assert alone["step_ns"].tolist() == [540, 500, 540]


def test_every_step_is_as_fast_as_its_own_tokens_make_it():
    spans = pd.concat([TWO_RANKS, TWO_RANKS.assign(step=6)], ignore_index=True)
    steps = step_figures(spans, windows(spans, 2), {4: 1, 5: 54, 6: 108})
    assert list(steps["num_tokens"]) == [54, 108]
    assert list(steps["tokens_per_s"]) == pytest.approx([54 / 540e-9, 108 / 540e-9])


def test_the_three_bubbles_of_a_hand_written_step():
    (step,) = step_figures(TWO_RANKS, windows(TWO_RANKS, 2), {5: 1}).to_dict("records")
    compute, optimizer, capacity = 100 + 100 + 100 + 150, 20 + 50, 2 * 540
    busy = compute + optimizer
    assert step["bubble_fraction"] == pytest.approx(1 - busy / capacity)
    assert step["bubble_idle_over_ideal"] == pytest.approx((capacity - busy) / busy)
    assert step["bubble_max_stage_span"] == pytest.approx(1 - compute / 2 / (590 - 100))


def test_ranks_are_idle_for_what_they_do_not_compute():
    ranks = rank_figures(TWO_RANKS, windows(TWO_RANKS, 3)).to_dict("records")
    assert [r["compute_ns"] for r in ranks] == [250, 200, 0]
    assert [r["idle_fraction"] for r in ranks] == pytest.approx([1 - 300 / 540, 1 - 220 / 540, 1.0])


def simulated(name, p, m, costs, transfers):
    program = build_program(name, p, m)
    return predict(program, uniform(program.placement, *costs), transfers)


@pytest.mark.parametrize(
    "transfers", [TransferModel(), TransferModel(5), TransferModel(5, overlaps=False)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulation_has_the_figures_of_its_spans(name, transfers):
    simulation = simulated(name, 4, 8, (12, 18, 6), transfers)
    spans = pd.DataFrame(simulation.spans())
    (step,) = step_figures(spans, windows(spans, 4), {0: 1}).to_dict("records")
    assert step["step_ns"] == step["makespan_ns"] == simulation.makespan_ns
    for figure in ("bubble_fraction", "bubble_idle_over_ideal", "bubble_max_stage_span"):
        assert step[figure] == pytest.approx(getattr(simulation, figure), abs=1e-12)


def steps_of(*durations):
    figures = dict.fromkeys(
        ("makespan_ns", "optimizer_ns", "bubble_fraction", "bubble_idle_over_ideal"), 1.0
    )
    return pd.DataFrame(
        [
            {
                **figures,
                "step": number,
                "step_ns": duration,
                "tokens_per_s": 1 / duration,
                "bubble_max_stage_span": 0.5,
            }
            for number, duration in enumerate(durations)
        ]
    )


def test_a_runs_figures_are_medians_and_one_slow_step_does_not_move_them():
    figures = run_figures(steps_of(10, 12, 11, 900, 11))
    assert figures["step_ns"] == 11
    assert figures["step_relative_deviation"] == pytest.approx(1 / 11)


@pytest.mark.parametrize(("choice", "step"), [("median", 2), ("slowest", 3), ("0", 0)])
def test_a_step_is_chosen_by_what_it_is_or_by_its_number(choice, step):
    assert chosen_step(steps_of(10, 30, 20, 40), choice) == step


@pytest.mark.parametrize("choice", ["4", "01", "fastest", ""])
def test_a_step_that_was_not_measured_is_refused_with_what_can_be_chosen(choice):
    with pytest.raises(UsageError, match="expected median, slowest, all or one of 0 to 3"):
        chosen_step(steps_of(10, 30, 20, 40), choice, "all")
