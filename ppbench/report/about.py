"""What a page says of itself at its top, so that an index need not read ten megabytes of it.

A `<meta name="ppbench-report">` whose content is JSON. Texts are clipped, which keeps it within
the first kilobytes whatever a sweep is called.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from ppbench.config.case import EMULATED
from ppbench.report.cases import Axes, by_case, case_text
from ppbench.report.units import is_missing, tokens_per_s

META = "ppbench-report"
REPORT, TIMELINE, HISTORY, INDEX = "report", "timeline", "history", "index"
_READ_BYTES = 16_384
_CLIPPED = 200  # characters; the longest a text grows to in the page is five times that


@dataclass(frozen=True)
class About:
    """A page's kind and title, and of a report what an index tells. Empty where not known."""

    kind: str
    title: str
    measured: str = ""  # when the last run was, UTC, to the second
    num_runs: int = 0
    num_cases: int = 0
    num_failures: int = 0
    fastest: str = ""
    commit: str = ""

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def about_report(title: str, runs: pd.DataFrame, axes: Axes) -> About:
    return About(
        kind=REPORT,
        title=_clip(title),
        measured=_last_moment(runs),
        num_runs=len(runs),
        num_cases=int(runs["case_id"].nunique()),
        num_failures=int((runs["status"] != "ok").sum()),
        fastest=_clip(_fastest(runs, axes)),
        commit=_clip(_commits(runs)),
    )


def about_timeline(title: str, runs: pd.DataFrame | None = None) -> About:
    """Of measured runs, or of a plan if there are none."""
    if runs is None:
        return About(kind=TIMELINE, title=_clip(title))
    return About(
        kind=TIMELINE,
        title=_clip(title),
        measured=_last_moment(runs),
        num_runs=len(runs),
        num_cases=int(runs["case_id"].nunique()),
        commit=_clip(_commits(runs)),
    )


def about_history(
    title: str, last: pd.DataFrame, *, num_runs: int, num_cases: int, newest: str
) -> About:
    """Of many runs over commits, the `last` of which has been measured last."""
    return About(
        kind=HISTORY,
        title=_clip(title),
        measured=_last_moment(last),
        num_runs=num_runs,
        num_cases=num_cases,
        commit=_clip(newest[:10]),
    )


def read_about(path: Path) -> About | None:
    """What the page says of itself; None for a page of somebody else's, or one not readable."""
    if not path.is_file():
        return None
    parser = _Head()
    try:
        with path.open("rb") as file:
            parser.feed(file.read(_READ_BYTES).decode("utf-8", errors="replace"))
        return _parsed(parser.content)
    # Whatever is wrong with somebody else's page: the parser asserts, deep JSON recurses.
    except (OSError, ValueError, AssertionError, RecursionError):
        return None


class _Head(HTMLParser):
    """Finds the first of our elements."""

    content: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "meta" and found.get("name") == META and self.content is None:
            self.content = found.get("content")


def _parsed(content: str | None) -> About | None:
    """Only what this version would have written: names, and each with its type.

    Raises ValueError for what is no JSON or no text.
    """
    told = json.loads(content or "null")
    json.dumps(told, ensure_ascii=False).encode()  # what could not be written again is refused
    if not isinstance(told, dict):
        return None
    fields = {field.name: field.default for field in dataclasses.fields(About)}
    known = {name: value for name, value in told.items() if name in fields}
    kinds = {name: int if name.startswith("num_") else str for name in known}
    if not {"kind", "title"} <= known.keys():
        return None
    if any(type(value) is not kinds[name] for name, value in known.items()):
        return None
    return About(**known)


def _last_moment(runs: pd.DataFrame) -> str:
    moments = sorted(str(moment) for moment in runs["created_at"].dropna())
    return moments[-1][:19].replace("T", " ") if moments else ""


def _fastest(runs: pd.DataFrame, axes: Axes) -> str:
    """The fastest case and its throughput: a measured, sound one if there is any."""
    cases = by_case(runs, axes).dropna(subset="tokens_per_s")
    cases = cases[~cases["is_not_finite"]]
    if cases.empty:
        return ""
    is_emulated = cases["device"] == EMULATED
    ranked = cases.assign(rank=-2 * is_emulated.astype(int) - cases["is_oversubscribed"])
    best = ranked.sort_values(["rank", "tokens_per_s"], kind="stable").iloc[-1]
    return f"{case_text(best, axes)}: {tokens_per_s(best['tokens_per_s'])}"


def _commits(runs: pd.DataFrame) -> str:
    """Shortened as git does, in the runs' order."""
    commits = [str(commit)[:10] for commit in runs["commit"] if not is_missing(commit)]
    return ", ".join(dict.fromkeys(commits))


def _clip(text: str) -> str:
    return text if len(text) <= _CLIPPED else f"{text[: _CLIPPED - 1]}…"
