"""A timeline as text."""

from __future__ import annotations

from rich.console import Console
from stored_runs import simulated_spans

from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.terminal import TextTimeline


def test_on_a_terminal_microbatches_stand_on_the_colour_of_their_op() -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=100)
    text = TextTimeline([Step("", simulated_spans("1f1b", 2, 2))]).drawn(console)
    assert "48;2;0;114;178m0" in text  # the blue of a forward, and microbatch 0 on it
    assert "F0" not in text
    lines = [line for line in text.splitlines() if "rank" in line]
    assert len(lines) == 2


def test_a_thousand_actions_fit_in_a_row() -> None:
    step = Step("", simulated_spans("1f1b", 2, 500))
    console = Console(color_system=None, no_color=True, width=120)
    assert max(map(len, TextTimeline([step]).drawn(console).splitlines())) <= 125
