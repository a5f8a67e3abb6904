"""The commands of regression tracking: parse, call, print. No logic, nothing heavy loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli_options import REPORTS, RESULTS, HowToPrint, Overrides, Results, SweepFile
from ppbench.errors import UsageError
from ppbench.files import is_stream
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

    outcome = noises.measure_noise(file, overrides or [], launches, results, how)
    print(outcome.text)
    raise typer.Exit(outcome.exit_code)


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
    outcome = comparing.compare_named(question, results, how)
    print(outcome.text)
    raise typer.Exit(outcome.exit_code)


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


@commands.command()
def backfill(
    span: Annotated[
        str, typer.Argument(metavar="A..B", help="Commits: A, B and what lies between; HEAD~20..")
    ],
    file: SweepFile,
    every: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Every Nth commit, and A and B.")
    ] = 1,
    most: Annotated[
        int | None,
        typer.Option("--max", metavar="N", min=1, help="N commits, spread evenly."),
    ] = None,
    launches: Annotated[
        int | None,
        typer.Option(
            "--launches", metavar="N", min=1, max=1000, help="Of each; default: the sweep's own."
        ),
    ] = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try commits again that failed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the commits in order; measure none.")
    ] = False,
    how: HowToPrint = Format.table,
) -> None:
    """Measure past commits in work trees: newest, oldest, then the middle of the largest gap."""
    from ppbench.tracking import backfill as backfilling

    if most is not None and every != 1:
        raise UsageError("--every and --max: both choose commits; give one of them")
    wanted = backfilling.Wanted(span, every, most, launches, retry_failed)
    outcome = backfilling.backfill(wanted, file, overrides or [], results, how, is_dry_run=dry_run)
    print(outcome.text)
    raise typer.Exit(outcome.exit_code)


@commands.command()
def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A commit before the change.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A commit after it.")],
    file: SweepFile,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="The figure that changed.")
    ] = "tokens_per_s",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KEY=VALUE", help="Of the cases, only those that match."),
    ] = None,
    confidence: Annotated[
        str, typer.Option("--confidence", metavar="P%", help="How sure the answer must be.")
    ] = "95%",
    max_launches: Annotated[
        int | None,
        typer.Option("--max-launches", metavar="N", min=1, help="Launches to make, at most."),
    ] = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try commits again that failed.")
    ] = False,
    how: HowToPrint = Format.table,
) -> None:
    """Find the first bad commit with as few launches as the noise allows."""
    from ppbench.tracking import bisecting

    question = bisecting.Question(
        good,
        bad,
        file,
        tuple(overrides or ()),
        metric,
        tuple(only or ()),
        confidence,
        max_launches,
        retry_failed,
    )
    outcome = bisecting.bisect(question, results, how)
    print(outcome.text)
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
        is_for_people = how is Format.table and not is_stream(outcome.page)
        print(f"page: {outcome.page}", file=sys.stdout if is_for_people else sys.stderr)
    raise typer.Exit(outcome.exit_code)
