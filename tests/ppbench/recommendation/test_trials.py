"""Trials of a plan: proposals as cases, and what was measured beside what was predicted."""

import dataclasses

import pandas as pd
import pytest
from command import inside

from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import build_program, read_csv
from ppbench.config.case import Case, Measure
from ppbench.config.feasibility import problems_of_settings
from ppbench.planning.configuration import Configuration, Proposal
from ppbench.recommendation import trials

PLACEMENT = loop_placement(2)


def proposal(schedule, step_ns=100, recompute=(False, False)):
    made = build_program("zb_h1" if schedule == "auto" else schedule, 2, 4)
    program = Program(schedule, PLACEMENT, 4, made.actions)
    configuration = Configuration(schedule, 2, 1, PLACEMENT, (1, 3), 2, 4, recompute)
    return Proposal(
        *(configuration, program, step_ns, step_ns - 5, step_ns + 5, step_ns - 10),
        *((10, 20), (11, 22), 0.1, 1e3),
    )


def test_a_proposal_is_run_as_the_case_that_it_is_for(tmp_path):
    case = trials.case_of(proposal("1f1b"), Case(world_size=8, seq_len=64), tmp_path / "a.csv")
    assert (case.schedule, case.world_size, case.num_microbatches) == ("1f1b", 2, 4)
    assert (case.model_partition, case.train_microbatch_size) == ((1, 3), 2)
    assert (case.seq_len, case.recompute) == (64, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def test_a_program_of_the_solver_is_written_and_some_stages_recompute(tmp_path):
    file = tmp_path / "a.csv"
    case = trials.case_of(proposal("auto", recompute=(True, False)), Case(), file)
    assert case.schedule == f"csv:{file}"
    assert read_csv(file).actions == build_program("zb_h1", 2, 4).actions
    assert case.recompute == (True, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def measured(steps):
    proposals = [proposal("zb_h1", 100), proposal("1f1b", 120)]
    cases = [dataclasses.replace(Case(), schedule=name) for name in ("zb_h1", "1f1b")]
    rows = [
        {"case_id": case.case_id, "status": "ok", "step_ns": step, "peak_memory_bytes": 20}
        for case, of_case in zip(cases, steps, strict=True)
        for step in of_case
    ]
    columns = ["case_id", "status", "step_ns", "peak_memory_bytes"]
    return trials.Trials(trials._compared(proposals, cases, pd.DataFrame(rows, columns=columns)))


def test_the_median_of_launches_is_compared_with_the_prediction():
    found = measured([[100, 110, 111], [100, 101, 90]])
    assert list(found.frame["measured_step_ns"]) == [110, 100]
    assert list(found.frame["step_error"]) == pytest.approx([0.1, 100 / 120 - 1])
    assert found.regret == pytest.approx(0.1)
    assert "the best, 1f1b, 0.0 ms: a regret of 10.0 %" in found.sentence


def test_the_best_first_choice_has_no_regret_and_one_that_failed_none_that_is_known():
    assert measured([[100], [110]]).regret == 0
    assert "is the best of 2" in measured([[100], [110]]).sentence
    assert measured([[], [110]]).regret is None
    assert "failed" in measured([[], [110]]).sentence


@pytest.mark.thorough
def test_proposals_are_measured(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'num_microbatches = 4\nseq_len = 32\nmodel.preset = "llama-tiny"\n'
        "measure = {steps = 2, warmup_steps = 1, max_warmup_steps = 1}\n"
        'plan = {ranks = 2, schedules = ["1f1b", "auto"], microbatch_sizes = 1}\n'
    )
    words = "plan", "mine.toml", "--run", "1", "--launches", "1", "--effort", "0.05"
    shown = inside(*words, folder=tmp_path)
    assert "Measured, the first choice" in shown
