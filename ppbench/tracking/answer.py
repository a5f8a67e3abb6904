"""What a bisection has found, in words and as data."""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from ppbench.analysis.bisection import Finding, Search
from ppbench.analysis.compare import METRICS
from ppbench.errors import first_line
from ppbench.format import Format
from ppbench.listing import as_records, render
from ppbench.tracking.launches import Launches
from ppbench.tracking.measuring import Target
from ppbench.tracking.outcome import COMMIT_COLUMNS, COMMIT_FIELDS, Outcome, row_of

EXIT_UNSURE = 3


@dataclass(frozen=True)
class Found:
    """A bisection when it ended; commits from the good one to the bad one."""

    metric: str
    case_id: str
    case_words: tuple[str, ...]  # what tells it from the sweep's others
    targets: tuple[Target, ...]
    launches: tuple[Launches, ...]  # of that case alone
    runs: tuple[bool, ...]
    search: Search
    num_made: int  # launches that this search made itself, in however many cases
    command: str  # that goes on with it
    folder_words: tuple[str, ...]  # for further commands: where the store is

    @property
    def num_launches(self) -> int:
        """Of the case, that the answer stands on."""
        return sum(found.num_ok(0) for found in self.launches)

    @property
    def candidates(self) -> list[Target]:
        """The first bad commit; several where all but the last do not run."""
        return list(self.targets[self.search.earliest : self.search.latest + 1])

    def run_id(self, place: int) -> str | None:
        """The newest run of a commit that is ok."""
        runs = [row.run_id for row in self.launches[place].of_case(0) if row.status == "ok"]
        return runs[-1] if runs else None


def told(found: Found, how: Format) -> Outcome:
    """As text in a format; exit code 0 if the commit is known."""
    exit_code = 0 if found.search.finding is Finding.found else EXIT_UNSURE
    if how is Format.json:
        return Outcome(json.dumps(_data(found), indent=2, allow_nan=False), exit_code)
    table = _table(found, how)
    if how is Format.csv:
        return Outcome(table, exit_code)
    lines = [*_case(found), *_verdict(found), *_skipped(found), *_next_commands(found)]
    return Outcome("\n".join([table, "", *lines]), exit_code)


def _rows(found: Found) -> pd.DataFrame:
    """Of each commit that was measured, or tried."""
    rows = []
    for place, (target, launches) in enumerate(zip(found.targets, found.launches, strict=True)):
        figures = launches.figures(0, found.metric)
        failure = launches.failure(0)
        if launches.rows:
            rows.append(
                {
                    **row_of(target.commit),
                    "num_launches": len(figures),
                    "status": failure.status if failure else "ok",
                    found.metric: statistics.median(figures) if figures else None,
                    "chance": found.search.chances[place],
                }
            )
    return pd.DataFrame(rows)


def _table(found: Found, how: Format) -> str:
    columns = [*COMMIT_COLUMNS, "num_launches", "status", found.metric, "chance"]
    return render(_rows(found), how, columns, COMMIT_FIELDS)


def _case(found: Found) -> list[str]:
    return [f"case: {', '.join(found.case_words)}"] if found.case_words else []


def _verdict(found: Found) -> list[str]:
    launches = f"{found.num_launches} launches ({found.num_made} made now)"
    match found.search.finding:
        case Finding.found:
            return [*_first_bad(found), f"sure to {_percent(found.search.confidence)}, {launches}"]
        case Finding.no_difference:
            ends = f"{found.targets[0].label} and {found.targets[-1].label}"
            return [f"no difference between {ends} beyond noise: {_change(found)}, {launches}"]
        case Finding.several:
            return _several(found)
        case Finding.searching:
            likeliest = found.targets[found.search.latest].label
            chance = _percent(found.search.confidence)
            return [
                f"not sure yet after {launches}; likeliest: {likeliest} ({chance})",
                f"go on with: {found.command}",
            ]


def _first_bad(found: Found) -> list[str]:
    commits = [_in_full(target) for target in found.candidates]
    head = [f"first bad commit: {commits[0]}"]
    if len(commits) > 1:
        head = [f"first bad commit: one of {len(commits)}; all but the last do not run", *commits]
    return [*head, f"change: {_change(found)}{_direction(found)}"]


def _in_full(target: Target) -> str:
    commit = target.commit
    return f"{commit.commit} {commit.author_date} {commit.subject}"


def _several(found: Found) -> list[str]:
    """The ranges to search one by one."""
    between = found.search.between
    middle = found.targets[between if between is not None else found.search.latest].commit.commit
    ends = [found.targets[0].commit.commit, middle, found.targets[-1].commit.commit]
    words = shlex.split(found.command)
    asked = [
        shlex.join([*words[:2], good, bad, *words[4:]]) for good, bad in itertools.pairwise(ends)
    ]
    level = f"{middle[:9]} is neither as good as the one end nor as bad as the other"
    return [f"several commits changed it: {level}. Search on each side of it:", *asked]


def _change(found: Found) -> str:
    """By how much the bad end differs from the good one."""
    ratio, difference = found.search.ratio, found.search.difference
    if ratio is not None:
        ends = [f"{100 * (end - 1):+.1f} %" for end in (ratio.estimate, ratio.low, ratio.high)]
    elif difference is not None:
        points = (difference.estimate, difference.low, difference.high)
        ends = [f"{100 * end:+.1f} points" for end in points]
    else:
        return f"{found.metric} is not known at both ends"
    return f"{found.metric} {ends[0]} ({ends[1]} to {ends[2]})"


def _direction(found: Found) -> str:
    """A word of caution where the bad one is the better one."""
    ratio, difference = found.search.ratio, found.search.difference
    is_higher = (ratio is not None and ratio.estimate > 1) or (
        difference is not None and difference.estimate > 0
    )
    if is_higher == METRICS[found.metric].higher_is_better:
        return ", for the better: the bad end is the better one here"
    return ""


def _skipped(found: Found) -> list[str]:
    return [
        f"skipped: {target.label}: {_why(launches)}"
        for target, launches, runs in zip(found.targets, found.launches, found.runs, strict=True)
        if not runs
    ]


def _why(launches: Launches) -> str:
    failure = launches.last_failure(0)  # what does not run any more may be ok in earlier launches
    return "no figure" if failure is None else f"{failure.status}: {first_line(failure.error)}"


def _commands(found: Found) -> dict[str, str]:
    """What shows the change."""
    if found.search.finding is not Finding.found:
        return {}
    places = (found.search.earliest - 1, found.search.latest)
    shas = [found.targets[place].commit.commit for place in places]
    runs = [run for place in places if (run := found.run_id(place)) is not None]
    commands = {"compare": ["compare", *shas], "timelines": ["timeline", *runs]}
    return {
        name: shlex.join(["ppbench", *words, *found.folder_words])
        for name, words in commands.items()
    }


def _next_commands(found: Found) -> list[str]:
    return [f"{name}: {command}" for name, command in _commands(found).items()]


def _percent(chance: float) -> str:
    """Never 100: nothing measured is that sure."""
    return f"{min(100 * chance, 99.9):.1f} %"


def _data(found: Found) -> dict[str, object]:
    search = found.search
    is_found = search.finding is Finding.found
    return {
        "finding": search.finding.value,
        "first_bad": _plain(found.candidates) if is_found else [],
        "confidence": search.confidence,
        "metric": found.metric,
        "ratio": None if search.ratio is None else asdict(search.ratio),
        "difference": None if search.difference is None else asdict(search.difference),
        "case_id": found.case_id,
        "case": list(found.case_words),
        "num_launches": found.num_launches,
        "num_made": found.num_made,
        "skipped": _plain(
            [target for target, runs in zip(found.targets, found.runs, strict=True) if not runs]
        ),
        "commits": as_records(_rows(found)),
        "commands": _commands(found),
        "go_on": None if is_found else found.command,
    }


def _plain(targets: Sequence[Target]) -> list[dict[str, object]]:
    return [row_of(target.commit) for target in targets]
