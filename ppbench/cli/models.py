"""Check which architectures can be split exactly."""

from __future__ import annotations

from typing import Annotated

from ppbench.cli.commands import MEASURE
from ppbench.cli.declare import option
from ppbench.cli.emit import answers, catalogue
from ppbench.display.document import Block, Result, Text
from ppbench.display.rows import Rows
from ppbench.display.tables import Table
from ppbench.errors import ExitCode, UsageError

COLUMNS = [
    "architecture",
    "status",
    "plan",
    "dtype",
    "largest_difference",
    "num_parameters",
    "seconds",
    "reason",
]


@answers("models check", MEASURE, 4, catalogue)
def check(
    architectures: Annotated[
        list[str] | None, option("--arch NAME", "Architecture; repeatable. Default: all.")
    ] = None,
) -> Result:
    """Train every architecture in three stages and unsplit, and compare loss and gradients."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.config.described import ask

    with LiveProgress("importing the models") as progress:
        failure = "models cannot be checked"
        answer = ask("check", architectures or [], failure, lambda line: progress.show(line, line))
    if answer["problem"]:
        raise UsageError(answer["problem"])
    checks = answer["checks"]
    rows = Rows.of_records(checks)
    statuses = [check["status"] for check in checks]
    verdict = f"{statuses.count('exact')} of {len(checks)} exact"
    code = ExitCode.inexact if "error" in statuses else ExitCode.ok
    blocks: list[Block] = [Table(rows, COLUMNS), Text(verdict)]
    return Result(blocks, rows, {"verdict": verdict}, code, notes=[verdict])
