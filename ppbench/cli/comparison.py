"""The text of a comparison and of the gate's result, as `ppbench compare` and `check` print them.

In a terminal and in markdown: one line per case and metric, then sentences. In JSON and CSV: every
raw figure under its own name, with the verdicts in the words of `judge.verdicts`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ppbench.analysis.breakdown import Moved
from ppbench.commits.comparison import Comparison, Series
from ppbench.commits.gate import NOT_DECIDED, NOTHING, GatedLine, GateResult, entry_text
from ppbench.commits.saved import identity_values, lasting_revision
from ppbench.commits.sides import SHORT, Side
from ppbench.comparison.across import Across, Contrast
from ppbench.comparison.axes import key_of
from ppbench.comparison.lines import Breakdown, Compared, Line, ends
from ppbench.comparison.measurement import stop_text
from ppbench.comparison.notes import launches_wanted
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
from ppbench.display.fields import field_of, words
from ppbench.display.formats import Format
from ppbench.display.tables import EVERYTHING, View, as_records, escaped, render, sort_rows
from ppbench.display.units import counted
from ppbench.report.pages.comparison import ComparisonPage

_COLUMNS = ("case", "fingerprint", "figure", "base", "head", "change_text", "verdict")
_GATE_COLUMNS = ("allowed", "gate")
_NAMING = ("case", "figure", "change_text")
"""Columns that are never moved above the table, and left out last."""
_DETAILS = ["case", "metric", "fingerprint", "p", "resolution", "within", "num_base", "num_head"]


def comparison_text(
    comparison: Comparison,
    breakdowns: Sequence[Breakdown[Series]],
    how: Format,
    view: View = EVERYTHING,
) -> str:
    """The output of `ppbench compare`."""
    if how is Format.json:
        return _as_json(_comparison_values(comparison, breakdowns))
    if how is Format.csv:
        return render(comparison.frame, how, [], view)
    parts = [
        _heads(comparison, how),
        _stop(comparison, how),
        _table([_row(line) for line in comparison.lines], comparison.lines, how, view)
        or f"nothing to compare: {NOTHING}",
        *(section.text(how) for section in (*_moved(breakdowns), _notes(comparison))),
    ]
    return "\n\n".join(part for part in parts if part)


def across_text(
    across: Across,
    breakdowns: Sequence[Breakdown[Contrast]],
    how: Format,
    view: View = EVERYTHING,
) -> str:
    """The output of `ppbench compare --across`."""
    if how is Format.json:
        return _as_json(
            {
                "axis": across.axis,
                "base": across.base,
                "values": list(across.axis_values),
                "runs": across.title,
                **_looks_values(across),
                "changes": _records(across.frame),
                "moved": [
                    {**breakdown.series.values(), **_moved_values(part)}
                    for breakdown in breakdowns
                    for part in breakdown.moved
                ],
                "notes": list(across.notes),
            }
        )
    if how is Format.csv:
        return render(across.frame, how, [], view)
    values = [
        f"{axis_text(across.axis, value)}{' (base)' if value == across.base else ''}"
        for value in across.axis_values
    ]
    launches = {
        num for line in across.lines for num in (line.change.num_base, line.change.num_head)
    }
    each = f", {counted(min(launches), 'launch')} of each case" if len(launches) == 1 else ""
    heads = [
        f"across  {key_of(across.axis)}: {', '.join(values)}",
        f"runs    {_plain(across.title)}{each}",
        *([f"all     {across.shared}"] if across.shared else []),
    ]
    moved = [
        _Section(
            ", ".join(["What changed", breakdown.series.pair, *breakdown.series.common]),
            moved_sentences(breakdown.moved, BY_AXIS),
        )
        for breakdown in breakdowns
    ]
    empty = f"nothing to compare: no two cases differ in {key_of(across.axis)} alone"
    parts = [
        _listed(heads, how),
        _stop(across, how),
        _across_table(across, how, view) or empty,
        *(section.text(how) for section in (*moved, _notes(across))),
    ]
    return "\n\n".join(part for part in parts if part)


def _across_table(across: Across, how: Format, view: View) -> str:
    """A table with a few rows per pair; its settings are stacked beside them, to stay narrow.

    With a single pair of values, its sides are headed by them.
    """
    if not across.lines:
        return ""
    if view.sort:
        rows = [_row(line) for line in across.lines]
        return _sorted_table(pd.DataFrame(rows), across.lines, how, view)
    is_stacked = how is Format.table
    rows = []
    for contrast in across.series():
        lines = [_row(line) for line in across.lines if line.series == contrast]
        names = list(contrast.parts) if is_stacked else [contrast.text]
        blank = dict.fromkeys(lines[0], "")
        lines += [blank] * (len(names) - len(lines))
        machines = [contrast.fingerprint]
        for place, line in enumerate(lines):
            own = {"case": names[place : place + 1], "fingerprint": machines[place : place + 1]}
            rows.append({**line, **{name: "".join(cell) for name, cell in own.items()}})
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, "launches"])
    alike = {name for name in ("fingerprint", "launches") if len({*frame[name], ""}) == 2}
    if len(across.series()) == 1 and not across.series()[0].common:
        alike.add("case")
    shown = {str(name): field_of(str(name)) for name in frame if name not in alike}
    pairs = {(line.series.base_value, line.series.head_value) for line in across.lines}
    if len(pairs) == 1:
        for name, value in zip(("base", "head"), *pairs, strict=True):
            shown[name] = words(axis_text(across.axis, value), is_number=True)
    return render(frame, how, shown, view, [*_NAMING, "verdict"])


def page_of_axis(
    across: Across, breakdowns: Sequence[Breakdown[Contrast]], command: str
) -> ComparisonPage:
    """The content of the page of `ppbench compare --across`."""
    values = ", ".join(axis_text(across.axis, value) for value in across.axis_values)
    facts = [
        ("setting", key_of(across.axis)),
        ("values", values),
        ("runs", across.title),
        *([("all", across.shared)] if across.shared else []),
    ]
    sides = [
        (
            axis_text(across.axis, line.series.base_value),
            axis_text(across.axis, line.series.head_value),
        )
        for line in across.lines
    ]
    title = f"Along {key_of(across.axis)}: {values}"
    runs = across.stores[0].table("runs", across.run_ids)
    return ComparisonPage(title, facts, sides, across, breakdowns, BY_AXIS, runs, command)


def page_of_sides(
    comparison: Comparison, breakdowns: Sequence[Breakdown[Series]], command: str
) -> ComparisonPage:
    """The content of the page of `ppbench compare BASE HEAD`."""
    both = (("base", comparison.base), ("head", comparison.head))
    facts = [(word, f"{_plain(side.title)}, {_counts(side)}") for word, side in both]
    names = (comparison.base.name, comparison.head.name)
    stores = {side.store.folder: side.store for _, side in both}
    tables = [store.table("runs", comparison.run_ids) for store in stores.values()]
    runs = pd.concat(tables).drop_duplicates("run_id").sort_values("run_id")
    sides = [names] * len(comparison.lines)
    title = f"{names[0]} and {names[1]}"
    return ComparisonPage(title, facts, sides, comparison, breakdowns, BY_COMMIT, runs, command)


def gate_text(
    result: GateResult,
    breakdowns: Sequence[Breakdown[Series]],
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
    lines = [gated.line for gated in result.lines]
    comparison = result.comparison
    why = [
        *(
            f"regression: {_sentence(gated)}; {_allowed(gated)} is allowed"
            for gated in result.regressions
        ),
        *(f"failed at head: {case}" for case in result.failed),
        *(f"not enough data: {case}" for case in result.missing),
        *(
            f"open: {_sentence(gated)}; it passes, more launches would decide"
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
        *_moved(breakdowns),
        _Section("Why", why, "", is_quoted=True),
        _Section("Accepted", accepted, "accepted: ", is_markup=True),
        _notes(comparison),
    )
    parts = [
        f"## {escaped(headline(result))}" if is_page else headline(result),
        _heads(comparison, how),
        _stop(comparison, how),
        _table(rows, lines, how, view),
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
    if result.word != NOT_DECIDED:
        return text
    num = launches_wanted([gated.line for gated in result.open])
    stopped = result.comparison.stopped
    more = f"--launches {num}" if stopped is None else f"--max-launches {2 * stopped.looks.most}"
    exits = f"exits with {result.exit_code:d}"
    return f"{text}; {exits}; to decide it: --run {more} on a quiet machine"


def _heads(comparison: Comparison, how: Format) -> str:
    lines = [
        f"{word}  {_plain(side.title)}, {_counts(side)}"
        for word, side in (("base", comparison.base), ("head", comparison.head))
    ]
    if len(only := comparison.series()) == 1:
        lines.append(f"case  {_plain(only[0].text)}")
    return _listed(lines, how)


def _listed(lines: Sequence[str], how: Format) -> str:
    return "\n".join(f"- {as_code(line)}" if how is Format.markdown else line for line in lines)


def _stop(compared: Compared[Any], how: Format) -> str:
    """Why no more launches were made; empty if their number was fixed."""
    if compared.stopped is None:
        return ""
    text = stop_text(compared.stopped)
    return escaped(text) if how is Format.markdown else text


def _counts(side: Side) -> str:
    failed = f", {len(side.failed)} failed" if len(side.failed) else ""
    return f"{counted(len(side.runs), 'run')}{failed}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def as_code(text: str) -> str:
    """Foreign text as markdown code: no markup, mention or reference in it takes effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"


def _row(line: Line[Any]) -> dict[str, str]:
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


def _table(
    rows: Sequence[dict[str, str]], lines: Sequence[Line[Any]], how: Format, view: View
) -> str:
    """A table that names each case once, and machines only where there are several.

    A case or machine that is the only one has no column: it is named above the table.
    """
    if not rows:
        return ""
    gate_columns = _GATE_COLUMNS if "gate" in rows[0] else ()
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, *gate_columns, "launches"])
    if view.sort:
        return _sorted_table(frame, lines, how, view)
    hidden = {name for name in ("fingerprint", "case") if len(set(frame[name])) == 1}
    if "fingerprint" not in hidden:
        hidden.discard("case")
    again = frame.duplicated(["case", "fingerprint"])
    frame.loc[again, ["case", "fingerprint"]] = ""
    shown = [str(name) for name in frame if name not in hidden]
    return render(frame, how, shown, view, [*_NAMING, "gate" if gate_columns else "verdict"])


def _sorted_table(frame: pd.DataFrame, lines: Sequence[Line[Any]], how: Format, view: View) -> str:
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


def _moved(breakdowns: Sequence[Breakdown[Series]]) -> list[_Section]:
    has_several = len({breakdown.series.fingerprint for breakdown in breakdowns}) > 1
    return [
        _Section(
            f"What changed in {breakdown.series.text}"
            + (f" on {breakdown.series.fingerprint}" if has_several else ""),
            moved_sentences(breakdown.moved),
        )
        for breakdown in breakdowns
    ]


def _sentence(gated: GatedLine) -> str:
    line = gated.line
    label = field_of(line.metric.name).label
    return f"{line.series.text}: {label} {change_text(line.metric, line.change)}"


def _allowed(gated: GatedLine) -> str:
    return f"{gated.threshold * 100:.3g} {'points' if gated.line.metric.in_points else '%'}"


def note_aside(comparison: Compared[Any], how: Format) -> None:
    """Note what a table in CSV has no place for."""
    if how is Format.csv:
        for text in (_stop(comparison, how), *comparison.notes):
            if text:
                note(f"note: {text}")


def _notes(comparison: Compared[Any]) -> _Section:
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
    comparison: Comparison, breakdowns: Sequence[Breakdown[Series]]
) -> dict[str, object]:
    sides = {
        word: {
            "name": side.name,
            "title": side.title,
            "commit": side.commit,
            "revision": lasting_revision(side),
            "num_runs": len(side.runs),
            "num_failed": len(side.failed),
        }
        for word, side in (("base", comparison.base), ("head", comparison.head))
    }
    return {
        **sides,
        **identity_values(comparison),
        **_looks_values(comparison),
        "changes": _records(comparison.frame),
        "moved": [
            {
                "case_id": breakdown.series.case_id,
                "fingerprint": breakdown.series.fingerprint,
                **_moved_values(part),
            }
            for breakdown in breakdowns
            for part in breakdown.moved
        ],
        "notes": list(comparison.notes),
    }


def _looks_values(compared: Compared[Any]) -> dict[str, object]:
    return {} if compared.stopped is None else {"looks": compared.stopped.as_dict()}


def _moved_values(part: Moved) -> dict[str, object]:
    spans, change = part.of, part.change
    return {
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
