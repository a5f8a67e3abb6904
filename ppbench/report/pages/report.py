"""The report page: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppbench.display.cases import Axes, by_case, case_text, ok_runs, varying_axes
from ppbench.display.explanation import headline, what_if, with_parts
from ppbench.display.formats import Assets
from ppbench.display.stragglers import cause_in_words
from ppbench.errors import StoreError
from ppbench.explanation import stragglers_of_run
from ppbench.report import charts
from ppbench.report.charts.catalogue import charts_of
from ppbench.report.charts.stragglers import heat_map
from ppbench.report.pages.conclusions import conclude
from ppbench.report.pages.judgement import Judged, judge
from ppbench.report.pages.provenance import (
    about_report,
    common,
    environments,
    origin,
    verifications,
)
from ppbench.report.pages.strips import Strips, median_run, strips
from ppbench.report.pages.tables import (
    CONCERNS,
    bubbles,
    case_list,
    cautioned,
    failure_counts,
    failure_groups,
    failures,
    filters,
    idle_parts,
    summary,
)
from ppbench.report.pages.templates import Live, listed, render, write_page
from ppbench.report.scripts import Picture
from ppbench.report.timeline.timelines import rivalry, timelines
from ppbench.store import Store
from ppbench.store.once import ReadOnce
from ppbench.store.sweeps import find_sweep_note

_FRONT_PX = 210


def render_report(
    store: Store,
    runs: pd.DataFrame,
    *,
    title: str,
    command: str,
    sweep_text: str | None,
    assets: Assets = Assets.inline,
    live: Live | None = None,
) -> str:
    """Return the report of `runs` (rows of `store.runs()`) as HTML.

    `command` reproduces it; `sweep_text` is the sweep file; `live` is of a sweep that still runs.
    """
    axes, store = varying_axes(runs), ReadOnce(store, runs["run_id"])
    facts = {"title": title, "command": command, "sweep_text": sweep_text, "live": live}
    content = _content(store, runs, axes, title, _measured_by(store, runs, command))
    lines = timelines(store, runs, axes)
    values = {**facts, **content, "timelines": lines.by_run, "groups": lines.groups}
    damaged = [str(damage) for damage in store.damaged]  # after all reading of the store
    shown = {**values, "damaged": damaged, "contents": _contents(values, damaged)}
    return render("report.html", assets=assets, **shown)


def _measured_by(store: Store, runs: pd.DataFrame, command: str) -> str:
    """Return the command that measured the runs, which a page of a sweep has itself.

    Empty where they are of several sweeps, or of one whose command was not noted.
    """
    if command.startswith("ppbench sweep "):
        return command
    sweeps = runs["sweep_id"].dropna().unique()
    note = find_sweep_note(store.folder, str(sweeps[0])) if len(sweeps) == 1 else None
    return (note and note.command) or ""


def _content(
    store: Store, runs: pd.DataFrame, axes: Axes, title: str, measured_by: str
) -> dict[str, object]:
    """Return what the page shows but for its timelines."""
    judged = judge(runs, axes)
    conclusions = conclude(judged, runs, measured_by)
    answers, picture = _idle_answers(store, ok_runs(runs), judged)
    peaks = runs.loc[runs["mfu"].notna(), "mfu_peak"].dropna()
    return {
        "about": about_report(title, runs, conclusions.sentence.text),
        "subtitle": origin(runs),
        "conclusions": conclusions,
        # An MFU may refer to a peak that was measured, which differs from launch to launch.
        "measures_peak": any(str(peak).startswith("measured") for peak in peaks),
        "pictures": _pictures(store, runs, judged),
        "filters": filters(runs, axes),
        "cases": case_list(runs, axes),
        "cautions": cautioned(runs, axes),
        "concerns": CONCERNS,
        "num_cases": runs["case_id"].nunique(),
        "failures": failure_groups(failures(store, runs, axes)),
        "failure_counts": failure_counts(runs),
        "summary": summary(runs, axes),
        "charts": charts_of(store, runs, judged.of_runs, axes),
        "idle_parts": idle_parts(ok_runs(runs), axes),
        "idle_answers": answers,
        "stragglers": picture,
        "rivalry": rivalry(axes).replace("_", " "),
        "has_replicas": bool((runs["replicas"] > 1).any()),
        "cases_of": dict(zip(runs["run_id"], runs["case_id"], strict=True)),
        "names": {run["run_id"]: case_text(run, axes) for run in runs.to_dict("records")},
        "bubbles": bubbles(ok_runs(runs), axes),
        "environments": environments(runs),
        "verifications": verifications(runs),
        "sweep_file": common(runs, "sweep_file"),
    }


def write_report(
    path: Path,
    store: Store,
    runs: pd.DataFrame,
    *,
    title: str,
    command: str,
    sweep_text: str | None,
    assets: Assets = Assets.inline,
) -> None:
    """Write the report to `path`. Raises StoreError if that fails."""
    text = render_report(
        store, runs, title=title, command=command, sweep_text=sweep_text, assets=assets
    )
    write_page(path, text, assets=assets)


def report_runs(
    store: Store,
    names: Sequence[str],
    output: Path | None,
    reports: Path,
    assets: Assets = Assets.inline,
) -> Path:
    """Write a report of the named runs, or of the last sweep, and return its path.

    By default it lies in the folder `reports`, whose index is rebuilt when a page is added to it.
    """
    command = shlex.join(["ppbench", "report", *names])
    if names:
        runs = store.named(names).sort_values("run_id")
    else:
        sweep = store.last_sweep()
        runs, command = sweep.runs, (sweep.note and sweep.note.command) or command
    last = runs.iloc[-1]
    title = str(last["sweep_name"]).replace("/", "-")
    # Chosen runs get a file of their own: the sweep's report stays as it is.
    default = f"report-{last['run_id']}" if names else f"{title}-{sweep.sweep_id}"
    path = output or reports / f"{default}.html"
    with listed(path, reports):
        text = _sweep_text(runs)
        write_report(
            path, store, runs, title=title, command=command, sweep_text=text, assets=assets
        )
    return path


def _sweep_text(runs: pd.DataFrame) -> str | None:
    """The sweep file, if all runs come from one and it can still be read."""
    files = runs["sweep_file"].dropna().unique()
    if len(files) != 1:
        return None
    try:
        return Path(files[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _idle_answers(
    store: Store, runs: pd.DataFrame, judged: Judged
) -> tuple[list[str], Picture | None]:
    """Explain the idle time of the best case that stores its causes; draw who slows it down."""
    explained = runs[with_parts(runs)]
    known = set(explained["case_id"])
    cases = [case_id for own in judged.judgements for case_id in own.case_ids if case_id in known]
    if not cases:
        return [], None
    run = median_run(explained, cases[0])
    edges, moved = (store.table(name, [run["run_id"]]) for name in ("edges", "collectives"))
    first = f"{case_text(run, judged.axes)}: {headline(run, edges)}"
    answers = [first, *what_if(run, edges, moved)]
    if int(run["replicas"]) == 1:
        return answers, None
    try:
        run_id, found = stragglers_of_run(store, str(run["run_id"]))
    except StoreError:  # its spans are lost
        return answers, None
    answers.append(f"{cause_in_words(found)} More of it: ppbench stragglers {run_id}")
    return answers, heat_map(found.by_worker, "S of each rank: how much longer it makes a step")


@dataclass(frozen=True)
class Pictures:
    """What the first screen shows of the best case and its rivals."""

    front: Picture | None  # throughput against memory
    strips: Strips | None


def _pictures(store: Store, runs: pd.DataFrame, judged: Judged) -> Pictures:
    first = judged.first
    if first is None:
        return Pictures(None, None)
    own = ok_runs(runs)
    own = own[own["case_id"].isin(first.case_ids) & own["peak_memory_bytes"].notna()]
    front = None
    if len(own["case_id"].unique()) > 1:
        front = charts.pareto(by_case(own, first.axes), first.axes, panel_px=_FRONT_PX)
    return Pictures(front, strips(store, runs, first))


def _contents(values: Mapping[str, Any], damaged: Sequence[str]) -> list[tuple[str, str]]:
    """Return the address and heading of each section that the page has."""
    num_failed = sum(len(group["failures"]) for group in values["failures"])
    sections = [
        ("answer", "Answer", True),
        ("pairs", "Pair by pair", values["conclusions"].comparisons),
        ("others", "Other settings", values["conclusions"].others),
        ("damaged", "Damaged files", damaged),
        *((chart.name, chart.heading, True) for chart in values["charts"]),
        ("causes", "Why ranks were idle", values["idle_parts"].rows),
        ("timelines", "Timelines", values["groups"]),
        ("runs", "Runs", True),
        ("failures", f"Failures ({num_failed})", num_failed),
        ("cautions", f"Cautions ({len(values['cautions'])})", values["cautions"]),
        ("reading", "How to read this", True),
        ("reproduce", "Environment and reproduction", True),
    ]
    return [(name, heading) for name, heading, is_there in sections if is_there]
