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
    raw, rows, sentences = [], [], []
    for each in recheck.judged:
        metric, again, texts = each.metric, {}, ("–", "–")
        now, was = "not measured again", _in_words(metric, each.change)
        if each.again is not None:
            change, again = each.again.change, each.again.values()
            texts = change_text(metric, change), f"{change.num_base}, {change.num_head}"
            now = _in_words(metric, change)
        raw.append(
            {
                "case_id": each.case_id,
                "case": each.case,
                "metric": metric.name,
                "stated_verdict": str(each.change.verdict),
                **{f"again_{name}": again.get(name) for name in names},
                "outcome": str(each.outcome),
            }
        )
        figure, stated = field_of(metric.name), change_text(metric, each.change)
        row = (each.case, figure.heading, stated, *texts, str(each.outcome))
        rows.append(dict(zip(_HEADED, row, strict=True)))
        if each.outcome is recheck.outcome:
            sentences.append(f"{figure.label} of {each.case}: {now}; stated: {was}")
    frame, notes = pd.DataFrame(raw), recheck.comparison.notes
    if how is Format.csv:
        return render(frame, how, [], view)
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
    more = f"; and {num} more" if (num := len(sentences) - _MOST_NAMED) > 0 else ""
    said = "; ".join(sentences[:_MOST_NAMED]) or "the comparison states no change that could hold"
    first = f"{recheck.outcome}: {said}{more}"
    parts = [
        f"**{escaped(first)}**" if is_page else first,
        table,
        "\n".join(f"- {escaped(note)}" if is_page else f"note: {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _in_words(metric: Metric, change: Change) -> str:
    return f"{verdict_text(metric, change.verdict)}, {change_text(metric, change)}"
