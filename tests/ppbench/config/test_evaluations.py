"""Evaluations in a sweep file and in figures; `tests/engine/test_evaluation.py` runs them."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
from sweep_files import only_case, read

from engine.plan.lower import lower
from engine.plan.period import Step, spans_in_a_row
from engine.plan.predict import Durations
from engine.plan.schedules.registry import build_program
from engine.plan.spans import COLUMNS
from engine.plan.walk import of_kinds
from ppbench.analysis.attribution import attribute
from ppbench.analysis.metrics import step_figures, windows
from ppbench.config.programs import bubble_in_theory, lowered_of, planned_step_ns
from ppbench.errors import SweepFileError, UsageError
from ppbench.prediction import simulate
from ppbench.recommendation.question import problems_of_plan

EVALUATED = 'mode = "evaluate"\nworld_size = 4\n'
EMULATED = EVALUATED + 'device = "emulated"\nemulated.F_ms = 20\n'


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('train.optimizer = "sgd"', "train.optimizer: applies only with mode=train"),
        ("train.lr_warmup_steps = 2", "train.lr_warmup_steps: applies only with mode=train"),
        ("train.clip_norm = 1.0", "train.clip_norm: applies only with mode=train"),
        ("train.recompute = true", "train.recompute: applies only with mode=train"),
        ('replicas = 2\nsharding.policy = "zero3"', "sharding.policy: applies only with mode=tr"),
        ('schedule = "auto"', 'schedule: "auto" is found for training'),
        ('runtime = "torch"', 'runtime: "torch" is run to train alone'),
    ],
)
def test_what_means_nothing_without_a_backward_is_refused(tmp_path, more, problem):
    with pytest.raises(SweepFileError, match=problem):
        read(tmp_path, EVALUATED + more)


@pytest.mark.parametrize(("schedule", "p", "m"), [("dualpipe", 4, 6), ("interleaved_1f1b", 3, 7)])
def test_fewer_microbatches_than_a_schedule_trains_with_are_evaluated(tmp_path, schedule, p, m):
    shape = f'schedule = "{schedule}"\nworld_size = {p}\nnum_microbatches = {m}\n'
    assert only_case(read(tmp_path, f'{shape}mode = "evaluate"')).num_microbatches == m
    assert simulate(schedule, p, m, mode="evaluate").makespan_s == 8
    with pytest.raises(SweepFileError, match=f"num_microbatches: {schedule}: "):
        read(tmp_path, shape)
    with pytest.raises(UsageError, match=r"must be even; .*; expected for example 2 or 4"):
        simulate("dualpipe", 2, 3, mode="evaluate")


def test_a_case_has_the_forwards_of_its_placement_and_no_meeting(tmp_path):
    case = only_case(read(tmp_path, EMULATED))
    assert planned_step_ns(case, lowered_of(case)) == 8 * 20_000_000
    assert bubble_in_theory(case, lowered_of(case)) == 0
    tied = dataclasses.replace(case, device="cpu", model_preset="llama-tiny-tied", replicas=2)
    assert (tied.meets, lowered_of(tied).has_collectives) == (False, False)
    assert dataclasses.replace(tied, mode="train").meets
    (problem,) = problems_of_plan(read(tmp_path, EVALUATED))
    assert problem.key == "mode"
    with pytest.raises(UsageError, match='--mode: unknown mode "infer"'):
        simulate("1f1b", 2, 2, mode="infer")


def test_a_step_lasts_until_the_last_stage_is_done_whatever_the_first_ranks_are_ahead():
    program = lower(build_program("1f1b", 3, 8, mode="evaluate"))
    took = of_kinds(program, Durations((10, 20, 10), (0,) * 3, (0,) * 3).by_kind(3))
    spans = pd.DataFrame(spans_in_a_row(Step(program, [took])), columns=list(COLUMNS))
    of_ranks = windows(spans, 3)
    figures = step_figures(spans, of_ranks, dict.fromkeys((-1, 0, 1), 8)).set_index("step")
    assert figures["step_ns"].loc[[0, 1]].tolist() == [160, 160]
    rows = attribute(spans, program, of_ranks.loc[[0, 1]]).rows
    assert rows["idle_ns"].tolist() == rows["imbalance_ns"].tolist() == [80, 0, 80] * 2
