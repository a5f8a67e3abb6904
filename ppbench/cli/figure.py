"""`ppbench figure`: one figure as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli import completion
from ppbench.cli.commands import LOOK
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, file_written
from ppbench.cli.options import RESULTS, LastSweepRuns, StoredResults
from ppbench.display.document import Result
from ppbench.display.formats import Theme


def _known(ctx: typer.Context, name: str) -> str:
    """Refuse an unknown figure before anything else is asked for."""
    if not ctx.resilient_parsing:
        from ppbench import figures

        figures.check_name(name)
    return name


@answers("figure", LOOK, 7)
def figure(
    name: Annotated[
        str,
        argument(
            "NAME", "timeline, throughput, bubble, memory, ...", completion.figures, callback=_known
        ),
    ],
    output: Annotated[
        Path,
        option("-o --output FILE.png|.svg|.pdf|.html|.json", "Output file."),
    ],
    runs: LastSweepRuns = None,
    width: Annotated[int | None, option("--width PX", "", min=100, max=10_000)] = None,
    height: Annotated[int | None, option("--height PX", "", min=100, max=10_000)] = None,
    scale: Annotated[float, option("--scale", "Scale factor of a PNG.", min=0.1, max=10)] = 2,
    theme: Annotated[Theme, option("--theme", "Colours of the background.")] = Theme.light,
    step: Annotated[
        str | None, option("--step K|median|slowest", "For timelines: which step.")
    ] = None,
    planned: Annotated[
        bool, option("--planned", "For timelines: the plan under each step.")
    ] = False,
    path: Annotated[bool, option("--path", "For timelines: the critical path.")] = False,
    results: StoredResults = RESULTS,
) -> Result:
    """Draw one figure into a file."""
    from ppbench import figures
    from ppbench.files import check_suffix, write_file
    from ppbench.report.images import IMAGE_SUFFIXES, Size, drawn
    from ppbench.results import Results as Chosen
    from ppbench.store import Store

    suffix = check_suffix(output, IMAGE_SUFFIXES)
    store = Store(results)
    chosen = Chosen(store, store.every_run() if runs else store.last_sweep().runs)
    options = {"step": step, "planned": planned, "path": path}
    given = {name: value for name, value in options.items() if value}
    drawing = figures.draw(name, chosen, runs or None, theme, width=width, **given)
    write_file(output, [drawn(drawing, suffix, Size(width, height, scale))])
    return file_written(output)
