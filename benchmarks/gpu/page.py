"""Makes `benchmarks/gpu.md` of the findings: one table, each figure with its bound and verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu.findings import Finding, Verdict

HEAD = """\
# On a GPU

This page is made by `make gpu` from `gpu.json`; do not edit it. Every figure has a bound:
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
        finding.amount,
        "" if finding.bound is None else str(finding.bound),
        _marked(finding.verdict),
        finding.note,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _marked(verdict: Verdict) -> str:
    return f"**{verdict}**" if verdict is Verdict.MISSED else verdict.value
