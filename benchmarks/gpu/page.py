"""Makes `benchmarks/gpu.md` of the findings: one table, each figure with its bound and verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu.findings import Finding, Verdict
from benchmarks.outcome import number

HEAD = """\
# On a GPU

This page is made by `make gpu` from `results/gpu.json`; do not edit it. Every figure has a bound:
`held` or `missed`; `not decided` where the figure is not known well enough, or has no bound here;
`not run` where the machine lacks something, or a check ended without a figure.
"""


def page_of(machine: str, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    table = ["| check | figure | value | bound | verdict | |", "|---|---|---:|---|---|---|"]
    return "\n".join([HEAD, f"{machine}: {summary}.", "", *table, *map(_row, findings), ""])


def _row(finding: Finding) -> str:
    cells = [
        finding.check,
        finding.name,
        _value(finding),
        "" if finding.bound is None else str(finding.bound),
        _marked(finding.verdict),
        finding.note,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _value(finding: Finding) -> str:
    if finding.value is None:
        return ""
    error = f" ± {number(finding.error)}" if finding.error else ""
    return f"{number(finding.value)}{error} {finding.unit}".rstrip()


def _marked(verdict: Verdict) -> str:
    return f"**{verdict}**" if verdict is Verdict.MISSED else verdict.value
