"""`ppbench noise`."""

from __future__ import annotations

from typing import Annotated

from ppbench.cli.commands import MEASURE
from ppbench.cli.declare import option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import (
    RESULTS,
    MostTime,
    Overrides,
    Results,
    SweepFile,
    going_on,
    seconds_in,
)
from ppbench.console import note
from ppbench.display.document import Result
from ppbench.display.fields import WORKLOAD
from ppbench.display.rows import Rows
from ppbench.display.tables import Table


@answers("noise", MEASURE, 3, catalogue)
def noise(
    file: SweepFile,
    launches: Annotated[
        int, option("--launches N", "Launches of each case.", min=3, max=1000)
    ] = 10,
    budget: MostTime = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
) -> Result:
    """Measure the noise of this machine, which hides changes.

    Each case takes turns with itself. Says what a launch decides, and how many launches a claim
    needs. Shows the drift between sessions beside it, once launches of one commit in two are
    stored.
    """
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.noise import noise as measure

    budget_s = seconds_in(budget)
    with going_on(), LiveProgress() as progress:
        result = measure(
            file,
            launches=launches,
            budget_s=budget_s,
            overrides=overrides or (),
            results=results,
            progress=progress,
        )
    shown = [
        *(result.axes or WORKLOAD),
        "num_launches",
        *(["num_discounted"] if result.has_discounts else []),
        *("deviation", "deviation_low", "deviation_high"),
        *("deviation_in_turns", "deviation_of_starts"),
        *(["num_sessions", "drift"] if result.has_drift else []),
        "detectable_change",
    ]
    for text in result.notes:
        note(f"note: {text}")
    rows = Rows.of(result.frame)
    blocks = [] if result.frame.empty else [Table(rows, shown)]
    return Result(blocks, rows, {"notes": list(result.notes)}, result.exit_code)
