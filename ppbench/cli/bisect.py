"""`ppbench bisect`: the first bad commit in words, with the commands that show the change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from ppbench.display.commands import command
from ppbench.display.document import Block, Result, Text
from ppbench.display.fields import COMMIT_COLUMNS
from ppbench.display.metrics import METRICS
from ppbench.display.rows import Rows
from ppbench.display.tables import Table

if TYPE_CHECKING:
    from ppbench.commits.bisect import BisectionResult


@answers("bisect", COMPARE, 5, catalogue)
def bisect(
    good: Annotated[str, argument("GOOD", "A commit before the change.")],
    bad: Annotated[str, argument("BAD", "A commit after the change.")],
    file: SweepFile,
    metric: Annotated[str, option("--metric NAME", "The metric that changed.")] = "tokens_per_s",
    only: Annotated[
        list[str] | None, option("--only KEY=VALUE", "Search only the cases that match.")
    ] = None,
    confidence: Annotated[
        str, option("--confidence P%", "Required confidence of the answer.")
    ] = "95%",
    budget: MostTime = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
    retry_failed: RetryFailed = False,
) -> Result:
    """Find the first bad commit with as few launches as the noise allows."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.bisect import bisect as search

    budget_s = seconds_in(budget)
    with going_on(), LiveProgress() as progress:
        result = search(
            good,
            bad,
            file,
            metric=metric,
            only=only or (),
            confidence=confidence,
            budget_s=budget_s,
            overrides=overrides or (),
            results=results,
            retries_failed=retry_failed,
            progress=progress,
        )

    def between(good: str, bad: str) -> str:
        """This search with other ends."""
        return command(
            *("bisect", good, bad, str(file)),
            metric=metric,
            only=only,
            confidence=confidence,
            budget=budget,
            set=overrides,
            results=results,
        )

    return answer(result, between, results)


def answer(result: BisectionResult, between: Callable[[str, str], str], results: Path) -> Result:
    """The first bad commit; `between` is the command that searches other ends."""
    from ppbench.commits.bench import commit_values

    search, commands = result.search, {}
    if result.first_bad:
        places = (search.earliest - 1, search.latest)
        shas = [result.targets[place].commit.commit for place in places]
        runs = [run for place in places if (run := result.run_id(place)) is not None]
        commands["compare"] = command("compare", *shas, results=results)
        commands["timelines"] = command("timeline", *runs, results=results)
    data = {
        "finding": search.finding.value,
        "first_bad": [commit_values(target.commit) for target in result.first_bad],
        "confidence": search.confidence,
        "metric": result.metric,
        "ratio": search.ends and search.ends.ratio and asdict(search.ends.ratio),
        "difference": search.ends and search.ends.difference and asdict(search.ends.difference),
        "case_id": result.case_id,
        "case": result.conditions,
        "num_launches": result.num_launches,
        "num_made": result.num_made,
        "discounts": [{"run_id": one.run_id, "launch": one.launch} for one in result.discounted],
        "commands": commands,
        "go_on": None if result.first_bad else typed_command(),
    }
    lines = [f"case: {', '.join(result.conditions)}"] if result.conditions else []
    lines += _verdict(result, between)
    for target, launches, runs_here in zip(
        result.targets, result.launches, result.runs, strict=True
    ):
        if not runs_here:
            failure = launches.last_failure(0)  # it may have had launches that were ok
            lines.append(f"skipped: {target.label}: {failure or 'no figure'}")
    side = "below" if METRICS[result.metric].slow_sign < 0 else "above"
    lines += [
        f"discounted: {result.targets[one.place].label}, launch {one.launch}: its {result.metric} "
        f"is far {side} the others'"
        for one in result.discounted
    ]
    lines += [f"{name}: {words}" for name, words in commands.items()]
    discounted = ["num_discounted"] if result.discounted else []
    columns = [*COMMIT_COLUMNS, "num_launches", *discounted, "status", result.metric, "chance"]
    rows = Rows.of(result.frame)
    blocks: list[Block] = [Table(rows, columns, ["commit", "chance"]), Text(lines)]
    return Result(blocks, rows, data, result.exit_code, key="commits")


def _verdict(result: BisectionResult, between: Callable[[str, str], str]) -> list[str]:
    from ppbench.display.changes import change_text
    from ppbench.judge.verdicts import Verdict
    from ppbench.statistics.bisection import Finding

    search, targets = result.search, result.targets
    launches = f"{result.num_launches} launches ({result.num_made} made now)"
    sure = f"{min(100 * search.confidence, 99.9):.1f} %"  # never 100: no measurement is that sure
    change = f"{result.metric} is not known at both ends"
    if search.ends is not None:
        change = f"{result.metric} {change_text(METRICS[result.metric], search.ends)}"
    match search.finding:
        case Finding.found:
            commits = [
                f"{each.commit.commit} {each.commit.author_date} {each.commit.subject}"
                for each in result.first_bad
            ]
            first = [f"first bad commit: {commits[0]}"]
            if (num := len(commits)) > 1:
                first = [f"first bad commit: one of {num}; only the last of them runs", *commits]
            is_better = search.ends is not None and search.ends.verdict is Verdict.faster
            remark = ", for the better: the bad end is the better one here" if is_better else ""
            return [*first, f"change: {change}{remark}", f"confidence {sure}, {launches}"]
        case Finding.no_difference:
            ends = f"{targets[0].label} and {targets[-1].label}"
            return [f"no difference between {ends} beyond noise: {change}, {launches}"]
        case Finding.several:
            middle = targets[search.latest if search.between is None else search.between].commit
            level = f"{middle.commit[:9]} has neither the good nor the bad level"
            return [
                f"several commits changed it: {level}. Search on each side of it:",
                between(targets[0].commit.commit, middle.commit),
                between(middle.commit, targets[-1].commit.commit),
            ]
        case Finding.searching:
            known = f"likeliest: {targets[search.latest].label} ({sure})"
            return [
                f"undecided after {launches}, --budget is spent; {known}",
                f"go on with: {typed_command()}",
            ]
