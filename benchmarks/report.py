"""Size and opening time of a report, over plotly.js alone, and with ten times as many runs.

    python -m benchmarks.report [--rounds 12]

Emulated sweeps of 8 cases and of 80 cases each write a report, as `ppbench sweep` does. One
headless Chromium opens three pages in turn: a page with only plotly.js and a chart of two bars, the
least that a page with an interactive figure can hold; the report of 8 runs; and that of 80. The
time is from the start of navigation until the first figure is on the screen. Sizes are those of the
files, plotly.js included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go

from benchmarks.browsing import Visit, close, drawn_ms, opened_browser
from benchmarks.outcome import Figure, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import in_turns

IS_DRAWN = "document.querySelector('.js-plotly-plot .main-svg')"
LENGTHS = [16 * n for n in range(1, 11)]
SWEEP = """\
name = "opened"
device = "emulated"
world_size = 2

[model]
preset = "llama-tiny"

[emulated]
F_ms = 1
I_ms = 1
W_ms = 1

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 5

[grid]
schedule = ["afab", "1f1b", "zb_h1", "zbv"]
num_microbatches = [4, 8]
seq_len = {lengths}
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=12)
    settings, surroundings = options.parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory(prefix="ppbench-report-") as name:
        folder = Path(name)
        alone = folder / "alone.html"
        go.Figure(go.Bar(y=[1, 2])).write_html(alone, include_plotlyjs=True)
        pages = {
            "plotly.js alone": alone,
            "report of 8 runs": _report(folder / "small", LENGTHS[:1]),
            "report of 80 runs": _report(folder / "large", LENGTHS),
        }
        with opened_browser() as visit:
            arms = {page: _opening(visit, path) for page, path in pages.items()}
            opened = in_turns(arms, settings.rounds, num_warmup=2, unit="ms")
        sizes = {page: path.stat().st_size for page, path in pages.items()}
    alone_, small, large = arms
    ratios = [
        opened.ratio("opening, report of 8 runs over plotly.js alone", small, alone_),
        opened.ratio("opening, report of 80 runs over plotly.js alone", large, alone_),
        opened.ratio("opening, report of 80 runs over 8 runs", large, small),
        Ratio("size, report of 8 runs over plotly.js alone", (sizes[small] / sizes[alone_],)),
        Ratio("size, report of 80 runs over plotly.js alone", (sizes[large] / sizes[alone_],)),
    ]
    mib = [Figure(f"{page}, size", (size / 2**20,), "MiB") for page, size in sizes.items()]
    write("report", settings, surroundings, ratios, [*opened.figures(), *mib])


def _report(folder: Path, lengths: list[int]) -> Path:
    """Run a sweep, and return the path of its report."""
    folder.mkdir()
    (folder / "opened.toml").write_text(SWEEP.format(lengths=lengths))
    ppbench = [sys.executable, "-c", "from ppbench.cli import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*ppbench, "sweep", "opened.toml"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    return next(page for page in (folder / "reports").glob("*.html") if page.stem != "index")


def _opening(visit: Visit, page: Path) -> Callable[[], float]:
    def opened_ms() -> float:
        tab = visit(page)
        took_ms = drawn_ms(tab, IS_DRAWN)
        close(tab)
        return took_ms

    return opened_ms


if __name__ == "__main__":
    main()
