"""The report page: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from ppbench.display.cases import Axes, case_text, ok_runs, varying_axes
from ppbench.display.commands import command as command_of
from ppbench.display.document import Block, Code, Fold, Picture, Result, Section, Text, of_page
from ppbench.display.explanation import headline, what_if, with_parts
from ppbench.display.formats import Assets
from ppbench.display.metrics import METRICS
from ppbench.display.stragglers import cause_in_words
from ppbench.display.tables import Detail
from ppbench.errors import StoreError, UsageError
from ppbench.explanation import stragglers_of_run
from ppbench.judge.verdicts import SPEED
from ppbench.report.charts.canvas import Measured
from ppbench.report.charts.forest import intervals
from ppbench.report.charts.pareto import pareto
from ppbench.report.charts.registry import CHARTS
from ppbench.report.charts.stragglers import heat_map
from ppbench.report.pages.conclusions import Conclusions, conclude
from ppbench.report.pages.judgement import Judged, Judgement, judge
from ppbench.report.pages.provenance import (
    about_report,
    common,
    environments,
    origin,
    verifications,
)
from ppbench.report.pages.tables import (
    Carried,
    bubbles,
    cautioned,
    failure_counts,
    failures,
    filters,
    idle_parts,
    named,
    summary,
)
from ppbench.report.pages.templates import Live, listed, page, part, write_page
from ppbench.report.timeline.timelines import (
    Group,
    Timeline,
    rivalry,
    small,
    steps_of,
    timelines,
)
from ppbench.store import ReadOnce, Store
from ppbench.store.sweeps import SweepNote, newest_sweep_note

_FRONT_PX = 210
_MOST_SHOWN = 16
"""Of more runs, the table of idle causes is folded."""
_OTHERS = """\
<ul class="answers">
{% for sentence in sentences %}<li>{{ sentence }}</li>
{% endfor %}</ul>"""
_WORDS = """\
<dl class="words">
{% for name, text in words.items() %}<dt>{{ name }}</dt>
<dd>{{ text }}</dd>
{% endfor %}</dl>"""
_ABOUT_MFU = (
    "MFU is a share of the FLOP/s that matrix products reach on these ranks, which each launch "
    "measures anew. Other work on the machine slows the one or the other, so MFU differs more "
    "between launches than throughput does."
)
_OF_REPLICAS = "mean collectives between replicas that are alike, each replica's own mean costs, "


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
        note = _note_of(store, runs)
        measured_by = (note and note.command) or ""
    judged = judge(runs, axes, [store])
    conclusions, cautions = conclude(judged, runs, measured_by), cautioned(runs, axes)
    lines, groups = timelines(store, runs, axes)
    drawn = {f"timeline-{run_id}": line for run_id, line in lines.items()}
    blocks: list[Block] = [*_answer(store, runs, judged, conclusions, drawn)]
    filtered: list[Block] = [
        filters(runs, axes),
        *_charts(Measured(store, ok_runs(runs), judged.of_runs, axes), cautions),
        *_causes(store, ok_runs(runs), judged),
        *_timelines(runs, axes, groups, lines, drawn),
        _runs(store, runs, axes, lines),
    ]
    if failed := failures(store, runs, axes, lines):
        num = int((runs["status"] != "ok").sum())
        counts = Text(failure_counts(runs), kind="sweep")
        section = Section("failures", f"Failures ({num})", [counts, *failed], kind="holder")
        filtered.append(section)
    if cautions:
        listed_here = [one.picture(is_listed=True) for one in cautions]
        heading = f"Cautions ({len(cautions)})"
        filtered.append(Section("cautions", heading, listed_here, kind="holder"))
    words: list[Block] = [part("reading.html", has_replicas=bool((runs["replicas"] > 1).any()))]
    if len(ok_runs(runs)):
        words.append(Fold("The three definitions, by run", [bubbles(ok_runs(runs), axes)]))
    origins: list[Block] = [
        *environments(runs),
        Text(verifications(runs), "Verified"),
        Code(command, "Command"),
    ]
    if sweep_text is not None:
        named_here = " ".join(filter(None, ["Sweep file", common(runs, "sweep_file")]))
        origins.append(Code(sweep_text, named_here))
    if store.damaged:  # after all reading of the store
        blocks.append(Section("damaged", "Damaged files", [Text(store.damaged, "Left out")]))
    blocks += [
        *filtered,
        Section("reading", "How to read this", words),
        Section("reproduce", "Environment and reproduction", origins),
    ]
    return page(
        Result(blocks),
        about_report(title, runs, conclusions.sentence.text),
        origin(runs),
        assets=assets,
        live=live,
        timelines=drawn,
        has_contents=True,
    )


def _answer(
    store: Store,
    runs: pd.DataFrame,
    judged: Judged,
    conclusions: Conclusions,
    drawn: dict[str, Timeline],
) -> Iterator[Section]:
    """Yield what is about the whole sweep: what to do, with pictures, and how it was judged."""
    stated = dataclasses.replace(conclusions, others=())
    pictures, first, measured = list[Section](), judged.first, ok_runs(runs)
    if first is not None:
        own = measured[measured["case_id"].isin(first.arms) & measured["peak_memory_bytes"].notna()]
        if len(own["case_id"].unique()) > 1:
            heading = "Throughput against memory"
            front = pareto(Measured.of(store, own, first.axes), _FRONT_PX)
            pictures += [Section("", heading, [front.picture(heading)])] if front else []
        both = [0] if first.rival is None else [0, first.rival_place]
        medians = [median_run(measured, first.arms[place]) for place in both]
        names = [first.names[place] for place in both]
        with contextlib.suppress(StoreError, UsageError):
            drawn["small"] = small(steps_of(store, medians, names))
            heading = "One step of each" if len(both) > 1 else "One step"
            pictures.append(Section("", heading, [drawn["small"].picture("small")]))
    blocks: list[Block] = [stated, Section("", "", pictures, kind="pictures")]
    if conclusions.notes:
        how = [Text(conclusions.notes)]
        blocks.append(Fold("How this was judged", how, kind="judged printed"))
    yield Section("answer", "", blocks, kind="sweep")
    if (shown := judged.whole or first) is not None and (pairs := pairs_of(shown)) is not None:
        yield Section("pairs", "Pair by pair", [pairs], kind="sweep")
    if conclusions.smaller:
        yield Section("smaller", "With less memory", [Text(conclusions.smaller)], kind="sweep")
    if conclusions.others:
        why = "Cases that do other work, or on other numbers of ranks, are judged on their own."
        graded = of_page(_OTHERS, sentences=[one.html for one in conclusions.others])
        yield Section("others", "Other settings", [Text(why, kind="note"), graded], kind="sweep")


def _charts(measured: Measured, cautions: Sequence[Carried]) -> Iterator[Section]:
    for chart in CHARTS.values() if len(measured.runs) else ():
        if (drawing := chart.draw(measured)) is not None:
            names = {one.name for one in chart.concerns}
            concerns = [one.picture(is_listed=False) for one in cautions if one.name in names]
            blocks: list[Block] = [
                Text(chart.note, kind="note"),
                drawing.picture(chart.heading),
                *concerns,
                Text("No measurements for the selected cases.", kind="empty"),
            ]
            yield Section(chart.name, chart.heading, blocks, kind="figure")


def _causes(store: Store, measured: pd.DataFrame, judged: Judged) -> Iterator[Section]:
    """Yield why ranks were idle: of the best case in words, of each run in a table."""
    explained = measured[with_parts(measured)]
    if explained.empty:
        return
    parts, known = idle_parts(measured, judged.axes), set(explained["case_id"])
    cases = [case_id for own in judged.judgements for case_id in own.arms if case_id in known]
    blocks: list[Block] = []
    run = median_run(explained, cases[0]) if cases else None
    if run is not None:
        edges, moved = (store.table(name, [run["run_id"]]) for name in ("edges", "collectives"))
        first = f"{case_text(run, judged.axes)}: {headline(run, edges)}"
        blocks.append(Text([first, *what_if(run, edges, moved)], kind="sweep"))
    of_replicas = _OF_REPLICAS if (measured["replicas"] > 1).any() else ""
    about = (
        "Shares of rank-time, over all measured steps. The program is replayed with more and more "
        "of the run's own times, and each part is the idle time that the next one adds: equal "
        "stages and free transfers first, then the stages' mean costs, the channels' mean "
        f"transfers, {of_replicas}each action's own time. Launch gaps are the rest, so the parts "
        "add up exactly."
    )
    blocks.append(Text(about, kind="note"))
    if run is not None:
        explain = command_of("explain", str(run["run_id"]), results=store.folder)
        blocks.append(Code(explain, "By rank, with what-if estimates"))
    if run is not None and int(run["replicas"]) > 1:
        with contextlib.suppress(StoreError):  # its spans are lost
            run_id, found = stragglers_of_run(store, str(run["run_id"]))
            more = command_of("stragglers", run_id, results=store.folder)
            title = "S of each rank: how much longer it makes a step"
            blocks += [
                Text(cause_in_words(found), kind="sweep"),
                Code(more, "More of it"),
                heat_map(found.by_worker, title).picture("Who slows the replicas down"),
            ]
    is_short = len(parts.rows.cells) <= _MOST_SHOWN
    blocks.append(Fold("By run", [parts], kind="printed", is_open=is_short))
    yield Section("causes", "Why ranks were idle", blocks, kind="holder")


def _timelines(
    runs: pd.DataFrame,
    axes: Axes,
    groups: Sequence[Group],
    lines: Mapping[str, Timeline],
    drawn: dict[str, Timeline],
) -> Iterator[Section]:
    """Yield the timelines of rivals on one time axis; `drawn` gets those of several runs."""
    cases_of = dict(zip(runs["run_id"], runs["case_id"], strict=True))
    texts = {str(run["run_id"]): case_text(run, axes) for run in runs.to_dict("records")}
    folds: list[Block] = []
    for number, group in enumerate(groups, 1):
        line, ids = group.timeline, group.timeline.run_ids
        title = ", ".join(filter(None, [line.name, group.title]))
        name, label = f"timeline-{ids[0]}", f"Timeline of {title}"
        if len(ids) > 1 or ids[0] not in lines:
            name, label = f"rivals-{number}", f"Timelines of {title}"
            drawn[name] = line
        many = f"{len(ids)} runs" if len(ids) > 3 else line.name if group.title else ""
        causes = dict(zip(map(texts.get, ids), line.explanations, strict=True))
        words = {case: text for case, text in causes.items() if text}
        fold = Fold("Causes of the idle time", [of_page(_WORDS, words=words)])
        folds.append(
            Fold(
                group.title or line.name,
                [line.picture(name, label), *([fold] if words else [])],
                note=" · ".join(filter(None, [many, line.facts])) or " ",
                kind="timeline",
                is_open=group.is_open,
                cases=[cases_of[run_id] for run_id in ids],
            )
        )
    if folds:
        rivals = rivalry(axes).replace("_", " ")
        about = (
            f"The median step of each run; runs that differ only in {rivals} share a time axis, "
            "even if filters exclude some of them. Click into one, then the wheel zooms; drag to "
            "move, double-click to reset, click a name to hide it."
        )
        yield Section("timelines", "Timelines", [Text(about, kind="note"), *folds], kind="holder")


def _runs(store: Store, runs: pd.DataFrame, axes: Axes, lines: Mapping[str, Timeline]) -> Section:
    """Return the table of runs, whose rows open their timelines."""
    details, folder = {}, store.folder
    for run_id, line in lines.items():
        again = {"drawn alone": f"timeline {run_id}", "what is stored": f"show {run_id}"}
        if not line.is_failed:
            plan = f"timeline {run_id} --planned"
            again = {"beside its plan": plan, "by rank": f"explain {run_id}"}
        opened: list[Block] = [
            named(line.name, line.facts),
            *(Text(text, kind="explanation") for text in line.explanations if text),
            line.picture(f"timeline-{run_id}"),
            *(Code(command_of(*w.split(), results=folder), what) for what, w in again.items()),
        ]
        html = Result(opened).html()
        details[run_id] = Detail(f"detail-{run_id}", f"Timeline of {line.name}", html)
    blocks: list[Block] = [summary(runs, axes, details)]
    # An MFU may refer to a peak that was measured, which differs from launch to launch.
    peaks = runs.loc[runs["mfu"].notna(), "mfu_peak"].dropna()
    if any(str(peak).startswith("measured") for peak in peaks):
        blocks.append(Text(_ABOUT_MFU, kind="note"))
    return Section("runs", "Runs", blocks)


def median_run(runs: pd.DataFrame, case_id: str) -> pd.Series:
    """Return the launch of a case with the median throughput, or the lower of the middle two."""
    own = runs[runs["case_id"] == case_id].sort_values("tokens_per_s", kind="stable")
    return own.iloc[(own["tokens_per_s"].notna().sum() - 1) // 2]


def pairs_of(judgement: Judgement) -> Picture | None:
    """Draw how the one to take compares with each other; None where nothing is known."""
    first, *others = judgement.names
    rows = {
        name: [change]
        for place, name in enumerate(others, 1)
        if (change := judgement.change(0, place)) is not None
    }
    if not any(change.has_interval for (change,) in rows.values()):
        return None
    caption = f"Tokens/s of {first} against each other case, with 95\u00a0% intervals."
    return intervals([METRICS[SPEED]], rows, caption)


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
        note = _note_of(store, runs)
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


def _note_of(store: Store, runs: pd.DataFrame) -> SweepNote | None:
    """Return what is noted of the sweep that all these runs are of, if there is one."""
    sweep = common(runs, "sweep_id")
    return newest_sweep_note(store.folder, sweep) if sweep else None
