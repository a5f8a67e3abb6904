"""`ppbench noise`."""

from __future__ import annotations

from typing import Annotated

import typer

from ppbench.cli.options import (
    RESULTS,
    Columns,
    HowToPrint,
    Overrides,
    Results,
    Sort,
    SweepFile,
    going_on,
)
from ppbench.console import note
from ppbench.display.fields import WORKLOAD
from ppbench.display.formats import Format
from ppbench.display.tables import View, render


def noise(
    file: SweepFile,
    launches: Annotated[
        int, typer.Option("--launches", metavar="N", min=3, max=1000, help="Launches of each case.")
    ] = 10,
    overrides: Overrides = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Measure launch-to-launch noise on this machine, which hides changes.

    Shows the drift between sessions beside it, once launches of one commit in two are stored.
    """
    from rich.console import Console

    from ppbench.commits.noise import noise as measure
    from ppbench.run.sweep.progress import display_for

    view = View.of(columns, sort)
    spread = ["deviation", "deviation_low", "deviation_high"]
    display, settings = display_for(Console(stderr=True)), overrides or []
    with going_on():
        result = measure(
            file, launches=launches, overrides=settings, results=results, display=display
        )
    drifts = ["num_sessions", "drift", "drift_low", "drift_high"] if result.has_drift else []
    counts = ["num_launches", *(["num_discounted"] if result.num_discounted else [])]
    shown = [
        *(result.axes or WORKLOAD),
        *counts,
        *spread,
        *drifts,
        "detectable_change",
    ]
    for text in result.notes:
        note(f"note: {text}")
    print("" if result.frame.empty else render(result.frame, how, shown, view))
    raise typer.Exit(result.exit_code)
