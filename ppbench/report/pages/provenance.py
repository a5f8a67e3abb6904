"""The origin of a report's figures: when, on what machine, at which commit they were measured.

A page carries a summary in a `<meta name="ppbench-report">` with JSON, so that an index need not
read ten megabytes. Texts are clipped, which keeps it within the first kilobytes of the page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from ppbench.display.document import Facts
from ppbench.display.units import MISSING, counted, is_missing, size
from ppbench.errors import shortened
from ppbench.results import NOT_VERIFIED
from ppbench.runtimes import ENGINE

META = "ppbench-report"
REPORT, TIMELINE, HISTORY, INDEX = "report", "timeline", "history", "index"
COMPARISON, PLAN, ANSWER = "comparison", "plan", "answer"
_READ_BYTES = 16_384
CLIPPED = 200  # characters; the longest a text grows to in the page is five times that


def origin(runs: pd.DataFrame) -> str:
    """Return a line on the runs: how many of how many cases, on what device, measured when."""
    days = sorted({str(moment)[:10] for moment in runs["created_at"].dropna()})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    num_failed = int((runs["status"] != "ok").sum())
    parts = [
        f"{counted(len(runs), 'run')} of {counted(runs['case_id'].nunique(), 'case')}",
        f"{num_failed} failed" if num_failed else "",
        common(runs, "model_preset"),
        common(runs, "device"),
        "" if (runtime := common(runs, "runtime")) in ("", ENGINE) else f"runtime {runtime}",
        when,
    ]
    return " · ".join(part for part in parts if part)


def common(runs: pd.DataFrame, column: str) -> str:
    """Return the value that all runs share, or an empty text."""
    values = runs[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def environments(runs: pd.DataFrame) -> list[Facts]:
    """Return the facts of each distinct environment and commit, in the order of the runs."""
    found = []
    distinct = runs.drop_duplicates(["fingerprint", "environment", "commit", "branch", "is_dirty"])
    for _, run in distinct.iterrows():
        text = run["environment"]
        details: dict[str, object] = {}
        with contextlib.suppress(ValueError):  # the file may have been edited
            details = {} if is_missing(text) else json.loads(str(text))
        facts = {
            name.removesuffix("_bytes").replace("_", " "): (
                size(value) if name.endswith("_bytes") else plain_text(value)
            )
            for name, value in details.items()
        }
        first = {
            "commit": commit_text(run),
            "fingerprint": plain_text(run["fingerprint"]),
            "ppbench": plain_text(run["ppbench_version"]),
        }
        known = {name: text for name, text in facts.items() if text != MISSING}
        found.append(Facts({**first, **known}))
    return found


def verifications(runs: pd.DataFrame) -> list[str]:
    """Return how many runs were verified in which way, or why they were not."""
    texts = runs["verified"].fillna(NOT_VERIFIED)
    counts = []
    for how, some in runs.groupby(texts, sort=False):
        known = some["verified_difference"].dropna()
        worst = "" if known.empty else f"; largest difference {known.max():.1e}"
        counts.append(f"{counted(len(some), 'run')}: {how}{worst}")
    return counts


def commit_text(run: pd.Series) -> str:
    if is_missing(run["commit"]):
        return "not in a repository"
    dirty = ", with uncommitted changes" if run["is_dirty"] is True or run["is_dirty"] == 1 else ""
    branch = "" if is_missing(run["branch"]) else f" on {run['branch']}"
    return f"{run['commit']}{branch}{dirty}"


def plain_text(value: object) -> str:
    """Format a fact of the environment; a dash for what the machine does not have."""
    if is_missing(value) or value == []:
        return MISSING
    if isinstance(value, list):
        return ", ".join(plain_text(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class About:
    """A page's kind and title, and the figures of a report in an index; empty if unknown."""

    kind: str
    title: str
    measured: str = ""  # time of the last run, UTC, to the second
    num_runs: int = 0
    num_cases: int = 0
    num_failures: int = 0
    answer: str = ""  # which case is best, and how sure that is
    commit: str = ""

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def about_report(title: str, runs: pd.DataFrame, answer: str) -> About:
    num_failures = int((runs["status"] != "ok").sum())
    about = about_runs(REPORT, title, runs)
    return dataclasses.replace(about, num_failures=num_failures, answer=shortened(answer, CLIPPED))


def about_runs(kind: str, title: str, runs: pd.DataFrame) -> About:
    """Describe a page of these runs, whose kind is one of this module's."""
    moments = sorted(str(moment) for moment in runs["created_at"].dropna())
    commits = [str(commit)[:10] for commit in runs["commit"] if not is_missing(commit)]
    return About(
        kind=kind,
        title=shortened(title, CLIPPED),
        measured=moments[-1][:19].replace("T", " ") if moments else "",
        num_runs=len(runs),
        num_cases=int(runs["case_id"].nunique()),
        commit=shortened(", ".join(dict.fromkeys(commits)), CLIPPED),
    )


def read_about(path: Path) -> About | None:
    """Read a page's summary; None if it is not a page of ppbench, or not readable."""
    if not path.is_file():
        return None
    parser = _Head()
    try:
        with path.open("rb") as file:
            parser.feed(file.read(_READ_BYTES).decode("utf-8", errors="replace"))
        return About(**json.loads(parser.content)) if parser.content else None
    except (OSError, ValueError, AssertionError):  # the parser asserts on some foreign pages
        return None


class _Head(HTMLParser):
    """Finds the first `<meta name="ppbench-report">`."""

    content: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "meta" and attributes.get("name") == META and self.content is None:
            self.content = attributes.get("content")
