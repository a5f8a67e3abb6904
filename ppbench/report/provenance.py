"""Where the figures of a report come from: when, on what machine, at which commit."""

from __future__ import annotations

import contextlib
import json

import pandas as pd

from ppbench.report.units import MISSING, counted, is_missing, size
from ppbench.runtimes import ENGINE

NOT_RECORDED = "no: nothing is recorded"
"""Of runs of older versions, and of training that ppbench did not start."""


def origin(runs: pd.DataFrame) -> str:
    """How many runs of how many cases, on what, measured when."""
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
    """The value that all runs share, or nothing."""
    values = runs[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def environments(runs: pd.DataFrame) -> list[list[tuple[str, str]]]:
    """The facts of every distinct environment and commit among the runs, in the runs' order."""
    distinct = runs.drop_duplicates(["fingerprint", "environment", "commit", "branch", "is_dirty"])
    return [_environment_facts(run) for _, run in distinct.iterrows()]


def verifications(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """How many runs were verified in which way; "no" and why, where they were not."""
    texts = runs["verified"].fillna(NOT_RECORDED)
    return [
        (counted(len(some), "run"), f"{how}{_worst(some['verified_difference'])}")
        for how, some in runs.groupby(texts, sort=False)
    ]


def _worst(differences: pd.Series) -> str:
    known = differences.dropna()
    return "" if known.empty else f"; largest difference {known.max():.1e}"


def _environment_facts(run: pd.Series) -> list[tuple[str, str]]:
    text = run["environment"]
    details: dict[str, object] = {}
    with contextlib.suppress(ValueError):  # of a file that something else has touched
        details = {} if is_missing(text) else json.loads(str(text))
    facts = [_environment_fact(name, value) for name, value in details.items()]
    return [
        ("commit", commit_text(run)),
        ("fingerprint", plain_text(run["fingerprint"])),
        ("ppbench", plain_text(run["ppbench_version"])),
        *((name, text) for name, text in facts if text != MISSING),
    ]


def _environment_fact(name: str, value: object) -> tuple[str, str]:
    words = name.removesuffix("_bytes").replace("_", " ")
    return words, size(value) if name.endswith("_bytes") else plain_text(value)


def commit_text(run: pd.Series) -> str:
    if is_missing(run["commit"]):
        return "not in a repository"
    dirty = ", with uncommitted changes" if run["is_dirty"] is True or run["is_dirty"] == 1 else ""
    branch = "" if is_missing(run["branch"]) else f" on {run['branch']}"
    return f"{run['commit']}{branch}{dirty}"


def plain_text(value: object) -> str:
    """A fact from the environment as text; nothing for what the machine does not have."""
    if is_missing(value) or value == []:
        return MISSING
    if isinstance(value, list):
        return ", ".join(plain_text(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
