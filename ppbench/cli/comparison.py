"""The answer of a comparison: as it is, as a gate judges it, and as newer launches of a saved one.

For people it has one line per case and metric, then sentences. JSON and CSV have every raw figure
under its own name, with the verdicts in the words of `judge.verdicts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from ppbench.analysis.breakdown import DURATION
from ppbench.cli.options import typed_command
from ppbench.commits.gate import NOT_DECIDED, NOTHING, GatedLine, GateResult, entry_text
from ppbench.commits.saved import Recheck, identity_values
from ppbench.comparison.axes import key_of
from ppbench.comparison.lines import COMMIT, Comparison, Contrast, Line, ends, listed
from ppbench.comparison.measurement import MOST_LAUNCHES, stop_text
from ppbench.comparison.sentences import sentences
from ppbench.comparison.sides import SHORT
from ppbench.display.cases import axis_text
from ppbench.display.changes import (
    BY_AXIS,
    BY_COMMIT,
    change_text,
    figure_text,
    moved_sentences,
    ms_text,
    span_name,
    verdict_text,
)
from ppbench.display.commands import LAUNCHES, repeated
from ppbench.display.commands import command as repeatable
from ppbench.display.document import Block, Code, Facts, Fold, Result, Section, Text
from ppbench.display.fields import Field, field_of
from ppbench.display.rows import Rows, Written
from ppbench.display.tables import Table
from ppbench.display.units import MISSING, MS, counted
from ppbench.errors import ExitCode
from ppbench.judge.verdicts import SPEED
from ppbench.report.charts.forest import intervals
from ppbench.report.pages.provenance import COMPARISON, about_runs, environments
from ppbench.report.pages.templates import page

_COLUMNS = ("case", "fingerprint", "figure", "base", "head", "change_text", "verdict")
_FOR_PEOPLE = ("figure", "change_text", "launches", "allowed", "gate", "stated")
_LABELS = {"stated": Field("stated"), "outcome": Field("outcome")}
_DETAILS = ["case", "metric", "fingerprint", "p", "resolution", "within", "num_base", "num_head"]
_SPANS = {
    "spans": Field("spans"),
    "op": Field("op"),
    "base": Field("base", "", MS),
    "head": Field("head", "", MS),
    "change_text": Field("change", is_number=True),
    "per_step": Field("per step", "", MS),
}
_ABOUT_SPANS = (
    "Median times of single actions, launch by launch: only differences that are significant and "
    "at least 0.5 % of a step. The last column adds up what they make of a rank's time in a step."
)
_MOST_NAMED = 3
Values = Mapping[str, object]
Judged = tuple[Line, Values, Values]
"""A line, its raw figures, and further cells that people see."""


def compared(comparison: Comparison) -> Result:
    """The answer of `ppbench compare`, of two sides or of cases along a setting."""
    why = NOTHING
    if comparison.contrasts:
        why = "no run of a pair has these figures"
    elif comparison.axis != COMMIT:
        why = f"no two cases differ in {key_of(comparison.axis)} alone"
    judged: list[Judged] = [(line, comparison.values_of(line), {}) for line in comparison.lines]
    rows, table = _table(comparison, judged)
    answer = [
        Text(line, kind="" if at else "lead") for at, line in enumerate(sentences(comparison))
    ]
    blocks: list[Block] = [
        Facts(_facts(comparison), is_foreign=True),
        Section("answer", "", [*answer, *_stop(comparison, typed_command())]),
        *_intervals(comparison),
        Section("figures", "Figures", [table]) if judged else Text(f"nothing to compare: {why}"),
        *_moved(comparison),
        *_notes(comparison),
    ]
    is_answered = comparison.has_verdict and not comparison.is_open
    return Result(
        blocks,
        rows,
        _values(comparison, comparison.series()),
        ExitCode.ok if is_answered else ExitCode.insufficient,
        key="changes",
        notes=_asides(comparison, typed_command()),
    )


def page_of(comparison: Comparison, answer: Result, command: str) -> str:
    """Return the page of `ppbench compare`: its answer, and on what the runs were measured.

    `command` compares the same launches again.
    """
    title = f"{comparison.base.name} and {comparison.head.name}"
    if comparison.axis != COMMIT:
        values = ", ".join(axis_text(comparison.axis, one) for one in comparison.axis_values)
        title = f"Along {key_of(comparison.axis)}: {values}"
    stores = {side.store.folder: side.store for side in (comparison.base, comparison.head)}
    tables = [store.table("runs", comparison.run_ids) for store in stores.values()]
    runs = pd.concat(tables).drop_duplicates("run_id").sort_values("run_id")
    origin: list[Block] = [Fold("Environment", environments(runs)), Code(command, language="sh")]
    last = Section("reproduce", "Environment and reproduction", origin)
    whole = replace(answer, blocks=[*answer.blocks, last])
    return page(whole, about_runs(COMPARISON, title, runs))


def gated(result: GateResult, command: str) -> Result:
    """The answer of `ppbench check`; `command` repeats the check."""
    comparison, judged = result.comparison, list[Judged]()
    for one in result.lines:
        word = "regression" if one.is_regression else "accepted" if one.accepted else "ok"
        if not one.line.change.is_decided:
            word = one.line.change.verdict
        more = {"allowed": _allowed(one), "gate": word}
        values = {**one.values(), **comparison.values_of(one.line)}
        judged.append((one.line, values, more if one.is_gated else {"gate": "not gated"}))
    why = [
        *(f"regression: {_changed(g)}; {_allowed(g)} is allowed" for g in result.regressions),
        *(f"failed at head: {case}" for case in result.failed),
        *(f"not enough data: {case}" for case in result.missing),
        *(
            f"open: {_changed(one)}{'; it passes' * (result.exit_code == ExitCode.ok)}"
            for one in result.open
        ),
    ]
    accepted = [
        f"{_changed(one)}, with {entry.commit[:SHORT]}: {' '.join(entry.reason.split())}"
        for one in result.accepted
        if (entry := one.accepted) is not None
    ]
    rows, table = _table(comparison, judged, ("allowed", "gate"))
    blocks: list[Block] = [
        Text(headline(result), kind="lead"),
        *_to_decide(result, command),
        Facts(_facts(comparison), is_foreign=True),
        *_stop(comparison, command),
        *_intervals(comparison),
        *([table] if judged else []),
        *_moved(comparison),
        *_section("Why", why, ""),
        *_section("Accepted", accepted, "accepted: "),
        *_notes(comparison),
        *_to_paste(result),
        Fold("How to reproduce", [Code(command, language="sh")]),
    ]
    if judged:
        blocks.append(Fold("Details", [Table(rows, _DETAILS)]))
    data = {
        "verdict": result.word,
        "exit_code": result.exit_code,
        **_values(comparison, comparison.changed()),
        "failed": list(result.failed),
        "missing": list(result.missing),
        "command": command,
    }
    notes = _asides(comparison, command)
    return Result(blocks, rows, data, result.exit_code, key="changes", notes=notes)


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


def rechecked(recheck: Recheck) -> Result:
    """The answer of `ppbench check COMPARISON.json`: what new launches say of stated changes."""
    comparison, judged, told = recheck.comparison, list[Judged](), []
    for each in recheck.judged:
        now, metric, was = "not measured again", each.metric, each.change
        stated = change_text(metric, was)
        if each.again is not None:
            more = {"stated": stated, "outcome": str(each.outcome)}
            judged.append((each.again, {}, more))
            change = each.again.change
            now = f"{verdict_text(metric, change.verdict)}, {change_text(metric, change)}"
        if each.outcome is recheck.outcome:
            of = f"{field_of(metric.name).label} of {each.case}"
            verdict = verdict_text(metric, was.verdict)
            told.append(f"{of}: {now}; stated: {verdict}, {stated}")
    said = listed(told, _MOST_NAMED)
    _, table = _table(comparison, judged, ("stated", "outcome"))
    blocks: list[Block] = [
        Text(f"{recheck.outcome}: {said}", kind="lead"),
        *([table] if judged else []),
        *_notes(comparison),
    ]
    notes = list(comparison.notes)
    data = {"outcome": str(recheck.outcome), "exit_code": recheck.exit_code, "notes": notes}
    rows = Rows.of(recheck.frame)
    return Result(blocks, rows, data, recheck.exit_code, key="changes", notes=notes)


def _to_decide(result: GateResult, command: str) -> Iterator[Block]:
    """The check that measures more where this one is not decided."""
    comparison = result.comparison
    is_known = result.source is not None and not comparison.head.origins
    if result.word == NOT_DECIDED and comparison.stopped is None and is_known:
        again = repeated(command, {LAUNCHES: str(MOST_LAUNCHES)}, ["--run"])
        yield Code(again, "to decide it, on a quiet machine")


def _facts(compared: Comparison) -> dict[str, str]:
    """Return what is compared and how many runs of it, by its name."""
    axis = compared.axis
    if axis == COMMIT:
        facts = dict[str, str]()
        for word, side in (("base", compared.base), ("head", compared.head)):
            failed = f", {len(side.failed)} failed" if len(side.failed) else ""
            facts[word] = f"{side.title}, {counted(len(side.runs), 'run')}{failed}"
        only = compared.series()
        return {**facts, "case": only[0].text} if len(only) == 1 else facts
    values = ", ".join(
        f"{axis_text(axis, value)}{' (base)' if value == compared.base_value else ''}"
        for value in compared.axis_values
    )
    changes = [line.change for line in compared.lines]
    nums = {num for change in changes for num in (change.num_base, change.num_head)}
    each = f", {counted(min(nums), 'launch')} of each case" if len(nums) == 1 else ""
    facts = {"across": f"{key_of(axis)}: {values}", "runs": f"{compared.base.title}{each}"}
    return {**facts, "all": compared.shared} if compared.shared else facts


def _intervals(comparison: Comparison) -> Iterator[Block]:
    lines, series = comparison.lines, comparison.series()
    metrics = list(dict.fromkeys(line.metric for line in lines))
    changes = {(line.series, line.metric): line.change for line in lines}
    has_machines = len({one.fingerprint for one in series}) > 1
    rows = {
        f"{one.text} {one.fingerprint}" if has_machines else one.text: [
            changes.get((one, metric)) for metric in metrics
        ]
        for one in series
    }
    if rows:
        caption = "Change from base to head with its 95\u00a0% interval."
        yield Section("intervals", "Intervals", [intervals(metrics, rows, caption)], of_page=True)


def _stop(comparison: Comparison, command: str) -> Iterator[Block]:
    """Why no more launches were made, and how to go on; nothing if their number was fixed."""
    if (stopped := comparison.stopped) is not None:
        yield Text(stop_text(stopped))
        if stopped.to_decide and (again := repeated(command, stopped.to_decide)):
            yield Code(again, "go on with")


def _asides(comparison: Comparison, command: str) -> list[str]:
    """Return what a table in CSV has no place for."""
    return [*(one.terminal() for one in _stop(comparison, command)), *comparison.notes]


def _table(
    comparison: Comparison, judged: Sequence[Judged], extra: Sequence[str] = ()
) -> tuple[Rows, Table]:
    """The lines with their raw figures, and the table in which people see them.

    It names each contrast once, and what all have alike not at all. Along a setting the parts of a
    name are one below the other, to stay narrow, and a single pair of values heads its two columns.
    A case that is the only one is named above the table.
    """
    lines, axis = [line for line, *_ in judged], comparison.axis
    is_commit = axis == COMMIT
    records = []
    for line, values, more in judged:
        metric, change = line.metric, line.change
        discounts = [one.values() for one in line.discounted]
        also = f" ({len(discounts)} discounted)" if discounts else ""
        tested = change.difference if metric.in_points else change.ratio
        by = None if tested is None else tested.estimate - (0 if metric.in_points else 1)
        counts = f"{change.num_base}, {change.num_head}{also}"
        records.append(
            {
                **values,
                "base": Written(change.base, figure_text(metric, change.base)),
                "head": Written(change.head, figure_text(metric, change.head)),
                "verdict": Written(change.verdict.value, verdict_text(metric, change.verdict)),
                "discounts": discounts,
                "case": Written(
                    ", ".join(line.series.common),
                    line.series.text if is_commit else "\n".join(line.series.parts),
                ),
                "fingerprint": line.series.fingerprint,
                "figure": field_of(metric.name).heading,
                "change_text": Written(by, change_text(metric, change)),
                "launches": Written(change.num_base, counts),
                **dict.fromkeys(extra, ""),
                **more,
            }
        )
    rows = Rows.of_records(records, _FOR_PEOPLE)
    series = list(dict.fromkeys(line.series for line in lines))
    hidden = set()
    if len({line.series.fingerprint for line in lines}) == 1:
        hidden.add("fingerprint")
    if not is_commit and len({str(record["launches"]) for record in records}) == 1:
        hidden.add("launches")
    if len(series) == 1 and (is_commit or not series[0].common):
        hidden.add("case")
    columns = [*_COLUMNS, *extra, "launches"]
    shown = {name: _LABELS.get(name) or field_of(name) for name in columns if name not in hidden}
    pairs = {(line.series.base_value, line.series.head_value) for line in lines}
    if not is_commit and len(pairs) == 1:
        for name, value in zip(("base", "head"), *pairs, strict=True):
            shown[name] = Field(axis_text(axis, value), is_number=True)
    essential = ["case", "figure", "change_text", extra[-1] if extra else "verdict"]
    return rows, Table(rows, shown, essential, grouped="case")


def _section(title: str, lines: Sequence[str], prefix: str | None = None) -> Iterator[Block]:
    """Sentences as a list; those with a prefix in a terminal hold what others wrote."""
    if lines:
        yield Text(lines, title, prefix, is_foreign=prefix is not None)


def _moved(comparison: Comparison) -> Iterator[Block]:
    """Say what moved in each contrast that changed, and which command draws both of its sides."""
    breakdowns = comparison.break_down(comparison.changed())
    has_several = len({breakdown.series.fingerprint for breakdown in breakdowns}) > 1
    is_commit, blocks = comparison.axis == COMMIT, list[Block]()
    for part in breakdowns:
        on = f" on {part.series.fingerprint}" if has_several else ""
        title = f"What changed in {part.series.text}{on}"
        if not is_commit:
            title = ", ".join(["What changed", part.series.pair, *part.series.common])
        ids = []  # the launch of each side whose throughput is the median, or next to it
        for runs in (part.series.base, part.series.head):
            known = runs.dropna(subset=[SPEED]).sort_values([SPEED, "run_id"])
            ids += [str(run_id) for run_id in known["run_id"].iloc[(len(known) - 1) // 2 :][:1]]
        rows = [
            {
                "spans": span_name(moved),
                "op": moved.of.op or MISSING,
                "base": Written(moved.change.base, ms_text(moved.change.base)),
                "head": Written(moved.change.head, ms_text(moved.change.head)),
                "change_text": Written(
                    moved.change.ratio and moved.change.ratio.estimate - 1,
                    change_text(DURATION, moved.change),
                ),
                "per_step": Written(moved.contribution_ns, f"{moved.contribution_ns / 1e6:+z,.2f}"),
            }
            for moved in part.moved
            if moved.has_moved
        ]
        drawn = list[Block]()
        if ids:
            line = repeatable("timeline", *ids, results=comparison.base.store.folder)
            drawn.append(Code(line, "both timelines on one axis"))
        if rows:
            spans = Fold(
                f"{counted(len(rows), 'kind')} of spans",
                [
                    Text(_ABOUT_SPANS, kind="note"),
                    Table(Rows.of_records(rows), _SPANS, name=title),
                    *drawn,
                ],
            )
            drawn = [spans]
        why = BY_COMMIT if is_commit else BY_AXIS
        blocks += _section(title, moved_sentences(part.moved, why))
        blocks += [Section("", "", drawn, of_page=True)] if drawn else []
    if blocks:
        yield Section("moved", "What moved", blocks)


def _notes(comparison: Comparison) -> Iterator[Block]:
    yield from _section("Notes", comparison.notes, "note: ")


def _changed(one: GatedLine) -> str:
    line = one.line
    label = field_of(line.metric.name).label
    return f"{line.series.text}: {label} {change_text(line.metric, line.change)}"


def _allowed(one: GatedLine) -> str:
    return f"{one.threshold * 100:.3g} {'points' if one.line.metric.in_points else '%'}"


def _to_paste(result: GateResult) -> Iterator[Block]:
    """The entries that would accept the regressions; an attached training has no sweep file."""
    head = result.comparison.head
    if not result.regressions or head.origins:
        return
    is_dirty = bool(head.runs["is_dirty"].eq(True).any())
    known = None if is_dirty else head.commit
    commit = known[:12] if known else "the commit that it came with"
    entries = "\n\n".join(
        entry_text(commit, one.conditions, one.line.metric.name, one.up_to)
        for one in result.regressions
    )
    first = "commit first, then name that commit and " if is_dirty else ""
    guide = "docs/reference/commits.md"
    advice = f"If this is intended, {first}put it into the sweep file (see {guide})"
    yield Fold("Is it intended?", [Code(entries, advice, "toml")], is_in_terminal=True)


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
        "moved": moved,
        "notes": list(comparison.notes),
    }
