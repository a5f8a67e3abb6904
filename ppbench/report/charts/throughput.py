"""Tokens/s of every case, as the median over its launches."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.fields import field_of
from ppbench.report.charts.canvas import Canvas, Chart, Measured, launch_note, spread_note


def throughput(measured: Measured) -> Canvas:
    """Error bars reach from the slowest to the fastest launch, or over the interval of one."""
    axis = {"rangemode": "tozero", "tickformat": ",~s"}
    title = field_of("tokens_per_s").heading
    canvas = Canvas(measured.cases, measured.axes, title, axis)
    error = {
        "type": "data",
        "symmetric": False,
        "array": lambda case: case["high"] - case["tokens_per_s"],
        "arrayminus": lambda case: case["tokens_per_s"] - case["low"],
        "thickness": 1.3,
        "width": 3,
    }
    canvas.bars(
        "tokens_per_s",
        lambda case: f"{case['tokens_per_s']:,.0f} tokens/s{launch_note(case)}{spread_note(case)}",
        **({f"error_{canvas.value}": error} if measured.cases["low"].notna().any() else {}),
    )
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="throughput",
    order=10,
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
    draw=throughput,
)
