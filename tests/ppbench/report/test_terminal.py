"""A timeline as text."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from stored_runs import MS, spans

from engine.plan.schedules.registry import build_program
from engine.plan.simulate import simulate, uniform
from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.terminal import draw_steps


def plain() -> Console:
    return Console(color_system=None, no_color=True, width=120)


def simulated(schedule: str) -> pd.DataFrame:
    program = build_program(schedule, 2, 2)
    return pd.DataFrame(simulate(program, uniform(program.placement, MS, MS, MS)).spans())


def row(text: str, rank: int) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"rank {rank} "))[8:]


def test_a_row_per_rank_with_every_action_where_it_ran() -> None:
    text = draw_steps([Step("", simulated("1f1b"))], plain())
    # Rank 0: F0 F1, idle for 2 ms, B0 (2 ms), idle... in a step of 9 ms.
    first, second = row(text, 0), row(text, 1)
    starts = [first.index(label) / len(first) for label in ("F0", "F1", "B0", "B1")]
    assert [round(9 * start) for start in starts] == [0, 1, 4, 7]
    assert second.startswith(".")
    assert [second.index(label) > 0 for label in ("F0", "B0", "F1", "B1")]


def test_idle_time_has_the_sign_of_its_cause() -> None:
    text = draw_steps([Step("", spans())], plain())
    assert {".", "~"} <= set(row(text, 0))
    assert not row(text, 1).endswith(".")  # nothing left to do is blank
    for words in ("F forward", "B backward", ". idle: another stage", "~ idle: message"):
        assert words in text


def test_steps_share_one_scale_so_that_the_shorter_ends_earlier() -> None:
    short = simulated("1f1b")
    long = short.assign(start_ns=short["start_ns"] * 2, end_ns=short["end_ns"] * 2)
    text = draw_steps([Step("long", long), Step("short", short)], plain())
    rows = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert len(rows[1].rstrip()) < 0.6 * len(rows[0].rstrip())
    assert text.index("long") < text.index("short")


def test_a_rank_with_several_stages_tells_which() -> None:
    text = draw_steps([Step("", simulated("zbv"))], plain())
    assert "0F0" in text
    assert "3F0" in text


def test_on_a_terminal_microbatches_stand_on_the_colour_of_their_op() -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=100)
    text = draw_steps([Step("", simulated("1f1b"))], console)
    assert "48;2;0;114;178m0" in text  # the blue of a forward, and microbatch 0 on it
    assert "F0" not in text
    lines = [line for line in text.splitlines() if "rank" in line]
    assert len(lines) == 2


def test_a_thousand_actions_fit_in_a_row() -> None:
    program = build_program("1f1b", 2, 500)
    step = pd.DataFrame(simulate(program, uniform(program.placement, MS, MS, MS)).spans())
    assert max(map(len, draw_steps([Step("", step)], plain()).splitlines())) <= 125
