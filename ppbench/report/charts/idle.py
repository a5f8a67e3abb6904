"""The idle time of every case by cause: the parts of its bubble, stacked."""

from __future__ import annotations

from ppbench.cautions import Caution
from ppbench.display.colors import PART_COLORS
from ppbench.display.explanation import OF_REPLICAS, PART_NAMES
from ppbench.display.fields import field_of
from ppbench.report.charts.canvas import HATCHING, Canvas, Chart, Measured, Point

PART_COLUMNS = {part: f"bubble_{part}" for part in PART_NAMES if part not in OF_REPLICAS}
"""The parts of every run."""


def idle(measured: Measured) -> Canvas | None:
    """Values are means over launches, so that the parts still add up; some may be negative.

    Single ranks beside pipelines are not drawn.
    """
    measured = measured.having(list(PART_COLUMNS.values()))
    runs = measured.runs
    if runs.empty:
        return None
    own = runs.reindex(columns=[f"bubble_{part}" for part in PART_NAMES]).astype(float)
    own = own.dropna(axis="columns", how="all").fillna(0.0)  # parts of replicas, of some
    runs = runs.assign(**own)
    runs = runs[(runs["world_size"] > 1) | (runs["world_size"].max() == 1)]
    parts = runs.groupby("case_id")[[*own.columns, "bubble_mean"]].mean()
    cases = measured.cases.drop(columns=parts.columns, errors="ignore")
    cases = cases.join(parts, on="case_id", how="inner")
    axis = {"rangemode": "tozero", "tickformat": ".0%"}
    title = "share of rank-time"
    canvas = Canvas(cases, measured.axes, title, axis, has_rows=True, barmode="relative")
    for column in own.columns:
        part = column.removeprefix("bubble_")

        def told(case: Point, part: str = part, column: str = column) -> str:
            return f"{PART_NAMES[part]}: {case[column]:.1%}<br>of {case['bubble_mean']:.1%} idle"

        canvas.marks(
            canvas.cases,
            "bar",
            column,
            told,
            name=field_of(f"{part}_ns").label,
            orientation="h",
            width=canvas.bar_width,
            marker={"color": PART_COLORS[part], "line": {"width": 0}, "pattern": HATCHING},
        )
    canvas.add_hatch_keys()
    return canvas


CHART = Chart(
    name="idle",
    order=60,
    heading="Where the idle time went",
    note="Idle time as shares of rank-time, stacked by cause: what the schedule itself leaves "
    "idle, and what adds to it. A part to the left of zero saves time.",
    concerns=(
        Caution.oversubscribed,
        Caution.time_sliced,
        Caution.behind_plan,
        Caution.coarse_clock,
    ),
    needs="its idle time by cause",
    draw=idle,
)
