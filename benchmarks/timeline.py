"""How fast a timeline opens and zooms, beside `plotly.express.timeline`.

    python benchmarks/timeline.py [--spans 1000000] [--express-spans 10000] [--times 7]

Two pages in the same headless Chromium, in turn: `ppbench timeline` of a step of a million spans
(1F1B on 64 ranks, times drawn at random), and `plotly.express.timeline` of ten thousand spans, as
it is meant to be used. Of each page: the time from the start of navigation until its first picture
is on the screen, and from the end of a zoom until what is in view has been drawn again; then the
size of the file. Medians with their range. Needs Chromium: apt-get install chromium.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.express as px

from engine.plan.action import COMPUTE_OPS, SEND_OPS
from engine.plan.lower import lower
from engine.plan.replay import replay
from engine.plan.schedules.registry import build_program
from ppbench.report.timeline_page import write_plan

sys.path.append(str(Path(__file__).parents[1] / "tests" / "browser"))
from chromium import Browser, Tab

RANKS = 64
SPANS_PER_MICROBATCH = 2 * RANKS + 4 * (RANKS - 1)  # F and B; both ends of each message
MEAN_NS, DEVIATION_NS = 10e6, 1e6
MESSAGE_NS, MESSAGE_DEVIATION_NS = 2e5, 5e4
MIB = 2**20

DRAWN = """(async () => {
  const div = document.querySelector(".js-plotly-plot") ?? document.querySelector(".chart");
  const isDrawn = () => document.querySelector(".heatmaplayer image, .barlayer .point");
  while (!isDrawn()) await new Promise((done) => setTimeout(done, 1));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now();
})()"""
READY = "columnsOf.get(document.querySelector('.chart')).then(() => performance.now())"
ZOOM = """(async () => {
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


def main() -> None:
    settings = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spans = _random_step(settings.spans)
        pages = {"ppbench timeline": folder / "ours.html", "plotly.express": folder / "px.html"}
        began = time.perf_counter()
        write_plan(pages["ppbench timeline"], spans, title="1f1b", subtitle="", facts=[])
        took = time.perf_counter() - began
        sizes = {"ppbench timeline": len(spans), "plotly.express": settings.express_spans}
        _write_express(pages["plotly.express"], spans.head(settings.express_spans))
        with Browser(folder / "profile") as browser:
            found = [_measured(browser, pages) for _ in range(settings.times)]
    print(f"writing the page of {len(spans):,} spans: {took:.1f} s")
    for kind, page in pages.items():
        print(f"{kind}, {sizes[kind]:,} spans, {found[0][page.name]['MiB']:.1f} MiB")
        for name in found[0][page.name]:
            if name != "MiB":
                _print(name, [one[page.name][name] for one in found])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--express-spans", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=7)
    return parser.parse_args()


def _random_step(num_spans: int) -> pd.DataFrame:
    """At least so many spans of 1F1B, none like another."""
    random = np.random.default_rng(0)
    lowered = lower(build_program("1f1b", RANKS, -(-num_spans // SPANS_PER_MICROBATCH)))
    actions = [action for row in lowered.actions for action in row]
    computations = [action for action in actions if action.op in COMPUTE_OPS]
    sends = [action for action in actions if action.op in SEND_OPS]
    compute_ns = np.abs(random.normal(MEAN_NS, DEVIATION_NS, len(computations))).astype(int)
    moving_ns = np.abs(random.normal(MESSAGE_NS, MESSAGE_DEVIATION_NS, len(sends))).astype(int)
    replayed = replay(
        lowered,
        dict(zip(computations, compute_ns.tolist(), strict=True)),
        dict(zip(sends, moving_ns.tolist(), strict=True)),
    )
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


def _measured(browser: Browser, pages: dict[str, Path]) -> dict[str, dict[str, float]]:
    found = {}
    for kind, page in pages.items():
        is_ours = kind == "ppbench timeline"
        tab = Tab(browser, page, 1440)
        times = {"MiB": page.stat().st_size / MIB, "opened, ms": _number(tab, DRAWN)}
        if is_ours:
            times["ready to zoom, ms"] = _number(tab, READY)
        for name, (start, end) in VIEWS.items():
            times[f"zoomed {name}, ms"] = _number(tab, ZOOM % (start, end, str(is_ours).lower()))
        assert tab.problems() == []
        tab.close()
        found[page.name] = times
    return found


def _number(tab: Tab, script: str) -> float:
    return float(str(tab.evaluate(script)))


def _print(name: str, values: list[float]) -> None:
    middle = statistics.median(values)
    print(f"  {name:28} {middle:8,.0f}  [{min(values):,.0f}, {max(values):,.0f}]")


if __name__ == "__main__":
    main()
