"""`ppbench overhead`: how much recording slows a step."""

from __future__ import annotations

from typing import Annotated

import typer

from ppbench.cli.options import Columns, HowToPrint, Overrides, Sort, SweepFile
from ppbench.cli.progress import live_status
from ppbench.console import note
from ppbench.display.fields import WORKLOAD
from ppbench.display.formats import Format
from ppbench.display.tables import View, render
from ppbench.errors import ExitCode, LaunchError

COLUMNS = [
    "step_off_ns",
    *(
        f"{name}_ratio{end}"
        for name in ("flight", "spans", "profiler")
        for end in ("", "_low", "_high")
    ),
    "num_rounds",
]


def overhead(
    file: SweepFile,
    overrides: Overrides = None,
    rounds: Annotated[
        int,
        typer.Option("--rounds", metavar="N", min=6, max=2000, help="Steps measured of each kind."),
    ] = 100,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Measure the overhead of the flight recorder, of spans and of torch.profiler."""
    import pandas as pd

    from ppbench.config.reader import read_sweep
    from ppbench.run.machine.environment import default_device
    from ppbench.run.sweep.overhead import Rounds, measure_overhead

    read = read_sweep(file, overrides or [], default_device())
    view = View.of(columns, sort)
    view.check([*(read.axes or WORKLOAD), *COLUMNS])
    finished: list[Rounds] = []
    exit_code = ExitCode.ok
    with live_status() as show:

        def show_round(place: str, num_done: int) -> None:
            show(f"{place}, {num_done} of {rounds} rounds", "" if num_done else place)

        try:
            measure_overhead(read, rounds, show_round, finished.append)
        except LaunchError as error:  # the cases that are finished are reported all the same
            if not finished:
                raise
            note(f"error: {error}")
            exit_code = ExitCode.failed_runs
    frame = pd.DataFrame([case.row() for case in finished])
    print(render(frame, how, [*(read.axes or WORKLOAD), *COLUMNS], view))
    raise typer.Exit(exit_code)
