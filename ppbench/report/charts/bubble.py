"""The measured bubble of every case, and that of theory."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.fields import field_of
from ppbench.report.charts.canvas import Canvas
from ppbench.report.charts.chart import Chart, Measured
from ppbench.report.charts.panels import arrange, figure_text


def bubble(measured: Measured) -> Canvas:
    axis = {"rangemode": "tozero", "tickformat": ".0%"}
    canvas = Canvas(
        arrange(measured.cases, measured.axes), field_of("bubble_fraction").heading, axis
    )
    canvas.bars("bubble_fraction", "%{value:.1%} measured")
    cases = canvas.arranged.cases
    names = cases["text"].map(figure_text)
    theory = cases.assign(value=cases["bubble_fraction_theory"], hover=names + "<br>theory: ")
    canvas.markers(theory, "theory", {"symbol": "diamond", "size": 8}, "%{value:.1%}")
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="bubble",
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
    needs="",
    draw=bubble,
)
