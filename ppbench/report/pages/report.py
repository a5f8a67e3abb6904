"""The report page: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from ppbench.display.cases import case_text, ok_runs, varying_axes
from ppbench.display.commands import command as command_of
from ppbench.display.commands import option_words
from ppbench.display.document import Block, Code, Section, Text
from ppbench.display.explanation import headline, what_if, with_parts
from ppbench.display.formats import Assets
from ppbench.display.metrics import METRICS
from ppbench.display.stragglers import cause_in_words
from ppbench.display.tables import Detail
from ppbench.errors import StoreError
from ppbench.explanation import stragglers_of_run
from ppbench.judge.verdicts import SPEED, Change
from ppbench.report.charts.canvas import Measured
from ppbench.report.charts.forest import Intervals
from ppbench.report.charts.pareto import pareto
from ppbench.report.charts.registry import CHARTS
from ppbench.report.charts.stragglers import heat_map
from ppbench.report.pages.conclusions import conclude
from ppbench.report.pages.judgement import Judged, axis_answer, judge
from ppbench.report.pages.provenance import (
    about_report,
    common,
    environments,
    origin,
    verifications,
)
from ppbench.report.pages.strips import median_run, strips
from ppbench.report.pages.tables import (
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
from ppbench.report.pages.templates import Live, listed, macro, render, write_page
from ppbench.report.scripts import Picture
from ppbench.report.timeline.timelines import rivalry, timelines
from ppbench.store import ReadOnce, Store
from ppbench.store.sweeps import newest_sweep_note

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
    measured_by = command  # a page of a sweep has itself the command that measured the runs
    if not command.startswith("ppbench sweep "):
        sweeps = runs["sweep_id"].dropna().unique()
        note = newest_sweep_note(store.folder, str(sweeps[0])) if len(sweeps) == 1 else None
        measured_by = (note and note.command) or ""
    judged = judge(runs, axes, [store])
    measured = ok_runs(runs)
    conclusions = conclude(judged, runs, measured_by)
    answers, picture = _idle_answers(store, measured, judged)
    front = small = None
    if (first := judged.first) is not None:
        own = measured[
            measured["case_id"].isin(first.case_ids) & measured["peak_memory_bytes"].notna()
        ]
        if len(own["case_id"].unique()) > 1:
            front = pareto(Measured.of(store, own, first.axes), _FRONT_PX)
        small = strips(store, runs, first)
    whole, pairs = axis_answer(judged), ""
    if whole is not None:
        pairs = pairs_of(whole.names, whole.lead.changes, whole.arms)
    elif first is not None and first.lead is not None:
        names = [first.name(case) for _, case in first.cases.iterrows()]
        pairs = pairs_of(names, first.lead.changes, first.arms)
    peaks = runs.loc[runs["mfu"].notna(), "mfu_peak"].dropna()
    cautions, groups = cautioned(runs, axes), failure_groups(failures(store, runs, axes))
    num_failed = sum(len(group["failures"]) for group in groups)
    drawn = []
    if len(measured):
        of_runs = Measured(store, measured, judged.of_runs, axes)
        tried = [(chart, chart.draw(of_runs)) for chart in CHARTS.values()]
        drawn = [(chart, drawing) for chart, drawing in tried if drawing is not None]
    parts = idle_parts(measured, axes)
    lines, line_groups = timelines(store, runs, axes)
    options = "".join(f" {shlex.quote(word)}" for word in option_words(results=store.folder))
    details = {
        run: Detail(
            f"detail-{run}",
            f"Timeline of {line.name}",
            macro("parts.html", "run_detail", line, run, options),
        )
        for run, line in lines.items()
    }
    damaged = store.damaged  # after all reading of the store
    missing = Section("damaged", "Damaged files", [Text(damaged, "Left out")])
    reproduce: list[Block] = [
        *environments(runs),
        Text(verifications(runs), "Verified"),
        Code(command, "Command"),
    ]
    if sweep_text is not None:
        named = " ".join(filter(None, ["Sweep file", common(runs, "sweep_file")]))
        reproduce.append(Code(sweep_text, named))
    sections = [
        ("answer", "Answer", True),
        ("pairs", "Pair by pair", pairs),
        ("smaller", "With less memory", conclusions.smaller),
        ("others", "Other settings", conclusions.others),
        ("damaged", "Damaged files", damaged),
        *((chart.name, chart.heading, True) for chart, _ in drawn),
        ("causes", "Why ranks were idle", parts.rows.cells),
        ("timelines", "Timelines", line_groups),
        ("runs", "Runs", True),
        ("failures", f"Failures ({num_failed})", num_failed),
        ("cautions", f"Cautions ({len(cautions)})", cautions),
        ("reading", "How to read this", True),
        ("reproduce", "Environment and reproduction", True),
    ]
    return render(
        "report.html",
        assets=assets,
        title=title,
        live=live,
        about=about_report(title, runs, conclusions.sentence.text),
        subtitle=origin(runs),
        contents=[(name, heading) for name, heading, is_there in sections if is_there],
        conclusions=conclusions,
        # An MFU may refer to a peak that was measured, which differs from launch to launch.
        measures_peak=any(str(peak).startswith("measured") for peak in peaks),
        pictures={"front": front, "strips": small},
        pairs=Markup(pairs),  # noqa: S704 - escaped where it was made
        damaged=missing if damaged else None,
        filters=filters(runs, axes),
        cases=case_list(runs, axes),
        cautions=cautions,
        concerns={chart.name: [one.name for one in chart.concerns] for chart, _ in drawn},
        num_cases=runs["case_id"].nunique(),
        failures=groups,
        failure_counts=failure_counts(runs),
        summary=summary(runs, axes, details),
        charts=drawn,
        idle_parts=parts,
        idle_answers=answers,
        stragglers=picture,
        timelines=lines,
        groups=line_groups,
        options=options,
        rivalry=rivalry(axes).replace("_", " "),
        has_replicas=bool((runs["replicas"] > 1).any()),
        cases_of=dict(zip(runs["run_id"], runs["case_id"], strict=True)),
        names={run["run_id"]: case_text(run, axes) for run in runs.to_dict("records")},
        bubbles=bubbles(measured, axes),
        reproduce=Section("reproduce", "Environment and reproduction", reproduce),
    )


def pairs_of(
    names: Sequence[str], changes: Mapping[tuple[int, int], Change], arms: Sequence[int]
) -> str:
    """Draw how the first of these names compares with each other; empty where nothing is known.

    `arms` are the numbers that `changes` has for the names.
    """
    rows = {
        name: [changes[arms[0], arm]]
        for name, arm in zip(names[1:], arms[1:], strict=True)
        if (arms[0], arm) in changes
    }
    if not any(change.has_interval for (change,) in rows.values()):
        return ""
    caption = f"Tokens/s of {names[0]} against each other case, with 95\u00a0% intervals."
    return Intervals([METRICS[SPEED]], rows, caption).html()


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
    command = command_of("report", *names, results=store.folder, output=output)
    if names:
        runs = store.named(names).sort_values("run_id")
        sweeps = runs["sweep_id"].dropna().unique()
        note = newest_sweep_note(store.folder, str(sweeps[0])) if len(sweeps) == 1 else None
    else:
        sweep = store.last_sweep()
        runs, note = sweep.runs, sweep.note
        command = (note and note.command) or command
    last = runs.iloc[-1]
    title = str(last["sweep_name"]).replace("/", "-")
    # Chosen runs get a file of their own: the sweep's report stays as it is.
    default = f"report-{last['run_id']}" if names else f"{title}-{sweep.sweep_id}"
    path = output or reports / f"{default}.html"
    text = (note and note.text) or None
    with listed(path, reports):
        write_report(
            path, store, runs, title=title, command=command, sweep_text=text, assets=assets
        )
    return path


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
    more = command_of("stragglers", run_id, results=store.folder)
    answers.append(f"{cause_in_words(found)} More of it: {more}")
    return answers, heat_map(found.by_worker, "S of each rank: how much longer it makes a step")
