"""Check which architectures can be split exactly."""

from __future__ import annotations

from dataclasses import asdict
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

    checks = []
    with LiveProgress("importing the models") as progress:
        from engine.model.probe import architectures as known_architectures
        from engine.model.probe import check_architectures

        known = known_architectures()
        names = list(dict.fromkeys(architectures or known))
        if unknown := [name for name in names if name not in known]:
            raise UsageError(
                f'transformers has no causal LM "{unknown[0]}"; it has {", ".join(known)}'
            )
        for check in check_architectures(names):
            checks.append(check)
            text = f"{len(checks)} of {len(names)}: {check.architecture} {check.status}"
            progress.show(text, text)
    rows = Rows.of_records([asdict(check) for check in checks])
    verdict = f"{sum(check.status == 'exact' for check in checks)} of {len(checks)} exact"
    has_failed = any(check.status == "error" for check in checks)
    code = ExitCode.inexact if has_failed else ExitCode.ok
    blocks: list[Block] = [Table(rows, COLUMNS), Text(verdict)]
    return Result(blocks, rows, {"verdict": verdict}, code, notes=[verdict])
