"""The text of a saved comparison that was checked again: `ppbench check COMPARISON.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from ppbench.cli.options import going_on, print_text
from ppbench.cli.progress import LiveProgress
from ppbench.commits.saved import Recheck, check_saved
from ppbench.display.changes import change_text, verdict_text
from ppbench.display.fields import Field, field_of, words
from ppbench.display.formats import Format
from ppbench.display.tables import View, as_records, escaped, render
from ppbench.errors import ExitCode
from ppbench.judge.evidence import Metric
from ppbench.judge.verdicts import Change

_MOST_NAMED = 3
_HEADED: dict[str, Field] = {
    "case": field_of("case"),
    "figure": field_of("figure"),
    "stated": words("stated"),
    "again": words("again"),
    "launches": field_of("launches"),
    "outcome": words("outcome"),
}


def check_saved_file(
    file: Path, launches: int | None, results: Path, how: Format, view: View
) -> ExitCode:
    """Check a saved comparison, print what new launches say of it, and return the exit code."""
    with going_on(), LiveProgress(is_shown=launches is not None) as progress:
        recheck = check_saved(file, launches=launches, results=results, progress=progress)
    print_text(recheck_text(recheck, how, view), how)
    return recheck.exit_code


def recheck_text(recheck: Recheck, how: Format, view: View) -> str:
    """What new launches say of each stated change, and the notes on them."""
    names = ("ratio", "difference", "verdict", "num_base", "num_head")
    raw, rows = [], []
    for judged in recheck.judged:
        stated, metric = judged.stated, judged.stated.metric
        values = {} if judged.again is None else judged.again.values()
        raw.append(
            {
                "case_id": stated.case_id,
                "case": stated.case,
                "metric": metric.name,
                "stated_verdict": str(stated.change.verdict),
                **{f"again_{name}": values.get(name) for name in names},
                "outcome": str(judged.outcome),
            }
        )
        change = None if judged.again is None else judged.again.change
        rows.append(
            {
                "case": stated.case,
                "figure": field_of(metric.name).heading,
                "stated": change_text(metric, stated.change),
                "again": "–" if change is None else change_text(metric, change),
                "launches": "–" if change is None else f"{change.num_base}, {change.num_head}",
                "outcome": str(judged.outcome),
            }
        )
    frame = pd.DataFrame(raw)
    if how is Format.csv:
        return render(frame, how, [], view)
    notes = recheck.comparison.notes
    if how is Format.json:
        values = {
            "outcome": str(recheck.outcome),
            "exit_code": recheck.exit_code,
            "changes": as_records(frame),
            "notes": list(notes),
        }
        return json.dumps(values, indent=2, allow_nan=False)
    is_page = how is Format.markdown
    table = render(pd.DataFrame(rows), how, _HEADED, view, ["figure", "outcome"]) if rows else ""
    first = f"{recheck.outcome}: the comparison states no change that could hold"
    if deciding := [judged for judged in recheck.judged if judged.outcome is recheck.outcome]:
        sentences = []
        for judged in deciding[:_MOST_NAMED]:
            metric, again = judged.stated.metric, "not measured again"
            if judged.again is not None:
                again = _in_words(metric, judged.again.change)
            sentences.append(
                f"{field_of(metric.name).label} of {judged.stated.case}: {again}; "
                f"stated: {_in_words(metric, judged.stated.change)}"
            )
        more = f"; and {num} more" if (num := len(deciding) - _MOST_NAMED) > 0 else ""
        first = f"{recheck.outcome}: {'; '.join(sentences)}{more}"
    parts = [
        f"**{escaped(first)}**" if is_page else first,
        table,
        "\n".join(f"- {escaped(note)}" if is_page else f"note: {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _in_words(metric: Metric, change: Change) -> str:
    return f"{verdict_text(metric, change.verdict)}, {change_text(metric, change)}"
