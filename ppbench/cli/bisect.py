"""`ppbench bisect`: the first bad commit in words, with the commands that show the change."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    RESULTS,
    Columns,
    HowToPrint,
    MostTime,
    Overrides,
    Results,
    RetryFailed,
    Sort,
    SweepFile,
    going_on,
    print_text,
    seconds_in,
    typed_command,
)
from ppbench.display.commands import command
from ppbench.display.fields import COMMIT_COLUMNS
from ppbench.display.formats import Format
from ppbench.display.metrics import METRICS
from ppbench.display.tables import View, as_records, render

if TYPE_CHECKING:
    from ppbench.commits.bench import Target
    from ppbench.commits.bisect import BisectionResult


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A commit before the change.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A commit after the change.")],
    file: SweepFile,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="The metric that changed.")
    ] = "tokens_per_s",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KEY=VALUE", help="Search only the cases that match."),
    ] = None,
    confidence: Annotated[
        str, typer.Option("--confidence", metavar="P%", help="Required confidence of the answer.")
    ] = "95%",
    max_launches: Annotated[
        int | None,
        typer.Option("--max-launches", metavar="N", min=1, help="Most launches to make."),
    ] = None,
    budget: MostTime = None,
    overrides: Overrides = None,
    results: Results = RESULTS,
    retry_failed: RetryFailed = False,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Find the first bad commit with as few launches as the noise allows."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.commits.bisect import bisect as search

    view, budget_s = View.of(columns, sort), seconds_in(budget)
    with going_on(), LiveProgress() as progress:
        result = search(
            good,
            bad,
            file,
            metric=metric,
            only=only or (),
            confidence=confidence,
            max_launches=max_launches,
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
            max_launches=max_launches,
            budget=budget,
            set=overrides,
            results=results,
        )

    print_text(bisection_text(result, how, between, results, view), how)
    raise typer.Exit(result.exit_code)


def bisection_text(
    result: BisectionResult,
    how: Format,
    between: Callable[[str, str], str],
    results: Path,
    view: View,
) -> str:
    """The output of `ppbench bisect`; `between` is the command that searches other ends."""
    if how is Format.json:
        return json.dumps(_values(result, results), indent=2, allow_nan=False)
    discounted = ["num_discounted"] if result.discounted else []
    columns = [*COMMIT_COLUMNS, "num_launches", *discounted, "status", result.metric, "chance"]
    table = render(result.frame, how, columns, view, ["commit", "chance"])
    if how is Format.csv:
        return table
    lines = [f"case: {', '.join(result.conditions)}"] if result.conditions else []
    lines += _verdict(result, between)
    for target, launches, runs in zip(result.targets, result.launches, result.runs, strict=True):
        if not runs:
            failure = launches.last_failure(0)  # it may have had launches that were ok
            lines.append(f"skipped: {target.label}: {failure or 'no figure'}")
    for commit, number, _ in result.discounted:
        where = f"{result.targets[commit].label}, launch {number}"
        side = "below" if METRICS[result.metric].slow_sign < 0 else "above"
        lines.append(f"discounted: {where}: its {result.metric} is far {side} the others'")
    lines += [f"{name}: {words}" for name, words in _commands(result, results).items()]
    return "\n".join([table, "", *lines])


def _verdict(result: BisectionResult, between: Callable[[str, str], str]) -> list[str]:
    from ppbench.statistics.bisection import Finding

    search, targets = result.search, result.targets
    launches = f"{result.num_launches} launches ({result.num_made} made now)"
    change = f"{result.metric} is not known at both ends"
    if search.ends is not None and (interval := search.ends.ratio or search.ends.difference):
        shift, unit = (1, "%") if search.ends.ratio is not None else (0, "points")
        bounds = (interval.estimate, interval.low, interval.high)
        values = [f"{100 * (one - shift):+.1f} {unit}" for one in bounds]
        change = f"{result.metric} {values[0]} ({values[1]} to {values[2]})"
    match search.finding:
        case Finding.found:
            commits = [
                f"{each.commit.commit} {each.commit.author_date} {each.commit.subject}"
                for each in result.candidates
            ]
            first = [f"first bad commit: {commits[0]}"]
            if (num := len(commits)) > 1:
                first = [f"first bad commit: one of {num}; only the last of them runs", *commits]
            is_higher = search.ends and search.ends.exact and search.ends.exact.estimate > 0
            is_better = is_higher == METRICS[result.metric].higher_is_better
            remark = ", for the better: the bad end is the better one here" if is_better else ""
            return [
                *first,
                f"change: {change}{remark}",
                f"confidence {_percent(search.confidence)}, {launches}",
            ]
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
            why = "--budget is spent" if result.is_spent else "--max-launches reached"
            known = f"likeliest: {targets[search.latest].label} ({_percent(search.confidence)})"
            return [
                f"undecided after {launches}, {why}; {known}",
                f"go on with: {typed_command()}",
            ]


def _commands(result: BisectionResult, results: Path) -> dict[str, str]:
    """The commands that show the change, by name."""
    from ppbench.statistics.bisection import Finding

    if result.search.finding is not Finding.found:
        return {}
    places = (result.search.earliest - 1, result.search.latest)
    shas = [result.targets[place].commit.commit for place in places]
    runs = [run for place in places if (run := result.run_id(place)) is not None]
    return {
        "compare": command("compare", *shas, results=results),
        "timelines": command("timeline", *runs, results=results),
    }


def _percent(chance: float) -> str:
    """A chance in percent, but never 100: no measurement is that sure."""
    return f"{min(100 * chance, 99.9):.1f} %"


def _values(result: BisectionResult, results: Path) -> dict[str, object]:
    from ppbench.statistics.bisection import Finding

    search = result.search
    is_found = search.finding is Finding.found
    commits = zip(result.targets, result.runs, strict=True)
    return {
        "finding": search.finding.value,
        "first_bad": _commit_values(result.candidates) if is_found else [],
        "confidence": search.confidence,
        "metric": result.metric,
        **{
            name: asdict(interval) if (interval := getattr(search.ends, name, None)) else None
            for name in ("ratio", "difference")
        },
        "case_id": result.case_id,
        "case": list(result.conditions),
        "num_launches": result.num_launches,
        "num_made": result.num_made,
        "stop": str(result.stop),
        "discounts": [
            {"run_id": run_id, "launch": launch, "reason": "apart"}
            for _, launch, run_id in result.discounted
        ],
        "skipped": _commit_values([target for target, runs in commits if not runs]),
        "commits": as_records(result.frame),
        "commands": _commands(result, results),
        "go_on": None if is_found else typed_command(),
    }


def _commit_values(targets: Sequence[Target]) -> list[dict[str, object]]:
    from ppbench.commits.bench import commit_values

    return [commit_values(target.commit) for target in targets]
