"""Opening and zooming a timeline of a million spans, over `plotly.express.timeline`.

    python -m benchmarks.timeline [--spans 1000000] [--express-spans 10000] [--rounds 8]
                                  [--before 4f56b36]

The same headless Chromium opens pages in turn: `ppbench timeline` of a step of a million spans
(1F1B on 64 ranks, random times), the same step's page as the commit `--before` writes it, and
`plotly.express.timeline` of ten thousand spans, used as it is meant to be: a hundred times fewer.
For each page, three figures are measured: the time from the start of navigation until its first
picture is on the screen, the time from the end of a zoom until the view has been drawn again, and
the size of the file. A step of the wheel is also measured, at three depths, against 100 ms.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px

from benchmarks.browsing import Visit, close, drawn_ms, number_of, opened_browser
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import results_in_turns
from engine.plan.action import COMPUTE_OPS, SEND_OPS
from engine.plan.lower import lower
from engine.plan.predict import timed
from engine.plan.schedules.registry import build_program
from ppbench.report.pages.templates import write_page
from ppbench.report.pages.timeline import planned_page

RANKS = 64
SPANS_PER_MICROBATCH = 2 * RANKS + 4 * (RANKS - 1)  # F and B; both ends of each message
MEAN_NS, DEVIATION_NS = 10e6, 1e6
MESSAGE_NS, MESSAGE_DEVIATION_NS = 2e5, 5e4
MIB = 2**20
GIT = shutil.which("git") or "git"
Measured = dict[str, dict[str, tuple[float, ...]]]

IS_DRAWN = """document.querySelector('.chart')?.timeline?.plane
  || document.querySelector('.heatmaplayer image, .barlayer .point')"""
READY = """(async () => {
  const div = document.querySelector(".chart");
  await (div.timeline ? div.timeline.isReady : columnsOf.get(div));
  return performance.now();
})()"""
ZOOM = """(async () => {
  const { timeline } = document.querySelector(".chart, .js-plotly-plot");
  if (timeline) {
    const [start, end] = [%s, %s].map((part) => part * timeline.last);
    const began = performance.now();
    timeline.show(start, end);
    await new Promise((done) => timeline.div.addEventListener("painted", done, { once: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - began;
  }
  const div = document.querySelector(".js-plotly-plot");
  const [first, last] = div._fullLayout.xaxis.range.map((x) => +new Date(x));
  const [start, end] = [%s, %s].map((part) => first + part * (last - first));
  const began = performance.now();
  const detailed = new Promise((done) => div.addEventListener("detailed", done, { once: true }));
  await Plotly.relayout(div, { "xaxis.range": [start, end] });
  if (%s) await detailed;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
})()"""
VIEWS = {"to bars": (0.5, 0.503), "to half the step": (0.25, 0.75)}
WHEEL = """(async () => {
  const { timeline } = document.querySelector(".chart");
  const middle = timeline.last / 2;
  const painted = () => new Promise((done) => {
    timeline.div.addEventListener("painted", done, { once: true });
  });
  timeline.show(middle - %s * timeline.last / 2, middle + %s * timeline.last / 2);
  await painted();
  const { left, top, width } = timeline.rows.getBoundingClientRect();
  const place = { clientX: left + width / 2, clientY: top + 50 };
  const wheel = { deltaY: -100, cancelable: true, ...place };
  const began = performance.now();
  timeline.rows.dispatchEvent(new WheelEvent("wheel", wheel));
  await painted();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
})()"""
DEPTHS = {"of the whole": 1, "of a tenth": 0.1, "of bars": 0.003}
MOST_MS = 100
WRITE = """
from pathlib import Path
import sys
from benchmarks import timeline
spans = timeline._random_step(int(sys.argv[2]))
timeline.write_plan(Path(sys.argv[1]), spans, title="1f1b", subtitle="", facts={})
"""


def write_plan(path: Path, spans: pd.DataFrame, **told: Any) -> None:
    """Write the page of a step; the tree of another commit has it under this name too."""
    write_page(path, planned_page(spans, **told))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--spans", type=int, default=1_000_000)
    options.add_argument("--express-spans", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--before", help="A commit whose page is measured too.")
    settings, surroundings = options.parse_args(), read_surroundings()
    spans = _random_step(settings.spans)
    ours = f"ppbench timeline, {len(spans):,} spans"
    theirs = f"plotly.express, {settings.express_spans:,} spans"
    before = f"the page of {settings.before}" if settings.before else ""
    with tempfile.TemporaryDirectory() as name:
        pages = {ours: Path(name) / "ours.html", theirs: Path(name) / "express.html"}
        write_plan(pages[ours], spans, title="1f1b", subtitle="", facts={})
        _write_express(pages[theirs], spans.head(settings.express_spans))
        if before:
            pages[before] = Path(name) / "before.html"
            _write_before(settings.before, pages[before], settings.spans, Path(name) / "tree")
        with opened_browser() as visit:
            arms = {
                page: _visiting(visit, path, is_ours=page != theirs, is_wheeled=page == ours)
                for page, path in pages.items()
            }
            visits_of = results_in_turns(arms, settings.rounds)
        sizes = {page: path.stat().st_size / MIB for page, path in pages.items()}
    measured = {
        page: {what: tuple(visit[what] for visit in visits) for what in visits[0]}
        for page, visits in visits_of.items()
    }
    ratios = [
        ratio
        for other in (theirs, before)
        if other
        for ratio in _ratios(
            measured, sizes, ours, other, Goal(at_most=1) if other == before else None
        )
    ]
    ratios += [
        Ratio.of(f"{what}, over {MOST_MS} ms", values, [MOST_MS] * len(values), Goal(at_most=1))
        for what, values in measured[ours].items()
        if what.startswith("a step of the wheel")
    ]
    figures = [
        Figure(f"{page}, {what}", values, "ms")
        for page, of_page in measured.items()
        for what, values in of_page.items()
    ]
    figures += [Figure(f"{page}, size", (size,), "MiB") for page, size in sizes.items()]
    write("timeline", settings, surroundings, ratios, figures)


def _ratios(
    measured: Measured, sizes: dict[str, float], ours: str, other: str, goal: Goal | None
) -> list[Ratio]:
    """The measurements of both pages, each as a ratio of ours to the other."""
    ratios = [
        Ratio.of(f"{what}, {ours} over {other}", measured[ours][what], values, goal)
        for what, values in measured[other].items()
    ]
    exact = goal and replace(goal, is_exact=True)
    size = Ratio(f"size, {ours} over {other}", (sizes[ours] / sizes[other],), goal=exact)
    return [*ratios, size]


def _write_before(commit: str, page: Path, num_spans: int, tree: Path) -> None:
    """Let another commit write the page of the same step."""
    subprocess.run([GIT, "worktree", "add", "--detach", tree, commit], check=True, cwd=ROOT)
    try:
        subprocess.run(
            [sys.executable, "-c", WRITE, page, str(num_spans)],
            check=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
    finally:
        subprocess.run([GIT, "worktree", "remove", "--force", tree], check=True, cwd=ROOT)


def _random_step(num_spans: int) -> pd.DataFrame:
    """At least `num_spans` spans of 1F1B, all different."""
    random = np.random.default_rng(0)
    lowered = lower(build_program("1f1b", RANKS, -(-num_spans // SPANS_PER_MICROBATCH)))
    actions = [action for row in lowered.actions for action in row]
    computations = [action for action in actions if action.op in COMPUTE_OPS]
    sends = [action for action in actions if action.op in SEND_OPS]
    compute_ns = np.abs(random.normal(MEAN_NS, DEVIATION_NS, len(computations))).astype(int)
    moving_ns = np.abs(random.normal(MESSAGE_NS, MESSAGE_DEVIATION_NS, len(sends))).astype(int)
    took = dict(zip(computations, compute_ns.tolist(), strict=True))
    took |= dict(zip(sends, moving_ns.tolist(), strict=True))
    replayed = timed(lowered, [[took.get(action, 0) for action in actions]])
    spans = pd.DataFrame(replayed.spans())
    waiting = np.where(spans["lane"] == "compute", 0, random.integers(0, 3_000_000, len(spans)))
    return spans.assign(start_ns=spans["start_ns"] - waiting, waiting_ns=waiting, num_bytes=MIB)


def _write_express(page: Path, spans: pd.DataFrame) -> None:
    frame = pd.DataFrame(
        {
            "rank": "rank " + spans["rank"].astype(str),
            "op": spans["op"].astype(str),
            "microbatch": spans["microbatch"],
            "start": pd.to_datetime(spans["start_ns"]),
            "end": pd.to_datetime(spans["end_ns"]),
        }
    )
    figure = px.timeline(
        frame, x_start="start", x_end="end", y="rank", color="op", text="microbatch"
    )
    figure.write_html(page, include_plotlyjs=True)


def _visiting(
    visit: Visit, page: Path, *, is_ours: bool, is_wheeled: bool = False
) -> Callable[[], dict[str, float]]:
    """A function that opens a page and zooms; it returns the milliseconds of each."""

    def visited() -> dict[str, float]:
        tab = visit(page)
        times = {"opened": drawn_ms(tab, IS_DRAWN)}
        if is_ours:
            times["ready to zoom"] = number_of(tab, READY)
        for name, (start, end) in VIEWS.items():
            times[f"zoomed {name}"] = number_of(
                tab, ZOOM % (start, end, start, end, str(is_ours).lower())
            )
        if is_wheeled:
            for name, part in DEPTHS.items():
                times[f"a step of the wheel {name}"] = number_of(tab, WHEEL % (part, part))
        close(tab)
        return times

    return visited


if __name__ == "__main__":
    main()
