"""A comparison and a ruling as they are printed: for a terminal, a pull request, a program.

People get one line per case and figure, then sentences. Programs get every number under its own
name, and the verdicts in the five words of `analysis.compare`, whatever people read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.analysis.compare import Verdict
from ppbench.format import Format
from ppbench.listing import Field, escaped, render
from ppbench.report.units import counted
from ppbench.tracking.accepted import entry_text
from ppbench.tracking.comparison import Breakdown, Comparison, Line
from ppbench.tracking.gate import NOTHING, WORDS, Judged, Ruling
from ppbench.tracking.sides import SHORT, Side
from ppbench.tracking.values import (
    comparison_rows,
    comparison_values,
    ruling_rows,
    ruling_values,
)
from ppbench.tracking.wording import (
    UNITS,
    change_text,
    figure_text,
    moved_sentences,
    verdict_text,
)

_FIELDS = {
    "case": Field("case", is_number=False),
    "fingerprint": Field("machine", is_number=False),
    "figure": Field("figure", is_number=False),
    "base": Field("base"),
    "head": Field("head"),
    "change": Field("change", is_number=False),
    "verdict": Field("verdict", is_number=False),
    "allowed": Field("allowed"),
    "gate": Field("gate", is_number=False),
    "launches": Field("launches"),
}
_RAW = {
    "p": Field("p, corrected", "{:.2g}".format),
    "floor": Field("floor", lambda value: f"{float(str(value)) * 100:.2f} %"),
    "num_base": Field("launches of base"),
    "num_head": Field("launches of head"),
}


def compared(comparison: Comparison, found: Sequence[Breakdown], how: Format) -> str:
    """What `ppbench compare` prints."""
    if how is Format.json:
        return _as_json(comparison_values(comparison, found))
    if how is Format.csv:
        return render(comparison_rows(comparison.lines), how, [])
    parts = [
        _heads(comparison, how),
        _table([_row(line) for line in comparison.lines], how) or f"nothing to compare: {NOTHING}",
        *(section.text(how) for section in (*_moved(found), _notes(comparison))),
    ]
    return "\n\n".join(part for part in parts if part)


def checked(ruling: Ruling, found: Sequence[Breakdown], how: Format, command: str) -> str:
    """What `ppbench check` prints; `command` makes the same check again."""
    if how is Format.json:
        return _as_json(ruling_values(ruling, found, command))
    if how is Format.csv:
        return render(ruling_rows(ruling), how, [])
    is_page = how is Format.markdown
    rows = [{**_row(one.line), **_gate(one)} for one in ruling.judged]
    sections = (*_moved(found), _reasons(ruling), _accepted(ruling, how), _notes(ruling.comparison))
    parts = [
        f"## {escaped(headline(ruling))}" if is_page else headline(ruling),
        _heads(ruling.comparison, how),
        _table(rows, how),
        *(section.text(how) for section in sections),
        _to_paste(ruling, how),
        *((_again(command), _numbers(ruling)) if is_page else ()),
    ]
    return "\n\n".join(part for part in parts if part)


def headline(ruling: Ruling) -> str:
    """The verdict in one line."""
    num_cases = len({one.line.series for one in ruling.judged})
    told = f"ppbench check: {WORDS[ruling.exit_code]}"
    parts = [
        f"{counted(len(ruling.regressions), 'figure')} worse beyond what is allowed"
        if ruling.regressions
        else "",
        f"{counted(len(ruling.failed), 'case')} failed at head" if ruling.failed else "",
        f"{counted(len(ruling.missing), 'case')} not judged" if ruling.missing else "",
        f"{counted(len(ruling.accepted), 'figure')} worse as accepted" if ruling.accepted else "",
        f"{counted(len(ruling.unclear), 'figure')} unclear, which passes" if ruling.unclear else "",
    ]
    told_parts = "; ".join(part for part in parts if part) or "nothing worse than allowed"
    return f"{told}: {told_parts} ({counted(num_cases, 'case')} compared)"


def _heads(comparison: Comparison, how: Format) -> str:
    lines = [
        f"{word}  {_plain(side.title)}, {_counts(side)}"
        for word, side in (("base", comparison.base), ("head", comparison.head))
    ]
    if len(only := comparison.series()) == 1:
        lines.append(f"case  {_plain(only[0].text)}")
    return "\n".join(f"- {_code(line)}" if how is Format.markdown else line for line in lines)


def _counts(side: Side) -> str:
    failed = f", {len(side.failed)} failed" if len(side.failed) else ""
    return f"{counted(len(side.runs), 'run')}{failed}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    """Text of others in markdown: no markup, no mentions, no references in it take effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"


def _row(line: Line) -> dict[str, str]:
    metric, change = line.metric, line.change
    return {
        "case": line.series.text,
        "fingerprint": line.series.fingerprint,
        "figure": UNITS[metric.name].heading,
        "base": figure_text(metric, change.base),
        "head": figure_text(metric, change.head),
        "change": change_text(metric, change),
        "verdict": verdict_text(metric, change.verdict),
        "launches": f"{change.num_base}, {change.num_head}",
    }


def _gate(one: Judged) -> dict[str, str]:
    if not one.is_gated:
        return {"allowed": "", "gate": "shown"}
    word = "regression" if one.is_regression else "accepted" if one.accepted else "ok"
    if one.line.change.verdict in (Verdict.unclear, Verdict.insufficient):
        word = one.line.change.verdict
    return {"allowed": _allowed(one), "gate": word}


def _table(rows: Sequence[dict[str, str]], how: Format) -> str:
    """A case is named once, or above if it is the only one; machines only if there are several."""
    frame = pd.DataFrame(rows, columns=[name for name in _FIELDS if not rows or name in rows[0]])
    if frame.empty:
        return ""
    hidden = {name for name in ("fingerprint", "case") if len(set(frame[name])) == 1}
    if "fingerprint" not in hidden:
        hidden.discard("case")
    again = frame.duplicated(["case", "fingerprint"])
    frame.loc[again, ["case", "fingerprint"]] = ""
    columns = [str(name) for name in frame if name not in hidden]
    return render(frame, how, columns, _FIELDS)


@dataclass(frozen=True)
class _Section:
    """Sentences; in a terminal each begins with `prefix`, or all stand below the title."""

    title: str
    lines: Sequence[str]
    prefix: str | None = None
    is_markup: bool = False  # in markdown: written as it is
    is_quoted: bool = False  # in markdown: as code, since it holds text of others

    def text(self, how: Format) -> str:
        if not self.lines:
            return ""
        if how is Format.markdown:
            written = _code if self.is_quoted else str if self.is_markup else escaped
            items = "\n".join(f"- {written(line)}" for line in self.lines)
            return f"**{escaped(self.title)}**\n\n{items}"
        if self.prefix is None:
            return "\n".join([f"{self.title}:", *(f"  {line}" for line in self.lines)])
        return "\n".join(f"{self.prefix}{line}" for line in self.lines)


def _moved(found: Sequence[Breakdown]) -> list[_Section]:
    several = len({one.series.fingerprint for one in found}) > 1
    return [
        _Section(
            f"What moved in {one.series.text}"
            + (f" on {one.series.fingerprint}" if several else ""),
            moved_sentences(one),
        )
        for one in found
    ]


def _reasons(ruling: Ruling) -> _Section:
    """All that keeps the gate from passing, and what it could not tell."""
    lines = [
        *(f"regression: {_judged(one)}, allowed is {_allowed(one)}" for one in ruling.regressions),
        *(f"failed at head: {one}" for one in ruling.failed),
        *(f"not enough data: {one}" for one in ruling.missing),
        *(
            f"unclear: {_judged(one)}; it passes, more launches would tell"
            for one in ruling.unclear
        ),
    ]
    return _Section("Why", lines, "", is_quoted=True)


def _accepted(ruling: Ruling, how: Format) -> _Section:
    is_page = how is Format.markdown
    pairs = [(one, one.accepted) for one in ruling.accepted if one.accepted is not None]
    lines = [
        f"{escaped(_judged(one)) if is_page else _judged(one)}, with {entry.commit[:SHORT]}: "
        f"{_code(entry.reason) if is_page else _plain(entry.reason)}"
        for one, entry in pairs
    ]
    return _Section("Accepted", lines, "accepted: ", is_markup=True)


def _judged(one: Judged) -> str:
    line = one.line
    figure = UNITS[line.metric.name].heading
    return f"{line.series.text}: {figure} {change_text(line.metric, line.change)}"


def _allowed(one: Judged) -> str:
    return f"{one.threshold * 100:.3g} {'points' if one.line.metric.in_points else '%'}"


def _notes(comparison: Comparison) -> _Section:
    return _Section("Notes", comparison.notes, "note: ", is_quoted=True)


def _to_paste(ruling: Ruling, how: Format) -> str:
    """For each regression what would accept it."""
    if not ruling.regressions:
        return ""
    head = ruling.comparison.head
    is_dirty = bool(head.runs["is_dirty"].eq(True).any())
    known = None if is_dirty else head.commit
    commit = known[:12] if known else "the commit that it came with"
    entries = "\n\n".join(
        entry_text(commit, one.conditions, one.line.metric.name, one.up_to)
        for one in ruling.regressions
    )
    first = "commit first, then name that commit and " if is_dirty else ""
    told = f"If this is intended, {first}put it into the accept file (see docs/tracking.md):"
    if how is Format.markdown:
        return _details("Is it intended?", f"{told}\n\n```toml\n{entries}\n```")
    return f"{told}\n\n{entries}"


def _again(command: str) -> str:
    return f"**How to reproduce**\n\n```sh\n{command}\n```"


def _numbers(ruling: Ruling) -> str:
    rows = ruling_rows(ruling)
    names = ["case", "metric", "fingerprint", "p", "floor", "num_base", "num_head"]
    return (
        "" if rows.empty else _details("Details", render(rows[names], Format.markdown, names, _RAW))
    )


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _as_json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=2, allow_nan=False)
