"""Slices in a sweep file and in predictions; `tests/engine/test_in_slices.py` runs them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from sweep_files import only_case, read

from engine.plan.predict import took_by
from engine.plan.program import to_csv
from engine.plan.schedules.registry import build_program
from engine.plan.slices import shares_of
from ppbench.config.programs import (
    bubble_in_theory,
    durations_of,
    lowered_of,
    planned_step_ns,
    program_of,
    slice_lengths_of,
)
from ppbench.display.cases import case_text
from ppbench.display.units import held_share
from ppbench.errors import SweepFileError, UsageError
from ppbench.prediction import simulate
from ppbench.recommendation.question import read_question, request_of
from ppbench.run.runtimes.runtime import trainer_config

SLICED = 'schedule = "seq1f1b"\nworld_size = 4\nslices.number = 4\n'
TIMES = "emulated.F_ms = 20\nemulated.I_ms = 20\nemulated.W_ms = 20\n"
EMULATED = f'{SLICED}device = "emulated"\n{TIMES}'


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('schedule = "zbv"\nslices.number = 2', "slices.number: zbv takes whole microbatches"),
        ('schedule = "auto"\nslices.number = 2', 'slices.number: "auto" orders whole microbatches'),
        ('schedule = "seq1f1b"\nslices.number = 200', "slices.number: 200 slices of 128 tokens"),
        (
            'schedule = "seq1f1b"\nslices.lengths = [64, 64]',
            "2 slices .*; expected slices.number 1",
        ),
        ("slices.attention = 0.5", "slices.attention: applies only with slices.number>1"),
        ('slices.lengths = "balanced"', "slices.lengths: applies only with slices.number>1"),
        (
            "[grid]\nslices.number = [1, 4]\nslices.attention = [0.0, 0.5]\n",
            "slices.attention: app",
        ),
        (f"{SLICED}slices.lengths = [64, 64]", "has 2 slices of 128 tokens in all; expected"),
        (f"{SLICED}slices.lengths = [64, 32, 16, 8]", "of 120 tokens in all; .* of seq_len 128"),
        (f'{SLICED}slices.lengths = "equal"', '"even", "balanced" or the number of tokens of each'),
        (f'{SLICED}seq_len = "variable"', 'slices.number: .*seq_len cannot be "variable"'),
        (f"{SLICED}train.compile = true", "slices.number: what a slice attends to grows"),
        (
            'runtime = "single"\nmode = "evaluate"\nworld_size = 1\nslices.number = 2',
            'slices need runtime = "engine", got "single"',
        ),
    ],
)
def test_slices_that_cannot_be_are_refused(tmp_path, more, problem):
    with pytest.raises(SweepFileError, match=problem):
        read(tmp_path, more)


def test_a_case_cuts_its_sequences_and_plans_its_step(tmp_path):
    case = only_case(read(tmp_path, EMULATED))
    assert slice_lengths_of(case) == (32,) * 4
    assert planned_step_ns(case, lowered_of(case)) == (8 * 60 + 3 * 15) * 1_000_000
    assert bubble_in_theory(case, program_of(case)) == pytest.approx(45 / 525)
    listed = dataclasses.replace(case, slices_lengths=(65, 33, 20, 10))
    assert slice_lengths_of(listed) == (65, 33, 20, 10)
    balanced = dataclasses.replace(case, slices_lengths="balanced", slices_attention=0.5)
    lengths = slice_lengths_of(balanced)
    assert list(lengths) == sorted(lengths, reverse=True)
    assert max(shares_of(lengths, 0.5)) < 0.26
    even = dataclasses.replace(case, slices_attention=0.5)
    steps = [planned_step_ns(one, lowered_of(one)) for one in (case, balanced, even)]
    assert steps[0] < steps[1] < 1.02 * steps[0] < steps[2]
    took = took_by(program_of(even), durations_of(even))
    assert sum(took) == pytest.approx(4 * 8 * 60e6, rel=1e-6)
    config = trainer_config(dataclasses.replace(balanced, device="cpu"))
    assert (config.slices, config.attention, config.num_messages) == (lengths, 0.5, 32)


def test_a_file_has_whole_numbers_of_slices(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(build_program("seq1f1b", 2, 2, slices=(0.5, 0.5))))
    assert simulate(f"csv:{file}", slices="2").makespan_s == Fraction(15, 2)
    with pytest.raises(UsageError, match=r"--slices: .* 4 .*no multiple of 3 slices"):
        simulate(f"csv:{file}", slices="3")
    with pytest.raises(UsageError, match=r"--microbatches: .* num_microbatches 2, got 4"):
        simulate(f"csv:{file}", 2, 4, slices="2")
    with pytest.raises(SweepFileError, match=r"slices.number: .*no multiple of 3 slices"):
        read(tmp_path, f'schedule = "csv:{file}"\nworld_size = 2\nslices.number = 3')


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "seq1f1b"])
def test_a_plan_is_asked_for_in_slices_whatever_the_schedule_of_the_file(tmp_path, schedule):
    given = "" if schedule == "1f1b" else f'schedule = "{schedule}"\n'
    file = tmp_path / "mine.toml"
    file.write_text(
        f"{given}world_size = 2\nslices = {{number = 4, attention = 0.25}}\n[plan]\n"
        'schedules = ["seq1f1b", "zbv"]\n'
    )
    request = request_of(question := read_question(file))
    assert only_case(question).schedule == schedule
    assert request.schedules == ("seq1f1b", "zbv")
    assert request.slices == shares_of((32,) * 4, 0.25)
    file.write_text(f"slices.number = 200\n{file.read_text().replace('slices =', '#')}")
    with pytest.raises(SweepFileError, match=r"slices.number: 200 slices of 128 tokens"):
        read_question(file)


def test_a_schedule_of_slices_without_any_is_noted(tmp_path):
    (told,) = read(tmp_path, 'schedule = "seq1f1b"').notes
    assert told.endswith("is 1f1b without any; set slices.number")
    grid = '[grid]\nschedule = ["seq1f1b"]\nslices.number = [1, 2]\n'
    for more in (grid, 'schedule = "seq1f1b"\nmode = "evaluate"', 'schedule = "1f1b"'):
        assert read(tmp_path, more).notes == ()


def test_a_case_is_named_with_its_slices(tmp_path):
    case = only_case(read(tmp_path, f"{SLICED}num_microbatches = 8\nseq_len = 128"))
    assert case_text(dataclasses.asdict(case), ()) == (
        "seq1f1b, 4 ranks, 8 microbatches, 128 tokens, 4 slices"
    )


def test_a_run_holds_shares_of_microbatches():
    sizes = {"world_size": 2, "num_stages": 4, "slices_number": 4}
    assert held_share({"peak_held_microbatches": 10, **sizes}) == 1.25


def test_slices_are_simulated_at_their_share_of_the_costs():
    whole, sliced = simulate("1f1b", 4, 8), simulate("seq1f1b", 4, 8, slices="4")
    assert (whole.makespan_s, sliced.makespan_s) == (33, Fraction(105, 4))
    assert sliced.peaks == [Fraction(peak, 4) for peak in (7, 6, 5, 4)]
    assert (sliced.shape()["microbatches"], sliced.shape()["slices"]) == (8, 4)
    growing = simulate("seq1f1b", 1, 2, slices="2,attention=0.5")
    durations = [
        float(span.end_ns - span.start_ns) / growing.ticks_per_s
        for span in growing.simulation.spans()
    ]
    assert sorted(set(durations)) == [0.375, 0.625, 0.75, 1.25]
    for text, problem in (
        ("0", '--slices: got "0"; expected 1 to 4096 slices'),
        ("2,attention=2", "--slices: attention is 2; expected a share from 0 to 1"),
        ("2,length=2", '--slices: unknown key "length"'),
    ):
        with pytest.raises(UsageError, match=problem):
            simulate("seq1f1b", 2, 2, slices=text)
    with pytest.raises(UsageError, match="--slices: zbv takes whole microbatches"):
        simulate("zbv", 2, 4, slices="2")
