"""`ppbench backfill`."""

from __future__ import annotations

from typing import Annotated

from ppbench.cli.commands import COMPARE
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import (
    RESULTS,
    MostTime,
    Overrides,
    Results,
    RetryFailed,
    SweepFile,
    going_on,
    seconds_in,
    typed_command,
)
from ppbench.console import note
from ppbench.display.document import Result
from ppbench.display.fields import COMMIT_COLUMNS
from ppbench.display.rows import Rows
from ppbench.display.tables import Table
from ppbench.display.units import counted


@answers("backfill", COMPARE, 4, catalogue)
def backfill(
    span: Annotated[str, argument("A..B", "Commits: A, B and those between; HEAD~20..")],
    file: SweepFile,
    most: Annotated[
        int | None, option("--max N", "Measure N commits, spread evenly.", min=1)
    ] = None,
    launches: Annotated[
        int | None,
        option("--launches N", "Launches of each; default: the sweep's.", min=1, max=1000),
    ] = None,
    budget: MostTime = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
    retry_failed: RetryFailed = False,
    dry_run: Annotated[
        bool, option("--dry-run", "List the commits in order; measure none.")
    ] = False,
) -> Result:
    """Measure past commits in work trees: newest, oldest, then the middle of the largest gap.

    Each takes turns with the newest, so that `history` compares what the same moments show.
    """
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.backfill import backfill as measure
    from ppbench.comparison.lines import listed
    from ppbench.judge.verdicts import SPEED

    budget_s = seconds_in(budget)
    with going_on(), LiveProgress() as progress:
        result = measure(
            span,
            file,
            most=most,
            launches=launches,
            budget_s=budget_s,
            overrides=overrides or (),
            results=results,
            retries_failed=retry_failed,
            is_dry_run=dry_run,
            progress=progress,
        )
    shown = [*COMMIT_COLUMNS, "status"]
    if not dry_run:
        shown = [*COMMIT_COLUMNS, *result.axes, "num_launches", "status", SPEED]
        shown += ["error"] if result.frame["error"].any() else []
    if result.missing:
        note(
            f"note: --budget is spent: {counted(len(result.missing), 'commit')} lack launches: "
            f"{listed(result.missing)}; go on with: {typed_command()}"
        )
    rows = Rows.of(result.frame)
    return Result([Table(rows, shown, ["commit"])], rows, exit_code=result.exit_code)
