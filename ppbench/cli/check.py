"""`ppbench check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ppbench.cli.commands import COMPARE
from ppbench.cli.comparison import gated, rechecked
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import (
    RESULTS,
    Budget,
    IsRun,
    Metrics,
    MostLaunches,
    NumLaunches,
    Results,
    check_store_of,
    going_on,
    until_of,
)
from ppbench.display.commands import command
from ppbench.display.document import Result, render
from ppbench.display.formats import Format
from ppbench.errors import UsageError

if TYPE_CHECKING:
    from ppbench.comparison.sides import Side

SAVED = ".json"
"""The ending of a saved comparison."""
HeadsSweep = Annotated[
    Path | None,
    argument(
        "[SWEEP | SCRIPT | STORE | COMPARISON]",
        "Sweep file; default: that of head's runs. Or a training script, whose attached runs "
        "are judged; a results folder; a saved comparison (.json), judged anew by newer launches.",
    ),
]


Base = Annotated[str | None, option("--base REV", "Default: where HEAD left the main branch.")]
Head = Annotated[str, option("--head REV", "Default: the work tree as it is.")]
Threshold = Annotated[
    str | None, option("--threshold SHARE", "Largest regression that passes, such as 2%.")
]
Summary = Annotated[
    Path | None, option("--summary FILE.md", "Also write a summary for a pull request.")
]


def _known() -> list[str]:
    from ppbench.commits.saved import COLUMNS

    return [*catalogue(), *COLUMNS]


@answers("check", COMPARE, 2, _known)
def check(
    file: HeadsSweep = None,
    base: Base = None,
    head: Head = "worktree",
    threshold: Threshold = None,
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = None,
    most: MostLaunches = None,
    budget: Budget = None,
    summary: Summary = None,
    results: Results = RESULTS,
) -> Result:
    """CI gate: exits 1 on a regression, 3 on insufficient data, 4 on failed runs."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.check import check as check_sides

    if file is not None and file.suffix == SAVED:
        from ppbench.commits.saved import check_saved

        of_gate = {
            "--base": base,
            "--head": head != "worktree",
            "--threshold": threshold,
            "--metric": metrics,
            "--summary": summary,
            "--max-launches": most,
            "--budget": budget,
        }
        for name in (name for name, value in of_gate.items() if value):
            raise UsageError(f"{name}: is for the gate; a comparison says itself what is compared")
        num = (launches or 5) if is_run else None
        with going_on(), LiveProgress(is_shown=is_run) as progress:
            recheck = check_saved(file, launches=num, results=results, progress=progress)
        return rechecked(recheck)
    from ppbench.config.shipped import from_here
    from ppbench.config.sweep import read_share
    from ppbench.files import whole_file

    if file is not None and file.is_dir():
        results = file
        file = None
    largest = None if threshold is None else read_share("--threshold", threshold)
    check_store_of(results, [head, base or ""], measures=is_run)
    launches, most, budget_s = until_of(launches, most, budget, is_run=is_run)
    with going_on(), LiveProgress(is_shown=is_run) as progress:
        result = check_sides(
            file,
            base=base,
            head=head,
            threshold=largest,
            metrics=metrics or (),
            launches=launches,
            max_launches=most,
            budget_s=budget_s,
            results=results,
            progress=progress,
        )
    again = command(
        *("check", *([str(from_here(Path(result.source)))] if result.source else [])),
        base=_lasting_name(result.comparison.base),
        head=_lasting_name(result.comparison.head),
        threshold=threshold,
        metric=metrics,
        results=results,
        run=is_run,
        launches=launches,
        max_launches=most,
        budget=budget,
    )
    answer = gated(result, again)
    if summary is not None:
        with whole_file(summary, "--summary") as page:
            page.write(f"{render(answer, Format.markdown)}\n".encode())
    return answer


def _lasting_name(side: Side) -> str:
    """The name of a side that means the same commit whatever HEAD is by then."""
    return side.commit[:12] if side.commit and side.is_clean else side.name
