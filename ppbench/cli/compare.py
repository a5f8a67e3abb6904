"""`ppbench compare`: two sides case by case, or cases along one setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    Columns,
    HowToPrint,
    IsRun,
    Metrics,
    MostLaunches,
    NumLaunches,
    Results,
    Sort,
    check_store_of,
    command,
    going_on,
    num_and_most,
    print_text,
)
from ppbench.display.formats import Format
from ppbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ppbench.commits.comparison import Comparison
    from ppbench.comparison.across import Across
    from ppbench.display.tables import View
    from ppbench.report.pages.comparison import ComparisonPage

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BASE [HEAD]] [SWEEP]",
        help="Revisions, runs, sweeps or results folders; HEAD is `worktree` if left out. A "
        "sweep file (.toml) limits it to its cases. With --across: RUNS, which are run ids, sweeps "
        "or sweep files, by default the last sweep.",
    ),
]
Axis = Annotated[
    str | None,
    typer.Option(
        "--across",
        metavar="AXIS",
        help="Compare cases that differ in this setting alone: schedule, ranks, seq_len, ...",
    ),
]
BaseValue = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="VALUE",
        help="With --across: the value that others are compared with; default: that with the most "
        "partners, then the smallest number or the sweep's first.",
    ),
]
AllPairs = Annotated[
    bool, typer.Option("--all-pairs", help="With --across: compare each value with each.")
]
Page = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Also write the comparison: as a page, or as .json, which `check` judges anew.",
    ),
]
SAVED = ".json"
"""The ending of a saved comparison."""


def compare(
    names: Names = None,
    across: Axis = None,
    base_value: BaseValue = None,
    all_pairs: AllPairs = False,
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = None,
    most: MostLaunches = None,
    output: Page = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Compare two sides, or the cases that differ in one setting: figures, and what changed."""
    from ppbench.display.tables import View

    words, view = names or [], View.of(columns, sort)
    numbers = num_and_most(launches, most, is_run=is_run)
    is_named = across is not None or any(not word.endswith(".toml") for word in words)
    check_store_of(results, words, measures=is_run or not is_named)
    result: Comparison | Across
    if across is None:
        for option, value in (("--base", base_value), ("--all-pairs", all_pairs)):
            if value:
                raise UsageError(
                    f"{option}: chooses values of a setting; name it with --across AXIS"
                )
        if not words:
            raise UsageError(
                "compare: nothing is named; give BASE [HEAD], two commits for example, or compare "
                "the last sweep along a setting with --across schedule"
            )
        result, text = _sides(words, metrics, numbers, results, how, view, output)
    else:
        options = (base_value, all_pairs, metrics)
        result, text = _along(across, words, options, numbers, results, how, view, output)
    print_text(text, how)
    if output is not None:
        word = "saved" if output.suffix == SAVED else "page"
        print(f"{word}: {output}", file=sys.stdout if how is Format.table else sys.stderr)
    is_answered = result.has_verdict and not result.is_open
    raise typer.Exit(ExitCode.ok if is_answered else ExitCode.insufficient)


def _sides(
    words: Sequence[str],
    metrics: Sequence[str] | None,
    asked: tuple[int | None, int | None],
    results: Path,
    how: Format,
    view: View,
    output: Path | None,
) -> tuple[Comparison, str]:
    """Compare two sides; return the result and its text, and write its page."""
    from ppbench.cli.comparison import comparison_text, note_aside, page_of_sides
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.comparison import compare as compare_sides
    from ppbench.commits.sides import WORKTREE
    from ppbench.files import whole_file

    base, head, sweep = split_names(words)
    launches, most = asked
    with going_on(), LiveProgress(is_shown=asked != (None, None)) as progress:
        result = compare_sides(
            base,
            head or WORKTREE,
            sweep=sweep,
            metrics=metrics or (),
            launches=launches,
            max_launches=most,
            results=results,
            progress=progress,
        )
    wanted = result.series() if how is Format.json else result.changed()
    breakdowns = result.break_down(wanted)
    if output is not None and output.suffix == SAVED:
        with whole_file(output, "--output") as saved:
            saved.write(f"{comparison_text(result, breakdowns, Format.json)}\n".encode())
    elif output is not None:
        again = command("compare", *words, metric=metrics, results=results, output=output)
        _write(output, page_of_sides(result, result.break_down(result.changed()), again))
    note_aside(result, how)
    return result, comparison_text(result, breakdowns, how, view)


def _along(
    axis: str,
    words: Sequence[str],
    options: tuple[str | None, bool, Sequence[str] | None],
    asked: tuple[int | None, int | None],
    results: Path,
    how: Format,
    view: View,
    output: Path | None,
) -> tuple[Across, str]:
    """Compare cases along an axis; return the result and its text, and write its page."""
    from ppbench.cli.comparison import across_text, note_aside, page_of_axis
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.comparison import compare as compare_sides

    base, all_pairs, metrics = options
    if output is not None and output.suffix == SAVED:
        raise UsageError(f"-o {output}: keeps two sides, BASE and HEAD; write a page: FILE.html")
    display = None
    if asked != (None, None):
        from rich.console import Console

        from ppbench.run.sweep.progress import display_for

        display = display_for(Console(stderr=True))
    with going_on():
        result = compare_sides(
            across=axis,
            runs=words,
            base=base,
            all_pairs=all_pairs,
            metrics=metrics or (),
            launches=asked[0],
            max_launches=asked[1],
            results=results,
            progress=LiveProgress(is_shown=False),
            display=display,
        )
    wanted = result.series() if how is Format.json else result.changed()
    if output is not None:
        again = command(
            *("compare", *words),
            across=axis,
            base=base,
            all_pairs=all_pairs,
            metric=metrics,
            results=results,
            output=output,
        )
        _write(output, page_of_axis(result, result.break_down(result.changed()), again))
    note_aside(result, how)
    return result, across_text(result, result.break_down(wanted), how, view)


def _write(path: Path, page: ComparisonPage) -> None:
    """Write the page; one in the folder of reports is added to their index."""
    from ppbench.report.pages.comparison import render_comparison
    from ppbench.report.pages.templates import listed, write_page

    with listed(path, REPORTS):
        write_page(path, render_comparison(page))


def split_names(words: Sequence[str]) -> tuple[str | None, str | None, Path | None]:
    """Split `[BASE [HEAD]] [SWEEP]`. Raises UsageError for more words."""
    *names, last = words
    sweep = Path(last) if last.endswith(".toml") else None
    names += [] if sweep else [last]
    if len(names) > 2:
        raise UsageError(
            f"compare {' '.join(words)}: {len(names)} sides are named; give BASE and HEAD, and a "
            "sweep file, FILE.toml, at the end"
        )
    base, head = (*names, None, None)[:2]
    return base, head, sweep
