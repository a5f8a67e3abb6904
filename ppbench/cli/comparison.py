"""The text of a comparison and of the gate's result, as `ppbench compare` and `check` print them.

In a terminal and in markdown: one line per case and metric, then sentences. In JSON and CSV: every
raw figure under its own name, with the verdicts in the words of `judge.verdicts`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ppbench.cli.options import typed_command
from ppbench.commits.gate import NOT_DECIDED, NOTHING, GatedLine, GateResult, entry_text
from ppbench.commits.saved import identity_values, lasting_revision
from ppbench.comparison.axes import key_of
from ppbench.comparison.lines import COMMIT, Breakdown, Comparison, Line, ends
from ppbench.comparison.measurement import stop_text
from ppbench.comparison.notes import launches_wanted
from ppbench.comparison.sides import SHORT, Side
from ppbench.console import note
from ppbench.display.cases import axis_text
from ppbench.display.changes import (
    BY_AXIS,
    BY_COMMIT,
    change_text,
    figure_text,
    moved_sentences,
    verdict_text,
)
from ppbench.display.commands import LAUNCHES, repeated
from ppbench.display.fields import field_of, words
from ppbench.display.formats import Format
from ppbench.display.tables import EVERYTHING, View, as_records, escaped, render, sort_rows
from ppbench.display.units import counted
from ppbench.errors import ExitCode
from ppbench.report.pages.comparison import ComparisonPage

_COLUMNS = ("case", "fingerprint", "figure", "base", "head", "change_text", "verdict")
_GATE_COLUMNS = ("allowed", "gate")
_NAMING = ("case", "figure", "change_text")
"""Columns that are never moved above the table, and left out last."""
_DETAILS = ["case", "metric", "fingerprint", "p", "resolution", "within", "num_base", "num_head"]


def comparison_text(
    comparison: Comparison, breakdowns: Sequence[Breakdown], how: Format, view: View = EVERYTHING
) -> str:
    """The output of `ppbench compare`, of two sides or of cases along a setting."""
    if how is Format.json:
        return _as_json(_comparison_values(comparison, breakdowns))
    if how is Format.csv:
        return render(comparison.frame, how, [], view)
    why = NOTHING
    if comparison.axis != COMMIT:
        why = f"no two cases differ in {key_of(comparison.axis)} alone"
    parts = [
        _heads(comparison, how),
        _stop(comparison, how, typed_command()),
        _table(comparison, [_row(line) for line in comparison.lines], how, view)
        or f"nothing to compare: {why}",
        *(section.text(how) for section in (*_moved(comparison, breakdowns), _notes(comparison))),
    ]
    return "\n\n".join(part for part in parts if part)


def page_of(
    comparison: Comparison, breakdowns: Sequence[Breakdown], command: str
) -> ComparisonPage:
    """The content of the page of `ppbench compare`."""
    base, head, axis = comparison.base, comparison.head, comparison.axis
    stores = {side.store.folder: side.store for side in (base, head)}
    tables = [store.table("runs", comparison.run_ids) for store in stores.values()]
    runs = pd.concat(tables).drop_duplicates("run_id").sort_values("run_id")
    if axis == COMMIT:
        both = (("base", base), ("head", head))
        facts = [(word, f"{_plain(side.title)}, {_counts(side)}") for word, side in both]
        sides = [(base.name, head.name)] * len(comparison.lines)
        title, why = f"{base.name} and {head.name}", BY_COMMIT
    else:
        values = ", ".join(axis_text(axis, value) for value in comparison.axis_values)
        facts = [
            ("setting", key_of(axis)),
            ("values", values),
            ("runs", base.title),
            *([("all", comparison.shared)] if comparison.shared else []),
        ]
        of_lines = [line.series for line in comparison.lines]
        sides = [(axis_text(axis, s.base_value), axis_text(axis, s.head_value)) for s in of_lines]
        title, why = f"Along {key_of(axis)}: {values}", BY_AXIS
    return ComparisonPage(title, facts, sides, comparison, breakdowns, why, runs, command)


def gate_text(
    result: GateResult,
    breakdowns: Sequence[Breakdown],
    how: Format,
    command: str,
    view: View = EVERYTHING,
) -> str:
    """The output of `ppbench check`; `command` repeats the check."""
    if how is Format.json:
        return _as_json(
            {
                "verdict": result.word,
                "exit_code": result.exit_code,
                **_comparison_values(result.comparison, breakdowns),
                "changes": _records(result.frame),
                "failed": list(result.failed),
                "missing": list(result.missing),
                "command": command,
            }
        )
    if how is Format.csv:
        return render(result.frame, how, [], view)
    is_page = how is Format.markdown
    rows = []
    for gated in result.lines:
        word = "regression" if gated.is_regression else "accepted" if gated.accepted else "ok"
        if not gated.line.change.is_decided:
            word = gated.line.change.verdict
        cells = {"allowed": _allowed(gated), "gate": word}
        unjudged = {"allowed": "", "gate": "not gated"}
        rows.append({**_row(gated.line), **(cells if gated.is_gated else unjudged)})
    comparison = result.comparison
    why = [
        *(
            f"regression: {_sentence(gated)}; {_allowed(gated)} is allowed"
            for gated in result.regressions
        ),
        *(f"failed at head: {case}" for case in result.failed),
        *(f"not enough data: {case}" for case in result.missing),
        *(
            f"open: {_sentence(gated)}{'; it passes' * (result.exit_code == ExitCode.ok)}"
            for gated in result.open
        ),
    ]
    accepted = []
    for gated in result.accepted:
        if (entry := gated.accepted) is not None:
            sentence = escaped(_sentence(gated)) if is_page else _sentence(gated)
            reason = as_code(entry.reason) if is_page else _plain(entry.reason)
            accepted.append(f"{sentence}, with {entry.commit[:SHORT]}: {reason}")
    sections = (
        *_moved(comparison, breakdowns),
        _Section("Why", why, "", is_quoted=True),
        _Section("Accepted", accepted, "accepted: ", is_markup=True),
        _notes(comparison),
    )
    parts = [
        f"## {escaped(headline(result))}" if is_page else headline(result),
        _to_decide(result, how, command),
        _heads(comparison, how),
        _stop(comparison, how, command),
        _table(comparison, rows, how, view),
        *(section.text(how) for section in sections),
        _to_paste(result, how),
        *([f"**How to reproduce**\n\n```sh\n{command}\n```"] if is_page else []),
        details("Details", render(result.frame, Format.markdown, _DETAILS))
        if is_page and not result.frame.empty
        else "",
    ]
    return "\n\n".join(part for part in parts if part)


def headline(result: GateResult) -> str:
    """The gate's result in one line."""
    num_cases = len({gated.line.series for gated in result.lines})
    num_worse = len(result.regressions)
    parts = [
        f"{counted(num_worse, 'metric')} regressed beyond {'its' if num_worse == 1 else 'their'} "
        f"threshold{'' if num_worse == 1 else 's'}"
        if num_worse
        else "",
        f"{counted(len(result.failed), 'case')} failed at head" if result.failed else "",
        f"{counted(len(result.missing), 'case')} not judged" if result.missing else "",
        f"{counted(len(result.accepted), 'regression')} accepted" if result.accepted else "",
        f"{counted(len(result.open), 'metric')} open" if result.open else "",
    ]
    reasons = "; ".join(part for part in parts if part) or "nothing worse than allowed"
    compared = f"({counted(num_cases, 'case')} compared)"
    text = f"ppbench check: {result.word}: {reasons} {compared}"
    return f"{text}; exits with {result.exit_code:d}" if result.word == NOT_DECIDED else text


def _to_decide(result: GateResult, how: Format, command: str) -> str:
    """The check that measures more where this one is not decided; else nothing."""
    comparison = result.comparison
    is_known = result.sweep_file is not None and not comparison.head.origins
    if result.word != NOT_DECIDED or comparison.stopped is not None or not is_known:
        return ""
    num = launches_wanted([gated.line for gated in result.open])
    again = repeated(command, {LAUNCHES: str(num)}, ["--run"])
    return (
        f"to decide it, on a quiet machine: {as_code(again) if how is Format.markdown else again}"
    )


def _heads(comparison: Comparison, how: Format) -> str:
    """What is compared, and how many runs of it."""
    axis = comparison.axis
    if axis == COMMIT:
        both = (("base", comparison.base), ("head", comparison.head))
        lines = [f"{word}  {_plain(side.title)}, {_counts(side)}" for word, side in both]
        if len(only := comparison.series()) == 1:
            lines.append(f"case  {_plain(only[0].text)}")
        return _listed(lines, how)
    values = [
        f"{axis_text(axis, value)}{' (base)' if value == comparison.base_value else ''}"
        for value in comparison.axis_values
    ]
    nums = {n for line in comparison.lines for n in (line.change.num_base, line.change.num_head)}
    each = f", {counted(min(nums), 'launch')} of each case" if len(nums) == 1 else ""
    lines = [
        f"across  {key_of(axis)}: {', '.join(values)}",
        f"runs    {_plain(comparison.base.title)}{each}",
        *([f"all     {comparison.shared}"] if comparison.shared else []),
    ]
    return _listed(lines, how)


def _listed(lines: Sequence[str], how: Format) -> str:
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


def _counts(side: Side) -> str:
    failed = f", {len(side.failed)} failed" if len(side.failed) else ""
    return f"{counted(len(side.runs), 'run')}{failed}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def as_code(text: str) -> str:
    """Foreign text as markdown code: no markup, mention or reference in it takes effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"


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


def _table(comparison: Comparison, rows: Sequence[dict[str, str]], how: Format, view: View) -> str:
    """A table that names each contrast once, and what all have alike not at all.

    Along a setting the parts of a name are stacked beside its rows, to stay narrow, and a single
    pair of values heads its two columns. A case that is the only one is named above the table.
    """
    if not rows:
        return ""
    lines, axis = comparison.lines, comparison.axis
    gate_columns = _GATE_COLUMNS if "gate" in rows[0] else ()
    columns = [*_COLUMNS, *gate_columns, "launches"]
    if view.sort:
        return _sorted_table(pd.DataFrame(rows, columns=columns), lines, how, view)
    is_stacked = axis != COMMIT and how is Format.table
    series, stacked = comparison.series(), []
    for contrast in series:
        own = [row for row, line in zip(rows, lines, strict=True) if line.series == contrast]
        names = list(contrast.parts) if is_stacked else [contrast.text]
        own += [dict.fromkeys(columns, "")] * (len(names) - len(own))
        for place, row in enumerate(own):
            machine = "" if place else contrast.fingerprint
            name = "".join(names[place : place + 1])
            stacked.append({**row, "case": name, "fingerprint": machine})
    frame = pd.DataFrame(stacked, columns=columns)
    may_hide = ("fingerprint",) if axis == COMMIT else ("fingerprint", "launches")
    hidden = {name for name in may_hide if len({*frame[name], ""}) == 2}
    if len(series) == 1 and (axis == COMMIT or not series[0].common):
        hidden.add("case")
    shown = {str(name): field_of(str(name)) for name in frame if name not in hidden}
    pairs = {(line.series.base_value, line.series.head_value) for line in lines}
    if axis != COMMIT and len(pairs) == 1:
        for name, value in zip(("base", "head"), *pairs, strict=True):
            shown[name] = words(axis_text(axis, value), is_number=True)
    essential = [*_NAMING, "gate" if gate_columns else "verdict"]
    return render(frame, how, shown, view, essential)


def _sorted_table(frame: pd.DataFrame, lines: Sequence[Line], how: Format, view: View) -> str:
    """A table in another order: every row names its case; figures and changes sort as numbers."""
    column = view.order(list(map(str, frame.columns)))
    changes: list[float | None] = []  # a difference for metrics in points, else a ratio
    for line in lines:
        change, in_points = line.change, line.metric.in_points
        base, head = change.base, change.head
        interval = change.difference if in_points else change.ratio
        if interval is not None:
            changes.append(interval.estimate)
        elif base is None or head is None:
            changes.append(None)
        elif in_points:
            changes.append(head - base)
        else:
            changes.append(head / base if base else None)
    numbers = {
        "base": [line.change.base for line in lines],
        "head": [line.change.head for line in lines],
        "change_text": changes,
        "launches": [line.change.num_base for line in lines],
    }
    keys = pd.DataFrame({"key": numbers.get(str(column), frame[column])})
    order = sort_rows(keys, "key", is_descending=view.sort.startswith("-")).index
    shown = [str(name) for name in frame if name != "fingerprint" or len(set(frame[name])) > 1]
    essential = [*_NAMING, "verdict", *(["gate"] if "gate" in frame else [])]
    return render(frame.iloc[list(order)], how, shown, replace(view, sort=""), essential)


@dataclass(frozen=True)
class _Section:
    """Sentences; in a terminal each begins with `prefix`, or is indented below the title."""

    title: str
    lines: Sequence[str]
    prefix: str | None = None
    is_markup: bool = False  # in markdown: written as it is
    is_quoted: bool = False  # in markdown: as code, since it holds foreign text

    def text(self, how: Format) -> str:
        if not self.lines:
            return ""
        if how is Format.markdown:
            written = as_code if self.is_quoted else str if self.is_markup else escaped
            items = "\n".join(f"- {written(line)}" for line in self.lines)
            return f"**{escaped(self.title)}**\n\n{items}"
        if self.prefix is None:
            return "\n".join([f"{self.title}:", *(f"  {line}" for line in self.lines)])
        return "\n".join(f"{self.prefix}{line}" for line in self.lines)


def _moved(comparison: Comparison, breakdowns: Sequence[Breakdown]) -> list[_Section]:
    has_several = len({breakdown.series.fingerprint for breakdown in breakdowns}) > 1
    sections = []
    for part in breakdowns:
        on = f" on {part.series.fingerprint}" if has_several else ""
        title, why = f"What changed in {part.series.text}{on}", BY_COMMIT
        if comparison.axis != COMMIT:
            title = ", ".join(["What changed", part.series.pair, *part.series.common])
            why = BY_AXIS
        sections.append(_Section(title, moved_sentences(part.moved, why)))
    return sections


def _sentence(gated: GatedLine) -> str:
    line = gated.line
    label = field_of(line.metric.name).label
    return f"{line.series.text}: {label} {change_text(line.metric, line.change)}"


def _allowed(gated: GatedLine) -> str:
    return f"{gated.threshold * 100:.3g} {'points' if gated.line.metric.in_points else '%'}"


def note_aside(comparison: Comparison, how: Format) -> None:
    """Note what a table in CSV has no place for."""
    if how is Format.csv:
        for text in (_stop(comparison, how, typed_command()), *comparison.notes):
            if text:
                note(f"note: {text}")


def _notes(comparison: Comparison) -> _Section:
    return _Section("Notes", comparison.notes, "note: ", is_quoted=True)


def _to_paste(result: GateResult, how: Format) -> str:
    """The entries that would accept the regressions; an attached training has no accept file."""
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
    advice = f"If this is intended, {first}put it into the accept file (see docs/howto/ci-gate.md):"
    if how is Format.markdown:
        return details("Is it intended?", f"{advice}\n\n```toml\n{entries}\n```")
    return f"{advice}\n\n{entries}"


def details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _as_json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=2, allow_nan=False)


def _records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Rows for JSON, in which discounts are objects rather than their text."""
    rows = as_records(frame)
    return [{**row, "discounts": json.loads(str(row["discounts"]))} for row in rows]


def _comparison_values(
    comparison: Comparison, breakdowns: Sequence[Breakdown]
) -> dict[str, object]:
    is_commit, stopped = comparison.axis == COMMIT, comparison.stopped
    first: dict[str, object] = {}
    if is_commit:
        for word, side in (("base", comparison.base), ("head", comparison.head)):
            first[word] = {
                "name": side.name,
                "title": side.title,
                "commit": side.commit,
                "revision": lasting_revision(side),
                "num_runs": len(side.runs),
                "num_failed": len(side.failed),
            }
        first |= identity_values(comparison)
    else:
        first["axis"], first["base"] = comparison.axis, comparison.base_value
        first["values"], first["runs"] = list(comparison.axis_values), comparison.base.title
    moved = []
    for breakdown in breakdowns:
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
        **first,
        **({} if stopped is None else {"looks": stopped.as_dict()}),
        "changes": _records(comparison.frame),
        "moved": moved,
        "notes": list(comparison.notes),
    }
