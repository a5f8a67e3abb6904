"""Tokens/s of every case, as the median over its launches."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.fields import field_of
from ppbench.report.charts.canvas import Canvas
from ppbench.report.charts.chart import Chart, Measured
from ppbench.report.charts.panels import arrange


def throughput(measured: Measured) -> Canvas:
    """Error bars reach from the slowest to the fastest launch, or over the interval of one."""
    axis = {"rangemode": "tozero", "tickformat": ",~s"}
    canvas = Canvas(arrange(measured.cases, measured.axes), field_of("tokens_per_s").heading, axis)
    canvas.bars("tokens_per_s", "%{value:,.0f} tokens/s", with_spread=True)
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="throughput",
    heading="Throughput",
    note="Tokens of a step divided by its full time, optimizer included. Lines: from the slowest "
    "to the fastest launch, or the 95 % interval of the median over the steps of a single launch.",
    concerns=(
        Caution.not_finite,
        Caution.oversubscribed,
        Caution.time_sliced,
        Caution.noisy_steps,
        Caution.unsettled_steps,
        Caution.behind_plan,
        Caution.busy_machine,
        Caution.throttled,
        Caution.few_steps,
        Caution.no_warmup,
    ),
    needs="",
    draw=throughput,
)
