"""Comparisons and rulings as programs read them: every number, raw, under its own name.

Verdicts are the five words of `analysis.compare`, whatever people read in tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ppbench.analysis.breakdown import Moved
from ppbench.analysis.ratios import Ratio
from ppbench.listing import as_records
from ppbench.tracking.comparison import Breakdown, Comparison, Line
from ppbench.tracking.gate import WORDS, Ruling
from ppbench.tracking.sides import Side


def comparison_values(comparison: Comparison, found: Sequence[Breakdown]) -> dict[str, object]:
    return {
        "base": _side_values(comparison.base),
        "head": _side_values(comparison.head),
        "changes": as_records(comparison_rows(comparison.lines)),
        "moved": [_class_values(one, moved) for one in found for moved in one.moved],
        "notes": list(comparison.notes),
    }


def ruling_values(ruling: Ruling, found: Sequence[Breakdown], command: str) -> dict[str, object]:
    return {
        "verdict": WORDS[ruling.exit_code],
        "exit_code": ruling.exit_code,
        **comparison_values(ruling.comparison, found),
        "changes": as_records(ruling_rows(ruling)),
        "failed": list(ruling.failed),
        "missing": list(ruling.missing),
        "command": command,
    }


def _side_values(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "title": side.title,
        "commit": side.commit,
        "num_runs": len(side.runs),
        "num_failed": len(side.failed),
    }


def comparison_rows(lines: Sequence[Line]) -> pd.DataFrame:
    return pd.DataFrame([_raw_row(line) for line in lines])


def _raw_row(line: Line) -> dict[str, object]:
    change, series = line.change, line.series
    return {
        "case_id": series.case_id,
        "case": series.text,
        "fingerprint": series.fingerprint,
        "metric": line.metric.name,
        "base": change.base,
        "head": change.head,
        **_ends("ratio", change.ratio),
        **_ends("difference", change.difference),
        "p": change.p,
        "verdict": str(change.verdict),
        "num_base": change.num_base,
        "num_head": change.num_head,
        "floor": change.floor,
        "noise": None if line.noise is None else line.noise.deviation,
    }


def _ends(name: str, ratio: Ratio | None) -> dict[str, object]:
    values = (None,) * 3 if ratio is None else (ratio.estimate, ratio.low, ratio.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def ruling_rows(ruling: Ruling) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                **_raw_row(one.line),
                "threshold": one.threshold,
                "worse": one.worse,
                "is_gated": one.is_gated,
                "is_regression": one.is_regression,
                "accepted_by": None if one.accepted is None else one.accepted.commit,
            }
            for one in ruling.judged
        ]
    )


def _class_values(found: Breakdown, moved: Moved) -> dict[str, object]:
    one, change = moved.of, moved.change
    return {
        "case_id": found.series.case_id,
        "fingerprint": found.series.fingerprint,
        "kind": str(one.kind),
        "op": one.op or None,
        "place": one.place,
        "target": None if one.target < 0 else one.target,
        "base_ns": change.base,
        "head_ns": change.head,
        **_ends("ratio", change.ratio),
        "p": change.p,
        "verdict": str(change.verdict),
        "contribution_ns": moved.contribution_ns,
        "is_tested": moved.is_tested,
        "has_moved": moved.has_moved,
    }
