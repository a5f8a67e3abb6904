"""Hand-written spans, exact expected figures."""

import pandas as pd
import pytest
from spans import TWO_RANKS

from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from ppbench.analysis.metrics import (
    chosen_step,
    rank_figures,
    run_figures,
    step_figures,
)
from ppbench.errors import UsageError


def test_a_step_lasts_from_the_first_start_to_the_last_end_and_the_optimizer_is_apart():
    (step,) = step_figures(TWO_RANKS, world_size=2, tokens_of_step={5: 55}).to_dict("records")
    assert step["step"] == 5
    assert step["step_ns"] == 590 - 100
    assert step["optimizer_ns"] == 50
    assert step["step_with_optimizer_ns"] == 640 - 100
    assert step["tokens_per_s"] == 55 / (540 / 1e9)


def test_every_step_is_as_fast_as_its_own_tokens_make_it():
    spans = pd.concat([TWO_RANKS, TWO_RANKS.assign(step=6)], ignore_index=True)
    steps = step_figures(spans, world_size=2, tokens_of_step={4: 1, 5: 54, 6: 108})
    assert list(steps["num_tokens"]) == [54, 108]
    assert list(steps["tokens_per_s"]) == pytest.approx([54 / 540e-9, 108 / 540e-9])


def test_the_three_bubbles_of_a_hand_written_step():
    (step,) = step_figures(TWO_RANKS, 2, {5: 1}).to_dict("records")
    compute, capacity = 100 + 100 + 100 + 150, 2 * 490
    assert step["bubble_fraction"] == pytest.approx(1 - compute / capacity)
    assert step["bubble_idle_over_ideal"] == pytest.approx((capacity - compute) / compute)
    assert step["bubble_max_stage_span"] == pytest.approx(1 - compute / 2 / (590 - 100))


def test_ranks_are_idle_for_what_they_do_not_compute():
    steps = step_figures(TWO_RANKS, 2, {5: 1}).set_index("step")
    ranks = rank_figures(TWO_RANKS, steps["step_ns"], world_size=3).to_dict("records")
    assert [r["compute_ns"] for r in ranks] == [250, 200, 0]
    assert [r["idle_fraction"] for r in ranks] == pytest.approx([1 - 250 / 490, 1 - 200 / 490, 1.0])


def simulated(name, p, m, costs, transfers):
    program = build_program(name, p, m)
    return simulate(program, uniform(program.placement, *costs), transfers)


@pytest.mark.parametrize(
    "transfers", [TransferModel(), TransferModel(5), TransferModel(5, overlaps=False)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulation_has_the_figures_of_its_spans(name, transfers):
    simulation = simulated(name, 4, 8, (12, 18, 6), transfers)
    (step,) = step_figures(pd.DataFrame(simulation.spans()), 4, {0: 1}).to_dict("records")
    assert step["step_ns"] == simulation.makespan_ns
    for figure in ("bubble_fraction", "bubble_idle_over_ideal", "bubble_max_stage_span"):
        assert step[figure] == pytest.approx(getattr(simulation, figure), abs=1e-12)


def steps_of(*durations):
    figures = dict.fromkeys(
        ("step_ns", "optimizer_ns", "bubble_fraction", "bubble_idle_over_ideal"), 1.0
    )
    return pd.DataFrame(
        [
            {
                **figures,
                "step": number,
                "step_with_optimizer_ns": duration,
                "tokens_per_s": 1 / duration,
                "bubble_max_stage_span": 0.5,
            }
            for number, duration in enumerate(durations)
        ]
    )


def test_a_runs_figures_are_medians_and_one_slow_step_does_not_move_them():
    figures = run_figures(steps_of(10, 12, 11, 900, 11))
    assert figures["step_with_optimizer_ns"] == 11
    assert figures["step_relative_deviation"] == pytest.approx(1 / 11)


@pytest.mark.parametrize(("choice", "step"), [("median", 2), ("slowest", 3), ("0", 0)])
def test_a_step_is_chosen_by_what_it_is_or_by_its_number(choice, step):
    assert chosen_step(steps_of(10, 30, 20, 40), choice) == step


@pytest.mark.parametrize("choice", ["4", "01", "fastest", ""])
def test_a_step_that_was_not_measured_is_refused_with_what_can_be_chosen(choice):
    with pytest.raises(UsageError, match="expected median, slowest, all or one of 0 to 3"):
        chosen_step(steps_of(10, 30, 20, 40), choice, "all")
