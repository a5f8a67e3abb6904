"""The commands of regression tracking: parse, call, print. No logic, nothing heavy loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from ppbench.cli_options import RESULTS, HowToPrint, Overrides, Results, SweepFile
from ppbench.format import Format

commands = typer.Typer()


@commands.command()
def noise(
    file: SweepFile,
    launches: Annotated[
        int, typer.Option("--launches", metavar="N", min=3, max=1000, help="Launches to make.")
    ] = 10,
    overrides: Overrides = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Measure how much launches differ that should not, and keep it as the floor of verdicts."""
    from ppbench.tracking import noise as noises

    outcome = noises.measure_noise(file, overrides or [], launches, results, how)
    print(outcome.table)
    raise typer.Exit(outcome.exit_code)
