"""The text of a comparison and of the gate's result, as `ppbench compare` and `check` print them.

In a terminal and in markdown: one line per case and metric, then sentences. In JSON and CSV: every
raw figure under its own name, with the verdicts in the five words of `statistics.verdicts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.analysis.breakdown import DURATION, Kind, Moved
from ppbench.commits.comparison import Breakdown, Comparison, Line, ends
from ppbench.commits.gate import NOTHING, WORDS, GatedLine, GateResult, entry_text
from ppbench.commits.sides import SHORT, Side
from ppbench.console import note
from ppbench.display.fields import field_of
from ppbench.display.formats import Format
from ppbench.display.tables import as_records, escaped, render
from ppbench.display.units import MISSING, MS, TOKENS_PER_S, counted
from ppbench.statistics.significance import Ratio
from ppbench.statistics.verdicts import Change, Metric, Verdict

_COLUMNS = ("case", "fingerprint", "figure", "base", "head", "change_text", "verdict")
_GATE_COLUMNS = ("allowed", "gate")
_DETAILS = ["case", "metric", "fingerprint", "p", "floor", "num_base", "num_head"]
_PER = {
    Kind.compute: "per microbatch",
    Kind.optimizer: "per step",
    Kind.transfer: "per message",
    Kind.waiting: "per step",
}
_MOST_NAMED = 6


def comparison_text(comparison: Comparison, breakdowns: Sequence[Breakdown], how: Format) -> str:
    """The output of `ppbench compare`."""
    if how is Format.json:
        return _as_json(_comparison_values(comparison, breakdowns))
    if how is Format.csv:
        return render(comparison.frame, how, [])
    parts = [
        _heads(comparison, how),
        _table([_row(line) for line in comparison.lines], how) or f"nothing to compare: {NOTHING}",
        *(section.text(how) for section in (*_moved(breakdowns), _notes(comparison))),
    ]
    return "\n\n".join(part for part in parts if part)


def gate_text(
    result: GateResult, breakdowns: Sequence[Breakdown], how: Format, command: str
) -> str:
    """The output of `ppbench check`; `command` repeats the check."""
    if how is Format.json:
        return _as_json(_gate_values(result, breakdowns, command))
    if how is Format.csv:
        return render(result.frame, how, [])
    is_page = how is Format.markdown
    rows = [{**_row(gated.line), **_gate_cells(gated)} for gated in result.lines]
    comparison = result.comparison
    sections = (*_moved(breakdowns), _reasons(result), _accepted(result, how), _notes(comparison))
    parts = [
        f"## {escaped(headline(result))}" if is_page else headline(result),
        _heads(comparison, how),
        _table(rows, how),
        *(section.text(how) for section in sections),
        _to_paste(result, how),
        *((_again(command), _details_of(result)) if is_page else ()),
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
        f"{counted(len(result.unclear), 'metric')} unclear, which passes" if result.unclear else "",
    ]
    reasons = "; ".join(part for part in parts if part) or "nothing worse than allowed"
    compared = f"({counted(num_cases, 'case')} compared)"
    return f"ppbench check: {WORDS[result.exit_code]}: {reasons} {compared}"


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
    """Foreign text as markdown code: no markup, mention or reference in it takes effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"


def _row(line: Line) -> dict[str, str]:
    metric, change = line.metric, line.change
    return {
        "case": line.series.text,
        "fingerprint": line.series.fingerprint,
        "figure": field_of(metric.name).heading,
        "base": figure_text(metric, change.base),
        "head": figure_text(metric, change.head),
        "change_text": change_text(metric, change),
        "verdict": verdict_text(metric, change.verdict),
        "launches": f"{change.num_base}, {change.num_head}",
    }


def _gate_cells(gated: GatedLine) -> dict[str, str]:
    if not gated.is_gated:
        return {"allowed": "", "gate": "shown"}
    word = "regression" if gated.is_regression else "accepted" if gated.accepted else "ok"
    if gated.line.change.verdict in (Verdict.unclear, Verdict.insufficient):
        word = gated.line.change.verdict
    return {"allowed": _allowed(gated), "gate": word}


def _table(rows: Sequence[dict[str, str]], how: Format) -> str:
    """A table that names each case once, and machines only where there are several.

    A case or machine that is the only one has no column: it is named above the table.
    """
    if not rows:
        return ""
    gate_columns = _GATE_COLUMNS if "gate" in rows[0] else ()
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, *gate_columns, "launches"])
    hidden = {name for name in ("fingerprint", "case") if len(set(frame[name])) == 1}
    if "fingerprint" not in hidden:
        hidden.discard("case")
    again = frame.duplicated(["case", "fingerprint"])
    frame.loc[again, ["case", "fingerprint"]] = ""
    return render(frame, how, [str(name) for name in frame if name not in hidden])


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
            written = _code if self.is_quoted else str if self.is_markup else escaped
            items = "\n".join(f"- {written(line)}" for line in self.lines)
            return f"**{escaped(self.title)}**\n\n{items}"
        if self.prefix is None:
            return "\n".join([f"{self.title}:", *(f"  {line}" for line in self.lines)])
        return "\n".join(f"{self.prefix}{line}" for line in self.lines)


def _moved(breakdowns: Sequence[Breakdown]) -> list[_Section]:
    has_several = len({breakdown.series.fingerprint for breakdown in breakdowns}) > 1
    return [
        _Section(
            f"What changed in {breakdown.series.text}"
            + (f" on {breakdown.series.fingerprint}" if has_several else ""),
            moved_sentences(breakdown),
        )
        for breakdown in breakdowns
    ]


def _reasons(result: GateResult) -> _Section:
    """All that keeps the gate from passing, and what remained unclear."""
    lines = [
        *(
            f"regression: {_sentence(gated)}; {_allowed(gated)} is allowed"
            for gated in result.regressions
        ),
        *(f"failed at head: {case}" for case in result.failed),
        *(f"not enough data: {case}" for case in result.missing),
        *(
            f"unclear: {_sentence(gated)}; it passes, more launches would decide"
            for gated in result.unclear
        ),
    ]
    return _Section("Why", lines, "", is_quoted=True)


def _accepted(result: GateResult, how: Format) -> _Section:
    is_page = how is Format.markdown
    pairs = [(gated, gated.accepted) for gated in result.accepted if gated.accepted is not None]
    lines = [
        f"{escaped(_sentence(gated)) if is_page else _sentence(gated)}, "
        f"with {entry.commit[:SHORT]}: {_code(entry.reason) if is_page else _plain(entry.reason)}"
        for gated, entry in pairs
    ]
    return _Section("Accepted", lines, "accepted: ", is_markup=True)


def _sentence(gated: GatedLine) -> str:
    line = gated.line
    label = field_of(line.metric.name).label
    return f"{line.series.text}: {label} {change_text(line.metric, line.change)}"


def _allowed(gated: GatedLine) -> str:
    return f"{gated.threshold * 100:.3g} {'points' if gated.line.metric.in_points else '%'}"


def note_aside(comparison: Comparison, how: Format) -> None:
    """Note what a table in CSV has no place for."""
    if how is Format.csv:
        for text in comparison.notes:
            note(f"note: {text}")


def _notes(comparison: Comparison) -> _Section:
    return _Section("Notes", comparison.notes, "note: ", is_quoted=True)


def _to_paste(result: GateResult, how: Format) -> str:
    """The entries that would accept the regressions."""
    if not result.regressions:
        return ""
    head = result.comparison.head
    is_dirty = bool(head.runs["is_dirty"].eq(True).any())
    known = None if is_dirty else head.commit
    commit = known[:12] if known else "the commit that it came with"
    entries = "\n\n".join(
        entry_text(commit, gated.conditions, gated.line.metric.name, gated.up_to)
        for gated in result.regressions
    )
    first = "commit first, then name that commit and " if is_dirty else ""
    advice = f"If this is intended, {first}put it into the accept file (see docs/tracking.md):"
    if how is Format.markdown:
        return _details("Is it intended?", f"{advice}\n\n```toml\n{entries}\n```")
    return f"{advice}\n\n{entries}"


def _again(command: str) -> str:
    return f"**How to reproduce**\n\n```sh\n{command}\n```"


def _details_of(result: GateResult) -> str:
    if result.frame.empty:
        return ""
    return _details("Details", render(result.frame, Format.markdown, _DETAILS))


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


_SPEEDS = (TOKENS_PER_S, MS)  # units of figures that are faster or slower
_AMOUNTS = {Verdict.faster: "less", Verdict.slower: "more"}


def figure_text(metric: Metric, value: float | None) -> str:
    return MISSING if value is None else field_of(metric.name).cell(value)


def verdict_text(metric: Metric, verdict: Verdict) -> str:
    """Return the verdict in words that fit the metric: a bubble is `more`, not `slower`."""
    is_speed = field_of(metric.name).unit in _SPEEDS
    return verdict if is_speed else _AMOUNTS.get(verdict, verdict)


def change_text(metric: Metric, change: Change) -> str:
    """`-7.7 % [-8.1, -7.2]`; without an interval where the change was not tested."""
    if metric.in_points and change.difference is not None:
        return _with_interval(change.difference, " points", lambda value: value)
    if change.ratio is not None and not metric.in_points:
        return _with_interval(change.ratio, " %", lambda value: value - 1)
    if change.base is None or change.head is None:
        return "–"
    if metric.in_points:
        return f"{_signed(change.head - change.base)} points"
    return f"{_signed(change.head / change.base - 1)} %" if change.base else "–"


def _with_interval(ratio: Ratio, unit: str, less: Callable[[float], float]) -> str:
    estimate, low, high = (_signed(less(end)) for end in (ratio.estimate, ratio.low, ratio.high))
    return f"{estimate}{unit} [{low}, {high}]"


def _signed(fraction: float) -> str:
    return f"{fraction * 100:+z.1f}"


def moved_sentences(breakdown: Breakdown) -> list[str]:
    """Sentences on the spans that moved: causes by their share of a step, then idle time."""
    moved = [part for part in breakdown.moved if part.has_moved]
    causes = [part for part in moved if part.of.kind is not Kind.waiting]
    waits = [part for part in moved if part.of.kind is Kind.waiting]
    if not any(part.is_tested for part in breakdown.moved):
        return _untested(breakdown.moved)
    sentences = [_cause_sentence(group) for group in _by_place(causes)]
    if not causes:
        sentences = ["no compute, optimizer or transfer time changed significantly"]
    return sentences + ([_waiting_sentence(waits, has_causes=bool(causes))] if waits else [])


def _untested(moved: Sequence[Moved]) -> list[str]:
    causes = [part for part in moved if part.of.kind is not Kind.waiting]
    groups = _by_place(causes[:_MOST_NAMED])
    first = "not tested, which takes 3 launches per side; the largest differences:"
    return [first, *(_cause_sentence(group, "differs") for group in groups)]


def _by_place(causes: Sequence[Moved]) -> list[list[Moved]]:
    """Group the ops of a stage, and sort the groups by their contribution."""
    groups: dict[tuple[Kind, int, int], list[Moved]] = {}
    for part in causes:
        groups.setdefault((part.of.kind, part.of.place, part.of.target), []).append(part)
    return sorted(
        groups.values(), key=lambda group: -abs(sum(part.contribution_ns for part in group))
    )


def _cause_sentence(group: Sequence[Moved], verb: str = "changed") -> str:
    """`compute of stage 2 changed: F 20.1 -> 21.7 ms per microbatch, +8.0 % [+7.8, +8.2]; ...`."""
    total_ms = sum(part.contribution_ns for part in group) / 1e6
    parts = [_times(part, is_first=index == 0) for index, part in enumerate(group)]
    whole = f"{total_ms:+z,.2f} ms of its rank's time per step"
    return f"{_name(group[0])} {verb}: {'; '.join(parts)}; in total {whole}"


def _name(part: Moved) -> str:
    match part.of.kind:
        case Kind.compute:
            return f"compute of stage {part.of.place}"
        case Kind.optimizer:
            return f"optimizer of rank {part.of.place}"
        case Kind.transfer:
            return f"transfer from stage {part.of.place} to {part.of.target}"
        case Kind.waiting:
            return f"waiting of rank {part.of.place}"


def _times(part: Moved, *, is_first: bool) -> str:
    change, op = part.change, f"{part.of.op} " if part.of.op else ""
    per = f" {_PER[part.of.kind]}" if is_first else ""
    times = f"{op}{_ms(change.base)} -> {_ms(change.head)} ms{per}"
    return f"{times}, {change_text(DURATION, change)}"


def _ms(duration_ns: float | None) -> str:
    """Milliseconds with three digits, or all those before the point."""
    if duration_ns is None:
        return "–"
    ms = duration_ns / 1e6
    return f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}"


def _waiting_sentence(waits: Sequence[Moved], *, has_causes: bool) -> str:
    ordered = sorted(waits, key=lambda part: part.of.place)
    times = (
        f"rank {part.of.place} {_ms(part.change.base)} -> {_ms(part.change.head)}"
        for part in ordered
    )
    idle = f"idle ms per step: {', '.join(itertools.islice(times, _MOST_NAMED))}"
    if len(waits) > _MOST_NAMED:
        idle += f" and {len(waits) - _MOST_NAMED} more"
    if has_causes:
        return f"idle time changed as a consequence; {idle}"
    return f"only idle time changed, so the order of actions or the host between them did; {idle}"


def _as_json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=2, allow_nan=False)


def _comparison_values(
    comparison: Comparison, breakdowns: Sequence[Breakdown]
) -> dict[str, object]:
    return {
        "base": _side_values(comparison.base),
        "head": _side_values(comparison.head),
        "changes": as_records(comparison.frame),
        "moved": [
            _moved_values(breakdown, part) for breakdown in breakdowns for part in breakdown.moved
        ],
        "notes": list(comparison.notes),
    }


def _gate_values(
    result: GateResult, breakdowns: Sequence[Breakdown], command: str
) -> dict[str, object]:
    return {
        "verdict": WORDS[result.exit_code],
        "exit_code": result.exit_code,
        **_comparison_values(result.comparison, breakdowns),
        "changes": as_records(result.frame),
        "failed": list(result.failed),
        "missing": list(result.missing),
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


def _moved_values(breakdown: Breakdown, part: Moved) -> dict[str, object]:
    spans, change = part.of, part.change
    return {
        "case_id": breakdown.series.case_id,
        "fingerprint": breakdown.series.fingerprint,
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
