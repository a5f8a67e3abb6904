"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.format import Format

Results = Annotated[Path, typer.Option("--results", help="Folder of the store.")]
HowToPrint = Annotated[Format, typer.Option("--format", help="How to print.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, a unique prefix, or `last`.")]
SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep file, TOML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting or an axis."),
]
RESULTS = Path("results")
REPORTS = Path("reports")
