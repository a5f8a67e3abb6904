"""Pages: one HTML file each, complete in itself, the same bytes for the same runs.

plotly.js is inlined once and figures are embedded as JSON, rather than through plotly's own
`to_html`: that repeats its settings per figure, gives every chart a random id and draws all of
them at once. The page's policy forbids every network request.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path

import jinja2
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from ppbench.errors import StoreError
from ppbench.report import levels
from ppbench.report.answer import answer
from ppbench.report.cases import Axes, case_text, is_oversubscribed, ok_runs, varying_axes
from ppbench.report.chart_list import charts_of
from ppbench.report.explanation import has_parts, headline, what_if
from ppbench.report.summary import bubbles, cautioned, failures, idle_parts, summary
from ppbench.report.timelines import Timeline, groups, planned, timeline
from ppbench.report.units import (
    MISSING,
    counted,
    held,
    is_missing,
    milliseconds,
    percent,
    size,
    tokens_per_s,
)
from ppbench.store import Store

_TEMPLATES = Path(__file__).parent / "templates"
_NO_AXES: Axes = ()


def render_report(
    store: Store, runs: pd.DataFrame, *, title: str, command: str, sweep_text: str | None
) -> str:
    """The report of `runs` (rows of `store.runs()`) as HTML.

    `command` is what reproduces it; `sweep_text` is the sweep file's content, if it is known.
    """
    axes = varying_axes(runs)
    template = _environment().get_template("report.html")
    return template.render(
        title=title,
        plotly_js=Markup(get_plotlyjs()),  # noqa: S704 - plotly's own library, not user text
        subtitle=_subtitle(runs),
        answer=answer(runs, axes),
        cautions=cautioned(runs, axes),
        num_cases=runs["case_id"].nunique(),
        failures=failures(runs, axes),
        summary=summary(runs, axes),
        charts=charts_of(store, runs, axes),
        idle_parts=idle_parts(ok_runs(runs), axes),
        idle_answers=_idle_answers(store, ok_runs(runs), axes),
        groups=groups(store, runs, axes),
        bubbles=bubbles(ok_runs(runs), axes),
        environments=_environments(runs),
        command=command,
        sweep_text=sweep_text,
        sweep_file=_common(runs, "sweep_file"),
    )


def write_report(
    path: Path,
    store: Store,
    runs: pd.DataFrame,
    *,
    title: str,
    command: str,
    sweep_text: str | None,
) -> None:
    """Render the report and write it to `path`. Raises StoreError when that cannot be done."""
    _write(path, render_report(store, runs, title=title, command=command, sweep_text=sweep_text))


def write_timeline(path: Path, store: Store, run: pd.Series) -> None:
    """Write a page with the Gantt chart of one run's median step and the run's facts.

    Raises StoreError when the run has no spans, or when the file cannot be written.
    """
    name = case_text(run, _NO_AXES)
    line = timeline(store, run, name)
    if line is None:
        raise StoreError(
            f"run {run['run_id']}: its spans are not in the store (missing or unreadable); "
            "measure it again with: ppbench sweep FILE --rerun"
        )
    table = store.table("memory", [run["run_id"]])
    memory = None if table.empty else levels.memory(table)
    _write(path, _timeline_page(line, name, _facts(run), memory))


def write_plan(
    path: Path, spans: pd.DataFrame, *, title: str, subtitle: str, facts: list[tuple[str, str]]
) -> None:
    """Write a page with the Gantt chart of a simulated step, as `write_timeline` of a run.

    Raises StoreError when the file cannot be written.
    """
    line = planned(spans, title, subtitle)
    _write(path, _timeline_page(line, title, facts), option="--html")


def _timeline_page(
    line: Timeline, title: str, facts: list[tuple[str, str]], memory: go.Figure | None = None
) -> str:
    template = _environment().get_template("timeline.html")
    return template.render(
        title=title,
        plotly_js=Markup(get_plotlyjs()),  # noqa: S704 - plotly's own library, not user text
        timeline=line,
        memory=memory,
        facts=facts,
    )


def _write(path: Path, text: str, option: str = "-o") -> None:
    """Aside first, then renamed: a reader never meets half a page."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}; choose another path with {option} FILE"
        ) from error


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure_json"] = _figure_json
    return environment


def _figure_json(figure: go.Figure) -> Markup:
    """The figure for a `<script>`: without any `<` it can neither end the element nor start one."""
    text = to_json_plotly(figure, engine="json")
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - escaped on this very line


def _idle_answers(store: Store, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Where the idle time of the fastest run went, if it tells, and what if; sound runs first."""
    told = runs[[has_parts(run) for _, run in runs.iterrows()]]
    if told.empty:
        return []
    is_sound = [not is_oversubscribed(run) for _, run in told.iterrows()]
    ranked = told.assign(is_sound=is_sound).sort_values(["is_sound", "tokens_per_s"])
    fastest = ranked.iloc[-1]
    edges = store.table("edges", [fastest["run_id"]])
    first = f"Fastest, {case_text(fastest, axes)}: {headline(fastest, edges)}"
    return [first, *what_if(fastest, edges)]


def _subtitle(runs: pd.DataFrame) -> str:
    """How many runs of how many cases, on what, measured when."""
    days = sorted({str(moment)[:10] for moment in runs["created_at"].dropna()})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    parts = [
        f"{counted(len(runs), 'run')} of {counted(runs['case_id'].nunique(), 'case')}",
        _common(runs, "model_preset"),
        _common(runs, "device"),
        when,
    ]
    return " · ".join(part for part in parts if part)


def _common(runs: pd.DataFrame, column: str) -> str:
    """The value that all runs share, or nothing."""
    values = runs[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def _environments(runs: pd.DataFrame) -> list[list[tuple[str, str]]]:
    """The facts of every distinct environment and commit among the runs, in the runs' order."""
    distinct = runs.drop_duplicates(["fingerprint", "environment", "commit", "branch", "is_dirty"])
    return [_environment_facts(run) for _, run in distinct.iterrows()]


def _environment_facts(run: pd.Series) -> list[tuple[str, str]]:
    text = run["environment"]
    details: dict[str, object] = {} if is_missing(text) else json.loads(str(text))
    facts = [_environment_fact(name, value) for name, value in details.items()]
    return [
        ("commit", _commit(run)),
        ("fingerprint", _plain(run["fingerprint"])),
        ("ppbench", _plain(run["ppbench_version"])),
        *((name, text) for name, text in facts if text != MISSING),
    ]


def _environment_fact(name: str, value: object) -> tuple[str, str]:
    words = name.removesuffix("_bytes").replace("_", " ")
    return words, size(value) if name.endswith("_bytes") else _plain(value)


def _commit(run: pd.Series) -> str:
    if is_missing(run["commit"]):
        return "not in a repository"
    dirty = ", with uncommitted changes" if run["is_dirty"] is True or run["is_dirty"] == 1 else ""
    branch = "" if is_missing(run["branch"]) else f" on {run['branch']}"
    return f"{run['commit']}{branch}{dirty}"


def _plain(value: object) -> str:
    """A fact from the environment as text; nothing for what the machine does not have."""
    if is_missing(value) or value == []:
        return MISSING
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _facts(run: pd.Series) -> list[tuple[str, str]]:
    return [
        ("throughput", tokens_per_s(run["tokens_per_s"])),
        ("step", milliseconds(run["step_ns"])),
        ("bubble", percent(run["bubble_fraction"])),
        ("in theory", percent(run["bubble_fraction_theory"])),
        ("peak memory", size(run["peak_memory_bytes"])),
        ("held microbatches", held(run)),
        ("model", str(run["model_preset"])),
        ("device", str(run["device"])),
        ("cautions", _plain(run["cautions"]) or "none"),
        ("run", str(run["run_id"])),
    ]
