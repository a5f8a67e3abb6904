"""The commands of regression tracking: parse, call, print. No logic, nothing heavy loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli_options import RESULTS, HowToPrint, Overrides, Results, SweepFile
from ppbench.format import Format

commands = typer.Typer()
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="NAME", help="tokens_per_s, bubble_fraction, ...; repeatable."
    ),
]
IsRun = Annotated[
    bool, typer.Option("--run", help="Measure both sides first, launches interleaved.")
]
NumLaunches = Annotated[
    int, typer.Option("--launches", metavar="K", min=1, max=1000, help="With --run, of each side.")
]


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

    print(noises.measure_noise(file, overrides or [], launches, results, how))


@commands.command()
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE [HEAD]] [SWEEP]",
            help="Revisions, runs, sweeps or results folders; HEAD is `worktree` if left out. A "
            "sweep file (.toml) for its cases alone.",
        ),
    ],
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = 5,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Compare two sides case by case: throughput, bubble, memory, and which spans moved."""
    from ppbench.tracking import comparing

    question = comparing.read_question(names, metrics or [], launches if is_run else None)
    print(comparing.compare_named(question, results, how))


@commands.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[SWEEP]", help="Sweep file; by default that of head's runs."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="REV", help="By default where HEAD left the main branch."),
    ] = None,
    head: Annotated[
        str, typer.Option(metavar="REV", help="By default the tree as it is.")
    ] = "worktree",
    threshold: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="How much worse a figure may get, such as 2%."),
    ] = None,
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = 5,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE.md", help="Write a summary for a pull request too."),
    ] = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """The gate for CI. Ends with 1 for a regression, 4 for a failure, 3 for too little data."""
    from ppbench.tracking import checking

    measured = launches if is_run else None
    asked = checking.Asked(file, base, head, threshold, metrics or [], measured)
    outcome = checking.check(asked, results, how, summary)
    print(outcome.text)
    raise typer.Exit(outcome.exit_code)
