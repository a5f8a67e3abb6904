"""Claims on the command line: `compare --claim`, `compare --replicate` and `check CLAIM`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ppbench.cli.claims import JSON, recheck_text, side_names, write_claims
from ppbench.cli.options import command, going_on, print_text
from ppbench.cli.progress import LiveProgress
from ppbench.commits.advice import near
from ppbench.commits.claim_check import Measuring, Recheck, check_claim
from ppbench.commits.claim_file import read_claim
from ppbench.commits.claims import Claim, claim_of
from ppbench.commits.comparison import Comparison, compare, sweep_file_of
from ppbench.commits.sides import WORKTREE
from ppbench.display.formats import Format
from ppbench.display.tables import View
from ppbench.errors import ExitCode, UsageError

Names = tuple[str | None, str | None, Path | None]
Asked = tuple[Sequence[str], int, Path]
"""The metrics, the launches of each side, and the results folder."""


def check_claim_file(
    file: Path,
    measuring: tuple[int | None, bool, bool],
    results: Path,
    how: Format,
    view: View,
) -> ExitCode:
    """Check a claim, print what was found, and return the exit code.

    `measuring` holds the launches of each side (None: those stored), whether another session is
    needed, and whether one is begun now. Raises what `check_claim` raises.
    """
    if file.suffix != JSON:
        raise UsageError(f"{file}: is for people; expected the claim in JSON: --claim FILE.json")
    launches, is_replication, is_forced = measuring
    if is_forced and not is_replication:
        raise UsageError("--new-session: says when to replicate; give it with --replicate")
    recheck = _checked(read_claim(file), launches, results, is_replication, is_forced)
    print_text(recheck_text(recheck, how, view), how)
    return recheck.exit_code


def _checked(
    claim: Claim, launches: int | None, results: Path, is_replication: bool, is_forced: bool
) -> Recheck:
    with going_on(), LiveProgress(is_shown=launches is not None) as progress:
        how = Measuring(launches, is_replication, is_forced, results, progress)
        return check_claim(claim, how)


def replicate_sides(
    names: Names, asked: Asked, files: Sequence[Path], how: Format, view: View, *, is_forced: bool
) -> ExitCode:
    """Measure the stored comparison again in another session; write the claim of both."""
    metrics, launches, results = asked
    stored = _compared(names, metrics, results)
    claim = _claim(stored, names, asked)
    recheck = _checked(claim, launches, results, is_replication=True, is_forced=is_forced)
    print_text(recheck_text(recheck, how, view), how)
    if files:
        begins = [] if recheck.begun is None else [recheck.begun]
        both = _compared(names, metrics, results)
        _write(_claim(both, names, asked, begins), files, how)
    return recheck.exit_code


def _compared(names: Names, metrics: Sequence[str], results: Path) -> Comparison:
    base, head, sweep = names
    return compare(base, head or WORKTREE, sweep=sweep, metrics=metrics, results=results)


def write_claim_of(
    comparison: object, names: Names, asked: Asked, files: Sequence[Path], how: Format
) -> None:
    """Write the claim of a comparison of two sides."""
    assert isinstance(comparison, Comparison)  # along an axis there is none
    _write(_claim(comparison, names, asked), files, how)


def _write(claim: Claim, files: Sequence[Path], how: Format) -> None:
    write_claims(claim, files)
    for file in files:
        print(f"claim: {file}", file=sys.stdout if how is Format.table else sys.stderr)


def _claim(
    comparison: Comparison, names: Names, asked: Asked, begins: Sequence[datetime] = ()
) -> Claim:
    named = None if names[2] is None else str(names[2])
    file = sweep_file_of(comparison.base, comparison.head, named)
    claim = claim_of(comparison, "", None if file is None else near(file), begins)
    return replace(claim, command=_repeat_command(claim, asked))


def _repeat_command(claim: Claim, asked: Asked) -> str:
    """The comparison of the same commits; it measures them anew where they are commits."""
    metrics, _, results = asked
    sides = (claim.base, claim.head)
    is_measured = claim.sweep_file is not None and all(side.revision for side in sides)
    numbers = (num for e in claim.effects for num in (e.change.num_base, e.change.num_head))
    return command(
        *("compare", *side_names(sides), *([near(claim.sweep_file)] if is_measured else [])),
        metric=list(metrics),
        run=is_measured,
        launches=max(numbers, default=None) if is_measured else None,
        results=results,
    )
