"""The text of a saved comparison that was checked again: `ppbench check COMPARISON.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from ppbench.cli.options import going_on, print_text
from ppbench.cli.progress import LiveProgress
from ppbench.commits.saved import Judged, Recheck, check_saved
from ppbench.display.changes import change_text, verdict_text
from ppbench.display.fields import Field, field_of, words
from ppbench.display.formats import Format
from ppbench.display.tables import View, as_records, escaped, render
from ppbench.errors import ExitCode
from ppbench.statistics.verdicts import Change, Metric

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
    frame = pd.DataFrame([_raw_row(each) for each in recheck.judged])
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
    rows = [_row(each) for each in recheck.judged]
    table = render(pd.DataFrame(rows), how, _HEADED, view, ["figure", "outcome"]) if rows else ""
    first = _headline(recheck)
    parts = [
        f"**{escaped(first)}**" if is_page else first,
        table,
        "\n".join(f"- {escaped(note)}" if is_page else f"note: {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _headline(recheck: Recheck) -> str:
    """The outcome in one sentence, with the changes that decide it."""
    if not recheck.judged:
        return f"{recheck.outcome}: the comparison states no change that could hold"
    deciding = [each for each in recheck.judged if each.outcome is recheck.outcome]
    sentences = [
        f"{field_of(each.stated.metric.name).label} of {each.stated.case}: {_again(each)}; "
        f"stated: {_in_words(each.stated.metric, each.stated.change)}"
        for each in deciding[:_MOST_NAMED]
    ]
    more = f"; and {len(deciding) - _MOST_NAMED} more" if len(deciding) > _MOST_NAMED else ""
    return f"{recheck.outcome}: {'; '.join(sentences)}{more}"


def _again(judged: Judged) -> str:
    if judged.again is None:
        return "not measured again"
    return _in_words(judged.stated.metric, judged.again.change)


def _in_words(metric: Metric, change: Change) -> str:
    return f"{verdict_text(metric, change.verdict)}, {change_text(metric, change)}"


def _row(judged: Judged) -> dict[str, str]:
    metric = judged.stated.metric
    change = None if judged.again is None else judged.again.change
    return {
        "case": judged.stated.case,
        "figure": field_of(metric.name).heading,
        "stated": change_text(metric, judged.stated.change),
        "again": "–" if change is None else change_text(metric, change),
        "launches": "–" if change is None else f"{change.num_base}, {change.num_head}",
        "outcome": str(judged.outcome),
    }


def _raw_row(judged: Judged) -> dict[str, object]:
    stated, again = judged.stated, judged.again
    values = {} if again is None else again.values()
    names = ("ratio", "difference", "verdict", "num_base", "num_head")
    return {
        "case_id": stated.case_id,
        "case": stated.case,
        "metric": stated.metric.name,
        "stated_verdict": str(stated.change.verdict),
        **{f"again_{name}": values.get(name) for name in names},
        "outcome": str(judged.outcome),
    }
