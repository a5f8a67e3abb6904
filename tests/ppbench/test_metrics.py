"""Hand-written spans, exact expected figures."""

import pandas as pd
import pytest

from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from engine.plan.spans import COLUMNS
from ppbench.analysis.metrics import (
    median_step,
    moving_start_ns,
    rank_figures,
    run_figures,
    settled_end_ns,
    step_figures,
)


def frame(*rows):
    """Rows of (rank, op, stage, microbatch, start, end), all of step 5."""
    return pd.DataFrame(
        [(5, rank, "?", stage, op, m, start, end, 0) for rank, op, stage, m, start, end in rows],
        columns=list(COLUMNS),
    )


TWO_RANKS = frame(
    (0, "F", 0, 0, 100, 200),
    (0, "SEND_F", 0, 0, 200, 210),
    (1, "RECV_F", 1, 0, 90, 210),
    (1, "F", 1, 0, 210, 310),
    (1, "B", 1, 0, 310, 410),
    (1, "SEND_B", 1, 0, 410, 440),
    (0, "RECV_B", 0, 0, 205, 440),
    (0, "B", 0, 0, 440, 590),
    (1, "OPT", -1, -1, 415, 435),
    (0, "OPT", -1, -1, 590, 640),
)


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


def test_the_bubbles_of_a_simulated_1f1b_are_its_closed_forms():
    spans = pd.DataFrame(simulated("1f1b", 4, 8, (2, 1, 1), TransferModel()).spans())
    (step,) = step_figures(spans, 4, {0: 1}).to_dict("records")
    assert step["step_ns"] == step["step_with_optimizer_ns"] == 44
    assert step["bubble_fraction"] == pytest.approx(3 / 11)
    assert step["bubble_idle_over_ideal"] == pytest.approx(6 / 16)
    assert step["bubble_max_stage_span"] == pytest.approx(3 / 11)


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


def test_the_median_step_is_a_step_that_was_measured():
    assert median_step(steps_of(10, 30, 20, 40)) == 2


def test_a_transfer_moves_from_when_both_ends_are_ready():
    starts = dict(zip(TWO_RANKS["op"], moving_start_ns(TWO_RANKS), strict=False))
    assert starts["RECV_F"] == starts["SEND_F"] == 200
    assert starts["RECV_B"] == starts["SEND_B"] == 410
    assert list(moving_start_ns(TWO_RANKS)[TWO_RANKS["op"] == "F"]) == [100, 210]


def test_a_send_ends_no_later_than_its_receive():
    late = TWO_RANKS.copy()
    late.loc[late["op"] == "SEND_F", "end_ns"] = 900
    ends = dict(zip(late["op"], settled_end_ns(late), strict=False))
    assert ends["SEND_F"] == ends["RECV_F"] == 210
    assert list(settled_end_ns(TWO_RANKS)) == list(TWO_RANKS["end_ns"])


def test_one_rank_has_no_transfers_to_move():
    compute = TWO_RANKS[TWO_RANKS["op"].isin(["F", "B"])]
    assert list(moving_start_ns(compute)) == list(compute["start_ns"])
    assert list(settled_end_ns(compute)) == list(compute["end_ns"])
