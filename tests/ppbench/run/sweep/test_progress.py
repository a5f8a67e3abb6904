"""The time left of a sweep, from what its runs have taken so far."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ppbench.config.case import Case, Measure
from ppbench.run.job import PlannedRun
from ppbench.run.sweep.progress import (
    Estimate,
    LiveDisplay,
    PlainDisplay,
    describe,
    time_left,
)

MEASURE = Measure(warmup_steps=1, steps=9, block=4)


class Clock:
    """The time that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def item(seq_len: int | str, max_seq_len: int = 2048, world_size: int = 2) -> PlannedRun:
    case = Case(seq_len=seq_len, data_max_seq_len=max_seq_len, world_size=world_size)
    return PlannedRun(case, MEASURE, 0, f"{seq_len}-{world_size}")


def run(estimate: Estimate, clock: Clock, index: int, around_s: float, step_s: float) -> None:
    """A run from its beginning to its end, of three turns with three steps and a lead-in."""
    estimate.begin(index)
    clock.seconds += around_s
    for turn in range(3):
        clock.seconds += 4 * step_s
        estimate.turn(index, turn, step_s)
    estimate.finish(index)


def test_short_runs_that_take_long_to_begin_do_not_make_long_ones_look_longer():
    clock = Clock()
    estimate = Estimate([item(8), item(800)], clock)
    run(estimate, clock, 0, around_s=12, step_s=0.01)
    seconds, has_more = estimate.seconds_left()
    assert seconds == pytest.approx(12 + 12 * 0.01 * 100)
    assert not has_more


def test_sequences_of_varying_length_are_not_counted_as_long_as_they_may_be():
    clock = Clock()
    every = [item(32), item("variable"), item("variable", world_size=1), item(32, world_size=1)]
    estimate = Estimate(every, clock)
    run(estimate, clock, 0, around_s=5, step_s=0.1)
    assert estimate.seconds_left() == (pytest.approx(15 + 1.2), True)
    assert time_left(estimate) == "0:16 or more left"
    run(estimate, clock, 1, around_s=5, step_s=0.2)  # not 0.1 × 2048 / 32
    assert estimate.seconds_left() == (pytest.approx(5 + 2.4 + 5 + 1.2), False)
    assert time_left(estimate) == "0:14 left"


def test_runs_of_another_limit_or_text_are_of_another_kind():
    clock = Clock()
    estimate = Estimate([item("variable", 512), item("variable", 2048)], clock)
    run(estimate, clock, 0, around_s=1, step_s=0.1)
    assert estimate.seconds_left() == (None, True)
    assert time_left(estimate) == "-:-- left"


def test_runs_that_take_turns_are_each_judged_by_their_own_steps():
    clock = Clock()
    estimate = Estimate([item(8), item("variable")], clock)
    for index, step_s in enumerate((0.1, 2.0)):
        estimate.begin(index)
        clock.seconds += 4
        estimate.step(step_s)
    assert estimate.seconds_left() == (pytest.approx(12 * 0.1 + 12 * 2), False)
    for index, step_s in enumerate((0.1, 2.0)):
        clock.seconds += 4 * step_s
        estimate.turn(index, 0, step_s)
    assert estimate.seconds_left() == (pytest.approx(8 * 0.1 + 8 * 2), False)


def test_a_run_that_fails_or_begins_anew_leaves_the_rest_right():
    clock = Clock()
    estimate = Estimate([item(8), item(8, world_size=1), item(16)], clock)
    run(estimate, clock, 0, around_s=2, step_s=0.5)
    estimate.begin(1)
    clock.seconds += 2
    estimate.begin(1)  # its workers died, and it is tried again
    clock.seconds += 2
    estimate.finish(1)
    assert estimate.seconds_left() == (pytest.approx(2 + 12 * 0.5 * 2), False)
    run(estimate, clock, 2, around_s=2, step_s=1)
    assert estimate.seconds_left() == (0.0, False)


def test_nothing_is_claimed_before_a_step_has_been_seen():
    assert time_left(Estimate([item(8)], Clock())) == "-:-- left"


def shown_on(display, console_text) -> str:
    """What a display says of one case that ends and one that fails."""
    display.begin([item(8), item(16)], ("seq_len",))
    speed = {"tokens_per_s": 500.0, "step_s": 0.1}
    summary = "1,000 tokens/s, bubble 20.0 %, peak 90.0 MiB"
    display.show({"event": "case", "index": 0, "run_id": "2026-a"})
    display.show({"event": "phase", "what": "warm-up"})
    display.show({"event": "step", "step": 1, "num_steps": 10, **speed})
    display.show({"event": "case", "index": 1, "run_id": "2026-b"})
    display.show({"event": "turn", "index": 0, "turn": 0, "num_turns": 3, **speed})
    row = {"event": "row", "index": 0, "status": "ok", "run_id": "2026-a", "summary": summary}
    display.show(row)
    failed = {"index": 1, "status": "oom", "run_id": "2026-b", "summary": "too [big]"}
    display.show(row | failed)
    display.end()
    return console_text.getvalue()


def test_in_a_pipe_each_case_is_a_line_when_it_begins_and_one_with_figures_when_it_ends():
    text = io.StringIO()
    assert shown_on(PlainDisplay(Console(file=text)), text).splitlines() == [
        "run 1 of 2: 8 tokens",
        "run 2 of 2: 16 tokens",
        "  8 tokens: ok, 1,000 tokens/s, bubble 20.0 %, peak 90.0 MiB, run 2026-a, 0:02 left",
        "  16 tokens: oom, too [big], run 2026-b, 0:00 left",
    ]


def test_on_a_terminal_ended_cases_stand_above_the_bar_with_their_figures():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None)
    shown = shown_on(LiveDisplay(console), text)
    assert "8 tokens   1,000 tokens/s, bubble 20.0 %, peak 90.0 MiB" in shown
    assert "16 tokens  oom: too [big] (2026-b)" in shown
    assert "2 of 2 runs" in shown


def test_a_sweep_with_nothing_to_do_shows_nothing():
    text = io.StringIO()
    display = LiveDisplay(Console(file=text, force_terminal=True, width=80, color_system=None))
    display.begin([], ())
    display.end()
    assert text.getvalue() == ""


def test_launches_are_counted_from_0_as_in_tables():
    measure = replace(item(8).measure, launches=3)
    assert describe(replace(item(8), measure=measure), ("seq_len",)) == (
        "8 tokens, launch 0 (0 to 2)"
    )


def test_silence_is_broken_every_five_seconds_by_what_is_being_done():
    clock, text = Clock(), io.StringIO()
    display = PlainDisplay(Console(file=text), clock=clock)
    display.begin([item(8)], ("seq_len",))
    display.show({"event": "case", "index": 0, "run_id": "2026-a"})
    for seconds in (4, 1, 4, 1):
        clock.seconds += seconds
        display.look()
    display.show({"event": "phase", "what": "verifying"})
    clock.seconds += 4
    display.show({"event": "case", "index": 0, "run_id": "2026-b"})
    display.show({"event": "phase", "what": "verifying"})
    for seconds in (4, 1):
        clock.seconds += seconds
        display.look()
    display.end()
    clock.seconds += 9
    display.look()
    assert text.getvalue().splitlines() == [
        "run 1 of 1: 8 tokens",
        "  8 tokens: building, 5 s",
        "  8 tokens: building, 10 s",
        "run 1 of 1: 8 tokens",
        "  8 tokens: verifying, 5 s",
    ]
