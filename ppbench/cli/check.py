"""`ppbench check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    RESULTS,
    HowToPrint,
    IsRun,
    Metrics,
    NumLaunches,
    Results,
    command,
    going_on,
)
from ppbench.display.formats import Format

if TYPE_CHECKING:
    from ppbench.commits.sides import Side

HeadsSweep = Annotated[
    Path | None,
    typer.Argument(metavar="[SWEEP]", help="Sweep file; default: that of head's runs."),
]


Base = Annotated[
    str | None,
    typer.Option(metavar="REV", help="Default: where HEAD left the main branch."),
]
Threshold = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Largest regression that passes, such as 2%."),
]
Summary = Annotated[
    Path | None,
    typer.Option(metavar="FILE.md", help="Also write a summary for a pull request."),
]


def check(
    file: HeadsSweep = None,
    base: Base = None,
    head: Annotated[
        str, typer.Option(metavar="REV", help="Default: the work tree as it is.")
    ] = "worktree",
    threshold: Threshold = None,
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = 5,
    summary: Summary = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """CI gate: exits 1 on a regression, 3 on insufficient data, 4 on failed runs."""
    from ppbench.cli.comparison import gate_text, note_aside
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.check import check as check_sides
    from ppbench.commits.comparison import break_down
    from ppbench.files import whole_file

    num_launches = launches if is_run else None
    with going_on(), LiveProgress(is_shown=is_run) as progress:
        result = check_sides(
            file,
            base=base,
            head=head,
            threshold=threshold,
            metrics=metrics or (),
            launches=num_launches,
            results=results,
            progress=progress,
        )
    breakdowns = break_down(result.comparison, result.comparison.changed())
    again = command(
        *("check", *([] if result.sweep_file is None else [_near(result.sweep_file)])),
        base=_lasting_name(result.comparison.base),
        head=_lasting_name(result.comparison.head),
        threshold=threshold,
        metric=metrics,
        results=results,
        run=is_run,
        launches=num_launches,
    )
    note_aside(result.comparison, how)
    if summary is not None:
        with whole_file(summary, "--summary") as page:
            page.write(f"{gate_text(result, breakdowns, Format.markdown, again)}\n".encode())
    print(gate_text(result, breakdowns, how, again))
    raise typer.Exit(result.exit_code)


def _lasting_name(side: Side) -> str:
    """The name of a side that means the same commit whatever HEAD is by then."""
    return side.commit[:12] if side.commit and side.is_clean else side.name


def _near(file: str) -> str:
    """The path as it would be typed here."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
