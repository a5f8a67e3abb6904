"""The tables and lists of a report: runs, causes of idle time, failures, cautions, filters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from markupsafe import Markup
from pandas.api.types import is_bool, is_number

from ppbench.cautions import Caution
from ppbench.config.case import UNKNOWN
from ppbench.config.kinds import VARIABLE
from ppbench.display.cases import INTERVAL, Axes, Row, case_text, cautions_of
from ppbench.display.document import Block, Fold
from ppbench.display.explanation import OF_REPLICAS, PART_NAMES, with_parts
from ppbench.display.fields import Field, field_of
from ppbench.display.replicas import MOST_ROWS
from ppbench.display.rows import Rows, Written
from ppbench.display.tables import Detail, Table
from ppbench.display.units import MISSING, counted, held_share, is_missing
from ppbench.errors import first_line, shortened
from ppbench.report.timeline.timelines import failed_replica
from ppbench.run.failures.post_mortem import in_words
from ppbench.store import Store

NOT_GIVEN = "none"
_DIGITS = re.compile(r"[0-9]+")
_SHORT = 40  # characters of a value in a filter; hovering shows it in full
_SUMMARY = (
    "tokens_per_s",
    "step_ns",
    "planned_step_ns",
    "bubble_fraction",
    "bubble_fraction_theory",
    "peak_memory_bytes",
    "held",
    "mfu",
    "energy_per_token_j",
    "last_loss",
)
_BUBBLES = (
    "bubble_fraction",
    "bubble_idle_over_ideal",
    "bubble_max_stage_span",
    "bubble_fraction_theory",
)
_PARTS = (
    "bubble_mean",
    *(f"bubble_{part}" for part in PART_NAMES),
    "mean_step_ns",
    "modelled_step_ns",
    "model_residual",
)


def summary(runs: pd.DataFrame, axes: Axes, details: Mapping[str, Detail]) -> Table:
    """Return a row per run: its varying settings, and the figures that any run has.

    `details` are what the page opens below a run, by its id.
    """
    rows = runs.to_dict("records")
    figures = [name for name in _SUMMARY if any(_value(run, name) != _NONE for run in rows)]
    if figures[:1] == ["tokens_per_s"] and any(str(_value(run, "interval")) for run in rows):
        figures.insert(1, "interval")
    table = _table("Runs", ["status", *figures, "cautions"], runs, axes)
    shown = [details.get(str(run)) for run in runs["run_id"]] if details else []
    return replace(table, details=shown)


def bubbles(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the three definitions of the bubble side by side."""
    return _table("Definitions of the bubble", _BUBBLES, runs, axes)


def idle_parts(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the causes of idle time of the runs that store them, and the modelled step."""
    explained = runs[with_parts(runs)]
    mean_ns = explained["modelled_step_ns"] * (1 + explained["model_residual"])
    none = {f"bubble_{part}" for part in OF_REPLICAS} - set(explained.dropna(axis=1, how="all"))
    names = [name for name in _PARTS if name not in none]
    return _table("Why ranks were idle", names, explained.assign(mean_step_ns=mean_ns), axes)


def _table(name: str, columns: Sequence[str], runs: pd.DataFrame, axes: Axes) -> Table:
    """Return a row per run: its varying settings, its launch if it has several, these columns."""
    fields = {}
    for axis in axes:
        has_numbers = all(place_of(value) is not None for value in runs[axis])
        fields[axis] = replace(field_of(axis), is_number=has_numbers)
    names = [*(["launch"] if len(runs["launch"].unique()) > 1 else []), *columns]
    fields |= {column: _INTERVAL if column == "interval" else field_of(column) for column in names}
    rows = [
        {axis: Written(place_of(run[axis]), str(run[axis])) for axis in axes}
        | {column: _value(run, column) for column in names}
        for run in runs.to_dict("records")
    ]
    cases = [str(case) for case in runs["case_id"]]
    return Table(Rows.of_records(rows), fields, name=name, cases=cases)


def cautioned(runs: pd.DataFrame, axes: Axes) -> list[dict[str, object]]:
    """Return the `name` of every caution that a run carries, in order of severity.

    With it are its `remedy`, and the id and the name of each of the `cases` that carry it.
    """
    carriers: dict[str, dict[tuple[str, str], None]] = {}
    for run in runs[runs["cautions"].fillna("").ne("")].to_dict("records"):
        for name in cautions_of(run):
            case = str(run["case_id"]), case_text(run, axes)
            carriers.setdefault(name, {})[case] = None
    remedies = {caution.name: caution.remedy for caution in Caution}
    unknown = "Unknown to this version of ppbench; a newer version wrote it."
    return [
        {"name": name, "remedy": remedies.get(name, unknown), "cases": list(carriers[name])}
        for name in dict.fromkeys([*remedies, *carriers])
        if name in carriers
    ]


_NONE = Written(None, MISSING)
_INTERVAL = Field("95 %", meaning="interval of the median over the run's own steps", is_number=True)


def _value(run: Row, column: str) -> object:
    """What a cell of the column shows of a run."""
    if column == "interval":
        ends = [run.get(end) for end in INTERVAL]
        texts = (field_of(name).cell(end) for name, end in zip(INTERVAL, ends, strict=True))
        return Written(None, "") if is_missing(ends[0]) else Written(ends[0], " to ".join(texts))
    if column == "cautions":
        return ", ".join(cautions_of(run))
    value = held_share(run) if column == "held" else run.get(column)
    return _NONE if is_missing(value) else value


def value_text(value: object) -> str:
    """Format a setting's value without the name of its axis."""
    if is_bool(value):
        return "yes" if value else "no"
    text = str(value)
    return NOT_GIVEN if text in ("[]", "None", "nan") else text


def filters(runs: pd.DataFrame, axes: Axes) -> list[dict[str, Any]]:
    """Return the `axis`, the `heading` and the `choices` of a filter per varying axis.

    A choice is a value as `text`, as `shown`, and its `num_cases`. Numbers are sorted, words are in
    the order of the runs.
    """
    cases, found = runs.drop_duplicates("case_id"), []
    for axis in axes:
        distinct = list(dict.fromkeys(cases[axis]))
        if all(place_of(value) is not None for value in distinct):
            distinct.sort(key=lambda value: place_of(value) or 0.0)
        counts = cases[axis].map(value_text).value_counts()
        texts = dict.fromkeys(value_text(value) for value in distinct)
        choices = [
            {"text": text, "shown": shortened(text, _SHORT), "num_cases": int(counts[text])}
            for text in texts
        ]
        found.append({"axis": axis, "heading": field_of(axis).heading, "choices": choices})
    return found


def case_list(runs: pd.DataFrame, axes: Axes) -> list[Mapping[str, object]]:
    """Return every case with the text of its value on each axis, for the page's script."""
    cases = runs.drop_duplicates("case_id")
    return [
        {"case_id": str(case["case_id"]), "axes": {axis: value_text(case[axis]) for axis in axes}}
        for case in cases[["case_id", *axes]].to_dict("records")
    ]


def place_of(value: object) -> float | None:
    """Return the number that a setting sorts by, 0 if it varies; None for words."""
    if value in (VARIABLE, UNKNOWN):
        return 0.0
    return float(str(value)) if is_number(value) and not is_bool(value) else None


@dataclass(frozen=True)
class Failure:
    """A failed run: its headline and its full error."""

    run_id: str
    case_id: str
    case: str
    status: str
    rank: str  # `rank 1`; empty if it is unknown or in the headline
    headline: str
    error: str  # empty if the headline says it all
    flight: str  # what its ranks were doing, as HTML


def failures(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Failure]:
    """Return the runs whose status is not `ok`."""
    failed = []
    for _, run in runs[runs["status"] != "ok"].iterrows():
        error = "" if is_missing(run["error"]) else str(run["error"]).strip()
        headline = first_line(error) or "no error was recorded"
        rank = "" if is_missing(run["error_rank"]) else f"rank {int(run['error_rank'])}"
        failed.append(
            Failure(
                str(run["run_id"]),
                str(run["case_id"]),
                case_text(run, axes),
                str(run["status"]),
                "" if rank in headline else rank,
                headline,
                error if error != headline else "",
                Markup("\n".join(block.html() for block in flight_of(store, run))),  # noqa: S704
            )
        )
    return failed


def failure_groups(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Group failures by cause: the status and the headline without its numbers, most runs first."""
    members: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        cause = failure.status, _DIGITS.sub("#", failure.headline)
        members.setdefault(cause, []).append(failure)
    return [
        {
            "status": own[0].status,
            "headline": own[0].headline,
            "failures": own,
            "case_ids": list(dict.fromkeys(failure.case_id for failure in own)),
        }
        for own in sorted(members.values(), key=len, reverse=True)
    ]


def failure_counts(runs: pd.DataFrame) -> str:
    """Count the failures by status, as in `3 of 12 runs failed: 2 timeout, 1 oom`."""
    failed = runs.loc[runs["status"] != "ok", "status"]
    by_status = ", ".join(f"{count} {status}" for status, count in failed.value_counts().items())
    return f"{len(failed)} of {counted(len(runs), 'run')} failed: {by_status}."


def flight_of(store: Store, run: pd.Series) -> list[Block]:
    """Return what a run's ranks were doing when they were last seen; empty without a record.

    Of a large job the replica that failed comes first.
    """
    table = store.table("flight", [run["run_id"]])
    if table.empty:
        return []
    texts = in_words(table)
    own = pd.Series(data=True, index=texts.index)
    if len(texts) > MOST_ROWS and "replica" in texts:
        own = texts["replica"].eq(failed_replica(table))
    rows = [
        Rows.of_records(
            [
                {str(name): _NONE if is_missing(value) else value for name, value in row.items()}
                for row in texts[is_in].to_dict("records")
            ]
        )
        for is_in in (own, ~own)
    ]
    name = f"What each rank was doing, run {run['run_id']}"
    blocks: list[Block] = [Table(rows[0], name=name)]
    if rows[1].cells:
        others = [Table(rows[1], name=f"{name}, other replicas")]
        blocks.append(Fold(f"{len(rows[1].cells)} ranks of the other replicas", others))
    return blocks
