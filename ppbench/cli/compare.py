"""`ppbench compare`: two sides case by case, or cases along one setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ppbench.cli.commands import COMPARE
from ppbench.cli.comparison import compared, page_of
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
from ppbench.display.document import Result
from ppbench.errors import UsageError

Names = Annotated[
    list[str] | None,
    argument(
        "[BASE [HEAD]] [SWEEP]",
        "Revisions, runs, sweeps or results folders; HEAD is `worktree` if left out. A "
        "sweep file (.toml) limits it to its cases. With --across: RUNS, which are run ids, sweeps "
        "or sweep files, by default the last sweep.",
    ),
]
Axis = Annotated[
    str | None,
    option(
        "--across AXIS",
        "Compare cases that differ in this setting alone: schedule, ranks, seq_len, ...",
    ),
]
BaseValue = Annotated[
    str | None,
    option(
        "--base VALUE",
        "With --across: the value that others are compared with; default: that with the most "
        "partners, then the smallest number or the sweep's first.",
    ),
]
AllPairs = Annotated[bool, option("--all-pairs", "With --across: compare each value with each.")]


@answers("compare", COMPARE, 1, catalogue)
def compare(
    names: Names = None,
    across: Axis = None,
    base_value: BaseValue = None,
    all_pairs: AllPairs = False,
    metrics: Metrics = None,
    is_run: IsRun = False,
    launches: NumLaunches = None,
    most: MostLaunches = None,
    budget: Budget = None,
    results: Results = RESULTS,
) -> Result:
    """Compare two sides, or the cases that differ in one setting: figures, and what changed."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.comparison import compare as compare_sides
    from ppbench.comparison.sides import WORKTREE

    words = names or []
    launches, most, budget_s = until_of(launches, most, budget, is_run=is_run)
    is_named = across is not None or any(not word.endswith(".toml") for word in words)
    check_store_of(results, words, measures=is_run or not is_named)
    base: str | None
    head = sweep = None
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
        base, head, sweep = split_names(words)
    else:
        base = base_value
    with going_on(), LiveProgress(is_shown=is_run) as progress:
        result = compare_sides(
            base,
            head or WORKTREE,
            across=across,
            runs=words,
            all_pairs=all_pairs,
            sweep=sweep,
            metrics=metrics or (),
            launches=launches,
            max_launches=most,
            budget_s=budget_s,
            results=results,
            progress=progress,
        )

    again = command(
        *("compare", *words),
        across=across,
        base=base_value,
        all_pairs=all_pairs,
        metric=metrics,
        results=results,
    )
    answer = compared(result)
    return dataclasses.replace(answer, own_page=lambda: page_of(result, answer, again))


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
