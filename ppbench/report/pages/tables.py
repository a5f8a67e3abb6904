"""The tables and lists of a report: runs, causes of idle time, failures, cautions, filters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from pandas.api.types import is_bool, is_number

from ppbench.cautions import Caution
from ppbench.config.case import UNKNOWN
from ppbench.config.kinds import VARIABLE
from ppbench.display.cases import INTERVAL, Axes, case_text, cautions_of
from ppbench.display.document import Block, Fold, Picture, Section, of_page
from ppbench.display.explanation import OF_REPLICAS, PART_NAMES, with_parts
from ppbench.display.fields import Field, field_of
from ppbench.display.replicas import MOST_ROWS
from ppbench.display.rows import Rows
from ppbench.display.tables import Detail, Table
from ppbench.display.units import counted, held_share, is_missing
from ppbench.errors import first_line, shortened
from ppbench.report.pages.templates import part
from ppbench.report.scripts import script_json
from ppbench.report.timeline.timelines import Timeline, failed_replica
from ppbench.run.failures.post_mortem import in_words
from ppbench.store import Store

NOT_GIVEN = "none"
_CAUTION = """\
<details class="{{ "caution holder" if is_listed else "concern" }}" \
data-caution="{{ caution.name }}">
<summary><strong>{{ caution.name }}</strong> <span class="carriers">{{ caution.cases | length }}\
</span> of <span class="total">{{ caution.num_cases }}</span> \
{{ "case" if caution.num_cases == 1 else "cases" }}</summary>
<p>{{ caution.remedy }}{% if not is_listed %} <a href="#cautions">Which cases</a>{% endif %}</p>
{% if is_listed %}<ul>
{% for case_id, case in caution.cases %}<li data-cases="{{ case_id }}">{{ case }}</li>
{% endfor %}</ul>
{% endif %}</details>"""
_DIGITS = re.compile(r"[0-9]+")
_SHORT = 40  # characters of a value in a filter; hovering shows it in full
SUMMARY = (
    "tokens_per_s",
    "interval",
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
BUBBLES = (
    "bubble_fraction",
    "bubble_idle_over_ideal",
    "bubble_max_stage_span",
    "bubble_fraction_theory",
)
_INTERVAL = Field("95 %", meaning="interval of the median over the run's own steps", is_number=True)
PARTS = (
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
    cell = field_of("tokens_per_s").cell

    def interval(run: pd.Series) -> str | None:
        low, high = (run[end] for end in INTERVAL)
        return None if is_missing(low) else f"{cell(low)} to {cell(high)}"

    runs = runs.assign(
        held=runs.apply(held_share, axis=1),
        interval=runs.apply(interval, axis=1),
        cautions=runs["cautions"].fillna("").str.replace(",", ", "),
    )
    figures = [name for name in SUMMARY if runs[name].notna().any()]
    table = _table("Runs", ["status", *figures, "cautions"], runs, axes)
    shown = [details.get(str(run)) for run in runs["run_id"]] if details else []
    return replace(table, details=shown, searched="runs")


def bubbles(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the three definitions of the bubble side by side."""
    return _table("Definitions of the bubble", BUBBLES, runs, axes)


def idle_parts(runs: pd.DataFrame, axes: Axes) -> Table:
    """Return the causes of idle time of the runs that store them, and the modelled step."""
    explained = runs[with_parts(runs)]
    mean_ns = explained["modelled_step_ns"] * (1 + explained["model_residual"])
    none = {f"bubble_{part}" for part in OF_REPLICAS} - set(explained.dropna(axis=1, how="all"))
    names = [name for name in PARTS if name not in none]
    return _table("Why ranks were idle", names, explained.assign(mean_step_ns=mean_ns), axes)


def _table(name: str, columns: Sequence[str], runs: pd.DataFrame, axes: Axes) -> Table:
    """Return a row per run: its varying settings, its launch if it has several, these columns."""
    launch = ["launch"] if len(runs["launch"].unique()) > 1 else []
    fields = {column: field_of(column) for column in (*axes, *launch, *columns)}
    fields |= {"interval": _INTERVAL} if "interval" in columns else {}
    cases = [str(case) for case in runs["case_id"]]
    return Table(Rows.of(runs[list(fields)]), fields, name=name, cases=cases)


@dataclass(frozen=True)
class Carried:
    """A caution, with the ids and the names of the cases that carry it, of so many."""

    name: str
    remedy: str
    cases: Sequence[tuple[str, str]]
    num_cases: int

    def picture(self, *, is_listed: bool) -> Picture:
        """Return what a page says of it: with the cases, or beside a chart that it concerns."""
        return of_page(_CAUTION, caution=self, is_listed=is_listed)


def cautioned(runs: pd.DataFrame, axes: Axes) -> list[Carried]:
    """Return every caution that a run carries, in order of severity."""
    carriers: dict[str, dict[tuple[str, str], None]] = {}
    for run in runs[runs["cautions"].fillna("").ne("")].to_dict("records"):
        for name in cautions_of(run):
            case = str(run["case_id"]), case_text(run, axes)
            carriers.setdefault(name, {})[case] = None
    remedies = {caution.name: caution.remedy for caution in Caution}
    unknown = "Unknown to this version of ppbench; a newer version wrote it."
    num_cases = int(runs["case_id"].nunique())
    return [
        Carried(name, remedies.get(name, unknown), list(carriers[name]), num_cases)
        for name in dict.fromkeys([*remedies, *carriers])
        if name in carriers
    ]


def value_text(value: object) -> str:
    """Format a setting's value without the name of its axis."""
    if is_bool(value):
        return "yes" if value else "no"
    text = str(value)
    return NOT_GIVEN if text in ("[]", "None", "nan") else text


def filters(runs: pd.DataFrame, axes: Axes) -> Picture:
    """Return a filter for each varying axis, and the values of each case for the page's script.

    Numbers are sorted, words are in the order of the runs. A long value is shown shortened.
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
    values = [
        {"case_id": str(case["case_id"]), "axes": {axis: value_text(case[axis]) for axis in axes}}
        for case in cases[["case_id", *axes]].to_dict("records")
    ]
    return part("filters.html", filters=found, cases=script_json(values))


def place_of(value: object) -> float | None:
    """Return the number that a setting sorts by, 0 if it varies; None for words."""
    if value in (VARIABLE, UNKNOWN):
        return 0.0
    return float(str(value)) if is_number(value) and not is_bool(value) else None


def failures(
    store: Store, runs: pd.DataFrame, axes: Axes, lines: Mapping[str, Timeline]
) -> list[Section]:
    """Return the runs whose status is not `ok` by their cause, which that of most runs begins.

    A cause is the status and the error's headline without its numbers. `lines` are the timelines of
    runs by their ids.
    """
    groups: dict[tuple[str, str], list[tuple[pd.Series, str, str]]] = {}
    for _, run in runs[runs["status"] != "ok"].iterrows():
        error = "" if is_missing(run["error"]) else str(run["error"]).strip()
        headline = first_line(error) or "no error was recorded"
        cause = str(run["status"]), _DIGITS.sub("#", headline)
        groups.setdefault(cause, []).append((run, headline, error if error != headline else ""))
    found = []
    for (status, _), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        cases = [str(run["case_id"]) for run, *_ in members]
        every = [_failed(store, *member, axes, lines) for member in members]
        blocks = every[0]
        if len(every) > 1:
            each = [
                Section("", "", own, kind="member", cases=[case])
                for own, case in zip(every, cases, strict=True)
            ]
            first = named(status, f"{len(every)} runs: {members[0][1]}")
            blocks = [first, Fold("Each of them", each)]
        distinct = list(dict.fromkeys(cases))
        found.append(Section("", "", blocks, kind="failure", cases=distinct))
    return found


def _failed(
    store: Store,
    run: pd.Series,
    headline: str,
    error: str,
    axes: Axes,
    lines: Mapping[str, Timeline],
) -> list[Block]:
    """Return what a failed run left behind: what its ranks were doing, and the whole error."""
    run_id, case = str(run["run_id"]), case_text(run, axes)
    rank = "" if is_missing(run["error_rank"]) else f"rank {int(run['error_rank'])}"
    where = f", {rank}" if rank and rank not in headline else ""
    doing, line = flight_of(store, run), lines.get(run_id)
    if line is not None:
        doing.append(line.picture(f"timeline-{run_id}", f"Last actions of {case}"))
    blocks: list[Block] = [named(str(run["status"]), f"{case}{where}: {headline}")]
    blocks += [Fold("What each rank was doing", doing)] if doing else []
    if error:
        text = of_page('<pre class="error-text">{{ error }}</pre>', error=error)
        blocks.append(Fold("Full error", [text]))
    return blocks


def named(name: str, text: str) -> Picture:
    """Return a line that begins with a name."""
    return of_page("<p><strong>{{ name }}</strong> {{ text }}</p>", name=name, text=text)


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
    rows = [Rows.of(texts[is_in]) for is_in in (own, ~own)]
    name = f"What each rank was doing, run {run['run_id']}"
    blocks: list[Block] = [Table(rows[0], name=name)]
    if rows[1].cells:
        others = [Table(rows[1], name=f"{name}, other replicas")]
        blocks.append(Fold(f"{len(rows[1].cells)} ranks of the other replicas", others))
    return blocks
