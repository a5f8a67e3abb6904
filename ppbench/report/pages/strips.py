"""Small timelines: one step of the best case and of its rival on one time scale, as plain shapes.

They are drawn as SVG without a script, so that they are there at once, on paper and in mail; the
full timelines are further down the page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from engine.plan.action import COMPUTE_OPS, Op
from ppbench.display.cases import ok_runs
from ppbench.display.units import counted, milliseconds, percent
from ppbench.errors import StoreError, UsageError
from ppbench.report.pages.judgement import Judgement
from ppbench.report.timeline.marks import Marks, Step
from ppbench.report.timeline.timelines import steps_of
from ppbench.store import Store

WIDTH = 1000  # units of the drawing; a page stretches them to its own width
_MOST_PX, _LEAST_PX, _TALLEST_PX = 28, 2, 112
_INSET = 0.8  # units between two bars
_WORK = {op.value for op in (*COMPUTE_OPS, Op.OPT)}
_GRID = 0.5  # units; bars of an op that end in the same one are drawn as one


@dataclass(frozen=True)
class Strips:
    """Steps on one time scale, and what their colours mean.

    A strip has a `name`, `facts`, a `label` for screen readers, a `height` and `shapes`: of each op
    the `color` and the `path` of all its bars.
    """

    strips: Sequence[dict[str, Any]]
    end: str
    words: tuple[tuple[str, str], ...]  # colour and word of each op


def strips(store: Store, runs: pd.DataFrame, judgement: Judgement) -> Strips | None:
    """Draw the median step of the best case and its rival; None if no spans are stored."""
    cases = [case for case in (judgement.best, judgement.rival) if case is not None]
    drawn = []
    for case in cases:
        run = median_run(runs, str(case["case_id"]))
        with contextlib.suppress(StoreError, UsageError):
            (step,) = steps_of(store, [run], [judgement.name(case)])
            rows = store.table("steps", [run["run_id"]])
            text = milliseconds(step.end_ns)
            for row in rows[rows["step"] == int(step.spans["step"].iloc[0])].to_dict("records"):
                text = f"{milliseconds(row['step_ns'])}, bubble {percent(row['bubble_fraction'])}"
            drawn.append((judgement.name(case), step, text))
    return strips_of(drawn) if drawn else None


def strips_of(drawn: Sequence[tuple[str, Step, str]]) -> Strips:
    """Draw steps, measured or planned, below each other: the name of each, and its figures."""
    end_ns = max(step.end_ns for _, step, _ in drawn)
    made = []
    words: dict[str, str] = {}
    for name, step, facts in drawn:
        row_px = max(_LEAST_PX, min(_MOST_PX, _TALLEST_PX // step.num_ranks))
        computed = [marks for marks in step.marks if marks.kind.op in _WORK]
        words |= {marks.kind.colors[0]: marks.kind.name for marks in computed}
        strip = {
            "name": name,
            "facts": facts,
            "label": f"One step of {name} on {counted(step.num_ranks, 'rank')}: "
            f"{milliseconds(step.end_ns)}",
            "height": row_px * step.num_ranks,
            "shapes": [
                {"color": marks.kind.colors[0], "path": _path(marks, end_ns, row_px)}
                for marks in computed
            ],
        }
        made.append(strip)
    return Strips(made, milliseconds(end_ns), tuple(words.items()))


def median_run(runs: pd.DataFrame, case_id: str) -> pd.Series:
    """Return the launch of a case with the median throughput, or the lower of the middle two."""
    own = ok_runs(runs)
    own = own[own["case_id"] == case_id].sort_values("tokens_per_s", kind="stable")
    return own.iloc[(own["tokens_per_s"].notna().sum() - 1) // 2]


def _path(marks: Marks, end_ns: int, row_px: int) -> str:
    """Return the outline of the bars of one op in the syntax of SVG, merged where they are tiny."""
    scale = WIDTH / end_ns
    begins, widths = ((times * scale).tolist() for times in (marks.begin_ns, marks.width_ns))
    # Bars that begin in the grid cell in which the one before ends are joined, if either is tiny.
    merged: list[tuple[int, float, float]] = []
    for rank, start, width in zip(marks.row.tolist(), begins, widths, strict=True):
        end = start + width
        if merged and merged[-1][0] == rank and width < 2 * _GRID and start - merged[-1][2] < _GRID:
            merged[-1] = rank, merged[-1][1], max(end, merged[-1][2])
        else:
            merged.append((rank, start, end))
    parts = []
    for rank, start, end in merged:
        width = max(end - start - (_INSET if end - start > 2 * _INSET else 0), 0.1)
        parts.append(f"M{start:.1f} {rank * row_px}h{width:.1f}v{max(row_px - 1, 1)}h-{width:.1f}z")
    return "".join(parts)
