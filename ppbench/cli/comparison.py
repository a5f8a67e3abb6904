"""The texts of a comparison: as it is, as a gate judges it, and as newer launches of a saved one.

In a terminal and in markdown: one line per case and metric, then sentences. In JSON and CSV: every
raw figure under its own name, with the verdicts in the words of `judge.verdicts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from ppbench.cli.options import typed_command
from ppbench.commits.gate import NOT_DECIDED, NOTHING, GatedLine, GateResult, entry_text
from ppbench.commits.saved import Recheck, identity_values
from ppbench.comparison.axes import key_of
from ppbench.comparison.lines import COMMIT, Comparison, Contrast, Line, ends, listed
from ppbench.comparison.measurement import MOST_LAUNCHES, stop_text
from ppbench.comparison.sides import SHORT
from ppbench.console import note
from ppbench.display.cases import axis_text
from ppbench.display.changes import (
    change_text,
    figure_text,
    moved_sentences,
    verdict_text,
)
from ppbench.display.commands import LAUNCHES, repeated
from ppbench.display.fields import field_of, words
from ppbench.display.formats import Format
from ppbench.display.tables import EVERYTHING, Rows, View, as_records, escaped, render
from ppbench.display.units import counted
from ppbench.errors import ExitCode
from ppbench.report.pages.comparison import facts_of, why_idle

_COLUMNS = ("case", "fingerprint", "figure", "base", "head", "change_text", "verdict")
_EXTRA = {"stated": words("stated"), "outcome": words("outcome")}
_DETAILS = ["case", "metric", "fingerprint", "p", "resolution", "within", "num_base", "num_head"]
_MOST_NAMED = 3
Cells = Mapping[str, str]


def comparison_text(comparison: Comparison, how: Format, view: View = EVERYTHING) -> str:
    """The output of `ppbench compare`, of two sides or of cases along a setting."""
    if how is Format.json:
        values = _values(comparison, comparison.series())
        return json.dumps(values, indent=2, allow_nan=False)
    if how is Format.csv:
        return render(comparison.frame, how, [], view)
    why = NOTHING
    if comparison.axis != COMMIT:
        why = f"no two cases differ in {key_of(comparison.axis)} alone"
    return _joined(
        _heads(comparison, how),
        _stop(comparison, how, typed_command()),
        _table(comparison, [(line, {}) for line in comparison.lines], how, view)
        or f"nothing to compare: {why}",
        *_moved(comparison, how),
        _notes(comparison, how),
    )


def gate_text(result: GateResult, how: Format, command: str, view: View = EVERYTHING) -> str:
    """The output of `ppbench check`; `command` repeats the check."""
    comparison, is_page = result.comparison, how is Format.markdown
    if how is Format.json:
        values = {
            "verdict": result.word,
            "exit_code": result.exit_code,
            **_values(comparison, comparison.changed()),
            "changes": _records(result.frame),
            "failed": list(result.failed),
            "missing": list(result.missing),
            "command": command,
        }
        return json.dumps(values, indent=2, allow_nan=False)
    if how is Format.csv:
        return render(result.frame, how, [], view)
    rows: list[tuple[Line, Cells]] = []
    for gated in result.lines:
        word = "regression" if gated.is_regression else "accepted" if gated.accepted else "ok"
        if not gated.line.change.is_decided:
            word = gated.line.change.verdict
        cells = {"allowed": _allowed(gated), "gate": word}
        rows.append((gated.line, cells if gated.is_gated else {"allowed": "", "gate": "not gated"}))
    why = [
        *(f"regression: {_sentence(g)}; {_allowed(g)} is allowed" for g in result.regressions),
        *(f"failed at head: {case}" for case in result.failed),
        *(f"not enough data: {case}" for case in result.missing),
        *(
            f"open: {_sentence(gated)}{'; it passes' * (result.exit_code == ExitCode.ok)}"
            for gated in result.open
        ),
    ]
    accepted = [
        f"{escaped(_sentence(gated)) if is_page else _sentence(gated)}, with "
        f"{entry.commit[:SHORT]}: {as_code(entry.reason) if is_page else _plain(entry.reason)}"
        for gated in result.accepted
        if (entry := gated.accepted) is not None
    ]
    first = headline(result)
    return _joined(
        f"## {escaped(first)}" if is_page else first,
        _to_decide(result, how, command),
        _heads(comparison, how),
        _stop(comparison, how, command),
        _table(comparison, rows, how, view),
        *_moved(comparison, how),
        _section("Why", why, how, "", as_code),
        _section("Accepted", accepted, how, "accepted: ", str),
        _notes(comparison, how),
        _to_paste(result, how),
        f"**How to reproduce**\n\n```sh\n{command}\n```" if is_page else "",
        _details("Details", render(result.frame, Format.markdown, _DETAILS))
        if is_page and not result.frame.empty
        else "",
    )


def headline(result: GateResult) -> str:
    """The gate's result in one line."""
    num_cases = len({gated.line.series for gated in result.lines})
    limit = "its threshold" if len(result.regressions) == 1 else "their thresholds"
    counts = (
        (result.regressions, "metric", f"regressed beyond {limit}"),
        (result.failed, "case", "failed at head"),
        (result.missing, "case", "not judged"),
        (result.accepted, "regression", "accepted"),
        (result.open, "metric", "open"),
    )
    parts = [f"{counted(len(some), what)} {how}" for some, what, how in counts if some]
    reasons = "; ".join(parts) or "nothing worse than allowed"
    text = f"ppbench check: {result.word}: {reasons} ({counted(num_cases, 'case')} compared)"
    return f"{text}; exits with {result.exit_code:d}" if result.word == NOT_DECIDED else text


def recheck_text(recheck: Recheck, how: Format, view: View = EVERYTHING) -> str:
    """The output of `ppbench check COMPARISON.json`: what new launches say of stated changes."""
    comparison, rows, sentences = recheck.comparison, list[tuple[Line, Cells]](), []
    if how is Format.csv:
        return render(recheck.frame, how, [], view)
    if how is Format.json:
        values = {
            "outcome": str(recheck.outcome),
            "exit_code": recheck.exit_code,
            "changes": as_records(recheck.frame),
            "notes": list(comparison.notes),
        }
        return json.dumps(values, indent=2, allow_nan=False)
    for each in recheck.judged:
        now, metric, was = "not measured again", each.metric, each.change
        stated = change_text(metric, was)
        if each.again is not None:
            rows.append((each.again, {"stated": stated, "outcome": str(each.outcome)}))
            change = each.again.change
            now = f"{verdict_text(metric, change.verdict)}, {change_text(metric, change)}"
        if each.outcome is recheck.outcome:
            of = f"{field_of(metric.name).label} of {each.case}"
            verdict = verdict_text(metric, was.verdict)
            sentences.append(f"{of}: {now}; stated: {verdict}, {stated}")
    said = listed(sentences, _MOST_NAMED) or "the comparison states no change that could hold"
    first = f"{recheck.outcome}: {said}"
    return _joined(
        f"**{escaped(first)}**" if how is Format.markdown else first,
        _table(comparison, rows, how, view),
        _notes(comparison, how),
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _to_decide(result: GateResult, how: Format, command: str) -> str:
    """The check that measures more where this one is not decided; else nothing."""
    comparison = result.comparison
    is_known = result.source is not None and not comparison.head.origins
    if result.word != NOT_DECIDED or comparison.stopped is not None or not is_known:
        return ""
    again = repeated(command, {LAUNCHES: str(MOST_LAUNCHES)}, ["--run"])
    return (
        f"to decide it, on a quiet machine: {as_code(again) if how is Format.markdown else again}"
    )


def _heads(comparison: Comparison, how: Format) -> str:
    """Say what is compared, and how many runs of it."""
    facts = facts_of(comparison)
    width = max(len(name) for name, _ in facts) + 2
    lines = [f"{name:{width}}{_plain(text)}" for name, text in facts]
    return "\n".join(f"- {as_code(line)}" if how is Format.markdown else line for line in lines)


def _stop(comparison: Comparison, how: Format, command: str) -> str:
    """Why no more launches were made, and how to go on; empty if their number was fixed."""
    stopped = comparison.stopped
    if stopped is None:
        return ""
    text = stop_text(stopped)
    again = repeated(command, stopped.to_decide) if stopped.to_decide else ""
    if how is Format.markdown:
        return escaped(text) + (f"; go on with: {as_code(again)}" if again else "")
    return f"{text}\ngo on with: {again}" if again else text


def _plain(text: str) -> str:
    return " ".join(text.split())


def as_code(text: str) -> str:
    """Foreign text as markdown code: no markup, mention or reference in it takes effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"


def _table(
    comparison: Comparison, rows: Sequence[tuple[Line, Cells]], how: Format, view: View
) -> str:
    """A table that names each contrast once, and what all have alike not at all.

    Lines have further cells. Along a setting the parts of a name are stacked beside its rows, to
    stay narrow, and a single pair of values heads its two columns. A case that is the only one is
    named above the table. In another order every row names its case.
    """
    if not rows:
        return ""
    lines, axis = [line for line, _ in rows], comparison.axis
    extra = tuple(rows[0][1])
    columns = [*_COLUMNS, *extra, "launches"]
    essential = ["case", "figure", "change_text", extra[-1] if extra else "verdict"]
    cells = [{**_row(line), **more} for line, more in rows]
    if view.sort:
        column = str(view.order(columns))
        keys = [_number(line, column, own[column]) for line, own in zip(lines, cells, strict=True)]
        order = Rows(["key", "at"], [*zip(keys, itertools.count())])
        order = order.sorted("key", is_descending=view.sort.startswith("-"))
        cells = [cells[int(str(at))] for _, at in order.cells]
        view = replace(view, sort="")
        hidden = {"fingerprint"} if len({own["fingerprint"] for own in cells}) == 1 else set()
    else:
        cells, hidden = _stacked(comparison, rows, cells, is_narrow=how is Format.table)
    shown = {n: _EXTRA.get(n) or field_of(n) for n in columns if n not in hidden}
    pairs = {(line.series.base_value, line.series.head_value) for line in lines}
    if axis != COMMIT and len(pairs) == 1:
        for name, value in zip(("base", "head"), *pairs, strict=True):
            shown[name] = words(axis_text(axis, value), is_number=True)
    return render(pd.DataFrame(cells, columns=columns), how, shown, view, essential)


def _stacked(
    comparison: Comparison,
    rows: Sequence[tuple[Line, Cells]],
    cells: Sequence[dict[str, str]],
    *,
    is_narrow: bool,
) -> tuple[list[dict[str, str]], set[str]]:
    """The rows of a table in which each contrast is named once, and columns that say nothing."""
    is_commit, stacked = comparison.axis == COMMIT, list[dict[str, str]]()
    series = list(dict.fromkeys(line.series for line, _ in rows))
    for contrast in series:
        own = [row for row, (line, _) in zip(cells, rows, strict=True) if line.series == contrast]
        names = list(contrast.parts) if is_narrow and not is_commit else [contrast.text]
        own += [dict.fromkeys(cells[0], "")] * (len(names) - len(own))
        for place, row in enumerate(own):
            machine = "" if place else contrast.fingerprint
            name = "".join(names[place : place + 1])
            stacked.append({**row, "case": name, "fingerprint": machine})
    may_hide = ("fingerprint",) if is_commit else ("fingerprint", "launches")
    hidden = {name for name in may_hide if len({"", *(row[name] for row in stacked)}) == 2}
    if len(series) == 1 and (is_commit or not series[0].common):
        hidden.add("case")
    return stacked, hidden


def _row(line: Line) -> dict[str, str]:
    metric, change = line.metric, line.change
    discounts = f" ({len(line.discounted)} discounted)" if line.discounted else ""
    return {
        "case": line.series.text,
        "fingerprint": line.series.fingerprint,
        "figure": field_of(metric.name).heading,
        "base": figure_text(metric, change.base),
        "head": figure_text(metric, change.head),
        "change_text": change_text(metric, change),
        "verdict": verdict_text(metric, change.verdict),
        "launches": f"{change.num_base}, {change.num_head}{discounts}",
    }


def _number(line: Line, column: str, text: str) -> object:
    """The value by which a row is sorted: a number where its cell is one."""
    change = line.change
    tested = change.difference if line.metric.in_points else change.ratio
    return {
        "base": change.base,
        "head": change.head,
        "change_text": None if tested is None else tested.estimate,
        "launches": change.num_base,
    }.get(column, text)


def _section(
    title: str,
    lines: Iterable[str],
    how: Format,
    prefix: str | None = None,
    written: Callable[[str], str] = escaped,
) -> str:
    """Sentences; in a terminal each begins with `prefix`, or is indented below the title.

    `written` is how they are written in markdown: foreign text as code.
    """
    if not (lines := list(lines)):
        return ""
    if how is Format.markdown:
        items = "\n".join(f"- {written(line)}" for line in lines)
        return f"**{escaped(title)}**\n\n{items}"
    if prefix is None:
        return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
    return "\n".join(f"{prefix}{line}" for line in lines)


def _moved(comparison: Comparison, how: Format) -> Iterable[str]:
    breakdowns = comparison.break_down(comparison.changed())
    has_several = len({breakdown.series.fingerprint for breakdown in breakdowns}) > 1
    for part in breakdowns:
        on = f" on {part.series.fingerprint}" if has_several else ""
        title = f"What changed in {part.series.text}{on}"
        if comparison.axis != COMMIT:
            title = ", ".join(["What changed", part.series.pair, *part.series.common])
        yield _section(title, moved_sentences(part.moved, why_idle(comparison)), how)


def _notes(comparison: Comparison, how: Format) -> str:
    return _section("Notes", comparison.notes, how, "note: ", as_code)


def note_aside(comparison: Comparison, how: Format) -> None:
    """Note what a table in CSV has no place for."""
    if how is Format.csv:
        for text in (_stop(comparison, how, typed_command()), *comparison.notes):
            if text:
                note(f"note: {text}")


def _sentence(gated: GatedLine) -> str:
    line = gated.line
    label = field_of(line.metric.name).label
    return f"{line.series.text}: {label} {change_text(line.metric, line.change)}"


def _allowed(gated: GatedLine) -> str:
    return f"{gated.threshold * 100:.3g} {'points' if gated.line.metric.in_points else '%'}"


def _to_paste(result: GateResult, how: Format) -> str:
    """The entries that would accept the regressions; an attached training has no sweep file."""
    head = result.comparison.head
    if not result.regressions or head.origins:
        return ""
    is_dirty = bool(head.runs["is_dirty"].eq(True).any())
    known = None if is_dirty else head.commit
    commit = known[:12] if known else "the commit that it came with"
    entries = "\n\n".join(
        entry_text(commit, gated.conditions, gated.line.metric.name, gated.up_to)
        for gated in result.regressions
    )
    first = "commit first, then name that commit and " if is_dirty else ""
    advice = f"If this is intended, {first}put it into the sweep file (see docs/howto/ci-gate.md):"
    if how is Format.markdown:
        return _details("Is it intended?", f"{advice}\n\n```toml\n{entries}\n```")
    return f"{advice}\n\n{entries}"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Rows for JSON, in which discounts are objects rather than their text."""
    rows = as_records(frame)
    return [{**row, "discounts": json.loads(str(row["discounts"]))} for row in rows]


def _values(comparison: Comparison, wanted: Sequence[Contrast]) -> dict[str, object]:
    """A comparison as JSON has it, with the spans of the wanted contrasts that moved.

    That of two sides can be measured again from it.
    """
    is_commit, stopped = comparison.axis == COMMIT, comparison.stopped
    first: dict[str, object] = {
        "axis": comparison.axis,
        "base": comparison.base_value,
        "values": list(comparison.axis_values),
        "runs": comparison.base.title,
    }
    moved = []
    for breakdown in comparison.break_down(wanted):
        series = breakdown.series
        identity = {"case_id": series.case_id, "fingerprint": series.fingerprint}
        named = identity if is_commit else series.values()
        for part in breakdown.moved:
            spans, change = part.of, part.change
            moved.append(
                {
                    **named,
                    "kind": str(spans.kind),
                    "op": spans.op or None,
                    "place": spans.place,
                    "target": None if spans.target < 0 else spans.target,
                    "base_ns": change.base,
                    "head_ns": change.head,
                    **ends("ratio", change.ratio),
                    "p": change.p,
                    "verdict": str(change.verdict),
                    "contribution_ns": part.contribution_ns,
                    "is_tested": part.is_tested,
                    "has_moved": part.has_moved,
                }
            )
    return {
        **(identity_values(comparison) if is_commit else first),
        **({} if stopped is None else {"looks": stopped.as_dict()}),
        "changes": _records(comparison.frame),
        "moved": moved,
        "notes": list(comparison.notes),
    }
