"""The measured bubble of every case, and that of theory."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.fields import field_of
from ppbench.report.charts.canvas import Canvas, Chart, Measured, launch_note


def bubble(measured: Measured) -> Canvas:
    axis = {"rangemode": "tozero", "tickformat": ".0%"}
    title = field_of("bubble_fraction").heading
    canvas = Canvas(measured.cases, measured.axes, title, axis)
    canvas.bars(
        "bubble_fraction",
        lambda case: f"{case['bubble_fraction']:.1%} measured{launch_note(case)}",
    )
    canvas.markers(
        canvas.cases,
        "bubble_fraction_theory",
        lambda case: f"theory: {case['bubble_fraction_theory']:.1%}",
        "theory",
        symbol="diamond",
        size=8,
    )
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="bubble",
    order=30,
    heading="Bubble",
    note="Bars: the measured share of rank-time without compute. Diamonds: the share that the "
    "schedule leaves idle even with free transfers and equal (or the emulated) stages.",
    concerns=(
        Caution.oversubscribed,
        Caution.time_sliced,
        Caution.behind_plan,
        Caution.coarse_clock,
        Caution.busy_machine,
        Caution.bare_stage,
    ),
    draw=bubble,
)
