"""`ppbench compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli.options import RESULTS, HowToPrint, IsRun, Metrics, NumLaunches, Results, going_on
from ppbench.display.formats import Format
from ppbench.errors import ExitCode, UsageError


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE [HEAD]] [SWEEP]",
            help="Revisions, runs, sweeps or results folders; HEAD is `worktree` if left out. A "
            "sweep file (.toml) limits it to its cases.",
        ),
    ],
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = 5,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Compare two sides case by case: throughput, bubble, memory, and which spans changed."""
    from ppbench.cli.comparison import comparison_text, note_aside
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.comparison import break_down
    from ppbench.commits.comparison import compare as compare_sides
    from ppbench.commits.sides import WORKTREE

    base, head, sweep = split_names(names)
    with going_on(), LiveProgress(is_shown=is_run) as progress:
        comparison = compare_sides(
            base,
            head or WORKTREE,
            sweep=sweep,
            metrics=metrics or (),
            launches=launches if is_run else None,
            results=results,
            progress=progress,
        )
    wanted = comparison.series() if how is Format.json else comparison.changed()
    text = comparison_text(comparison, break_down(comparison, wanted), how)
    note_aside(comparison, how)
    print(text)
    raise typer.Exit(ExitCode.ok if comparison.has_verdict else ExitCode.insufficient)


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
