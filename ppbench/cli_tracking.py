"""The commands of regression tracking: parse, call, print. No logic, nothing heavy loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli_options import REPORTS, RESULTS, HowToPrint, Overrides, Results, SweepFile
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


@commands.command()
def history(
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="A figure: a column of `runs`.")
    ] = "tokens_per_s",
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="CONDITION", help="Of which runs; as for `ppbench ls`."),
    ] = None,
    has_all: Annotated[
        bool, typer.Option("--all", help="Also commits off the first-parent line of HEAD.")
    ] = False,
    has_dirty: Annotated[
        bool, typer.Option("--dirty", help="Also work trees with uncommitted changes.")
    ] = False,
    repo: Annotated[
        Path | None,
        typer.Option("--repo", metavar="DIR", help="The repository; by default it is found."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the page.")
    ] = None,
    has_page: Annotated[bool, typer.Option("--page/--no-page", help="Write a page.")] = True,
    results: Results = RESULTS,
    reports: Annotated[Path, typer.Option("--reports", help="Folder for pages.")] = REPORTS,
    how: HowToPrint = Format.table,
) -> None:
    """A figure over commits: per case and machine its levels, and which commits changed it."""
    from ppbench.tracking import history as histories

    asked = histories.Asked(metric, where or [], has_all, has_dirty, repo)
    path = page or (reports / histories.page_name(asked) if has_page else None)
    outcome = histories.history(asked, results, path, reports, how)
    if outcome.text:
        print(outcome.text)
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    if outcome.page:
        is_for_people = how is Format.table
        print(f"page: {outcome.page}", file=sys.stdout if is_for_people else sys.stderr)
    raise typer.Exit(outcome.exit_code)
