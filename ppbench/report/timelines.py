"""Timelines: steps of runs stacked on one time axis, and those of a report gathered by rivals.

Runs that differ only in schedule form a group and share one figure: AFAB above 1F1B compares at a
glance only when a millisecond is as long in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import plotly.graph_objects as go

from ppbench.analysis.metrics import MEDIAN, SLOWEST, chosen_step, compute_spans
from ppbench.errors import StoreError, UsageError, first_line
from ppbench.report.cases import (
    Axes,
    axis_text,
    is_not_finite,
    is_oversubscribed,
    ok_runs,
    settings_text,
)
from ppbench.report.detail import Detail
from ppbench.report.explanation import has_parts, headline
from ppbench.report.gantt import gantt_with_detail
from ppbench.report.marks import Step
from ppbench.report.recovered import edges_of_run, steps_of_run
from ppbench.report.units import MISSING, is_missing, milliseconds, percent, tokens_per_s
from ppbench.store import Store, check_ok, no_spans

OK = "ok"
NS_PER_S = 1e9
NUM_OPEN = 2  # groups whose timelines are drawn at once; the others wait to be opened
_ACTION = ["op", "stage", "microbatch"]


@dataclass(frozen=True)
class Timeline:
    """Steps of runs, or planned ones, ready to be drawn."""

    name: str
    facts: str
    figure: go.Figure
    detail: Detail | None = None
    explanations: tuple[str, ...] = ()  # where each run's idle time went; "" if untold
    run_ids: tuple[str, ...] = ()
    is_failed: bool = False  # of a single run: what it had finished


@dataclass(frozen=True)
class Group:
    """Runs that differ only in schedule (or launch), in one figure."""

    title: str
    timeline: Timeline
    is_open: bool


def _planned_step(store: Store, run: pd.Series, title: str, measured: pd.DataFrame) -> Step:
    """What a run's program predicts at the run's mean costs and transfers.

    Messages have the bytes of the `measured` spans. Raises UsageError when the run stored no plan.
    """
    spans = store.table("planned", [run["run_id"]])
    if spans.empty:
        raise UsageError(
            f"run {run['run_id']}: an older version of ppbench measured it and stored no plan; "
            "leave --planned out, or measure it again with: ppbench sweep FILE --rerun"
        )
    sizes = measured.drop_duplicates(_ACTION).set_index(_ACTION)["num_bytes"]
    actions = pd.MultiIndex.from_frame(spans[_ACTION])
    return Step(title, spans.assign(num_bytes=sizes.reindex(actions).fillna(0).to_numpy(int)))


@dataclass(frozen=True)
class _Shown:
    """What of a run is drawn: a step, under its title, and its plan where that is wanted."""

    run: pd.Series
    name: str
    facts: str
    steps: tuple[Step, ...]


def timeline(
    store: Store,
    runs: Sequence[pd.Series],
    names: Sequence[str],
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
) -> Timeline:
    """A step of each run, one above the other, each with its plan beneath if that is wanted.

    Of a run that failed, what was finished of its last step and what was not. Raises StoreError
    when spans are not there, UsageError for a step that was not measured, for a run without a plan
    and for one that failed before there was anything to draw.
    """
    return _drawn(store, _all_shown(store, runs, names, choice, has_plan=has_plan))


def steps_of(
    store: Store,
    runs: Sequence[pd.Series],
    names: Sequence[str],
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
) -> list[Step]:
    """The same steps, for something else to draw; raises as `timeline` does."""
    shown = _all_shown(store, runs, names, choice, has_plan=has_plan)
    return [step for one in shown for step in one.steps]


def _all_shown(
    store: Store, runs: Sequence[pd.Series], names: Sequence[str], choice: str, *, has_plan: bool
) -> list[_Shown]:
    """Every run that can be drawn. Raises StoreError if none can be, for want of spans."""
    shown, lost = [], []
    for run, name in zip(runs, names, strict=True):
        try:
            shown.append(_shown(store, run, name, choice, has_plan=has_plan))
        except StoreError as error:
            lost.append(error)
    if lost and not shown:
        raise lost[0]
    return shown


def _shown(store: Store, run: pd.Series, name: str, choice: str, *, has_plan: bool) -> _Shown:
    if run["status"] != OK:
        _check_only_last(run, choice, has_plan=has_plan)
        return _shown_of_failed(store, run, f"{name}: {run['status']}")
    steps, spans = steps_of_run(store, run), store.table("spans", [run["run_id"]])
    if steps.empty or spans.empty:
        raise no_spans(store, run)
    number = chosen_step(steps, choice)
    step = steps[steps["step"] == number].iloc[0]
    of_step = spans[spans["step"] == number]
    if compute_spans(of_step).empty:
        raise no_spans(store, run)
    told = facts(run, step, choice)
    drawn = [Step(f"{name} · {told}", of_step)]
    if has_plan:
        title = " · ".join([f"{name}, planned with its own mean costs", *_told_of_plan(run)])
        drawn.append(_planned_step(store, run, title, of_step))
    return _Shown(run, name, told, tuple(drawn))


def _check_only_last(run: pd.Series, choice: str, *, has_plan: bool) -> None:
    """A run that failed has neither measured steps to choose from nor a plan by its own costs."""
    options = {"--step": choice != MEDIAN, "--planned": has_plan}
    for option, is_given in options.items():
        if is_given:
            raise UsageError(
                f"run {run['run_id']}: status is {run['status']}; only the last actions of its "
                f"ranks can be drawn; leave {option} out"
            )


def _shown_of_failed(store: Store, run: pd.Series, name: str) -> _Shown:
    """The last step that anything was computed in, and what was never finished."""
    flight, spans = (store.table(table, [run["run_id"]]) for table in ("flight", "spans"))
    computed = compute_spans(spans)
    if flight.empty and computed.empty:
        check_ok(run, "timeline")
    last = computed["step"].max() if len(computed) else None
    step = Step("", spans[spans["step"] == last], flight)
    where = "" if is_missing(run["error_rank"]) else f" at rank {int(run['error_rank'])}"
    which = "" if last is None else f" · step {last}"
    title = f"failed{where}{which}"
    told = " · ".join([title, *_told_of_failure(run, step)])
    return _Shown(run, name, told, (replace(step, title=f"{name} · {title}"),))


def _told_of_failure(run: pd.Series, step: Step) -> list[str]:
    """How it failed, and how much of the wait at the end is not drawn; too long for a picture."""
    parts = [first_line(run["error"])]
    if step.ended_ns > step.end_ns:
        quiet = _duration(step.ended_ns - step.last_change_ns)
        parts.append(f"ended {quiet} after the last change, off to the right")
    return [part for part in parts if part]


def _duration(ns: int) -> str:
    return milliseconds(ns) if ns < NS_PER_S else f"{ns / NS_PER_S:,.1f} s"


def _drawn(store: Store, shown: Sequence[_Shown]) -> Timeline:
    steps = [step for one in shown for step in one.steps]
    if len(steps) == 1:
        steps = [replace(steps[0], title="")]  # the page's heading says it
    drawn = gantt_with_detail(steps)
    return Timeline(
        " and ".join(one.name for one in shown),
        shown[0].facts if len(shown) == 1 else "",
        drawn.figure,
        drawn.detail,
        tuple(_explanation(store, one.run) for one in shown),
        tuple(str(one.run["run_id"]) for one in shown),
        is_failed=len(shown) == 1 and shown[0].run["status"] != OK,
    )


def _explanation(store: Store, run: pd.Series) -> str:
    if not has_parts(run):
        return ""
    return headline(run, edges_of_run(store, run))


def planned(spans: pd.DataFrame, name: str, facts: str) -> Timeline:
    """The Gantt chart of a simulated step: in ms, as measured ones are, or in s from 1 s."""
    if spans["end_ns"].max() < NS_PER_S:
        drawn = gantt_with_detail([Step("", spans)])
        return Timeline(name, facts, drawn.figure, drawn.detail)
    scaled = spans.assign(start_ns=spans["start_ns"] // 1000, end_ns=spans["end_ns"] // 1000)
    drawn = gantt_with_detail([Step("", scaled)])
    return Timeline(name, facts, _in_seconds(drawn.figure), drawn.detail)


def _in_seconds(figure: go.Figure) -> go.Figure:
    """A figure whose milliseconds are seconds."""
    figure.update_xaxes(ticksuffix=" s")
    for trace in figure.data:
        if trace.hovertemplate:
            trace.hovertemplate = trace.hovertemplate.replace(" ms", " s")
        if trace.type == "bar" and trace.hovertext is not None:
            trace.hovertext = [text.replace(" ms", " s") for text in trace.hovertext]
    if figure.layout.meta and "detail" in figure.layout.meta:
        for trace in figure.layout.meta["detail"]["traces"]:
            said = trace.get("said", {"words": []})
            said["words"] = [text.replace(" ms", " s") for text in said["words"]]
    return figure


def facts(run: pd.Series, step: pd.Series, choice: str = MEDIAN) -> str:
    """What a timeline's heading tells of a step: its own figures, not the run's medians."""
    which = {MEDIAN: ", the median one", SLOWEST: ", the slowest"}.get(choice, "")
    parts = [
        f"step {step['step']}{which}",
        *_told_of_step(step),
        f"theory {percent(run['bubble_fraction_theory'])}",
    ]
    marks = {"not finite": is_not_finite(run), "oversubscribed": is_oversubscribed(run)}
    return " · ".join([*parts, *(mark for mark, is_set in marks.items() if is_set)])


def _told_of_plan(run: pd.Series) -> list[str]:
    planned = {"step_ns": "modelled_step_ns", "bubble_fraction": "modelled_bubble_fraction"}
    return _told_of_step(pd.Series({name: run.get(column) for name, column in planned.items()}))


def _told_of_step(step: pd.Series) -> list[str]:
    """Duration, throughput and bubble of a row of `steps`, as far as they are stored."""
    written = [
        milliseconds(step.get("step_ns")),
        tokens_per_s(step.get("tokens_per_s")),
        f"bubble {percent(step.get('bubble_fraction'))}",
    ]
    return [text for text in written if MISSING not in text]


def groups(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Group]:
    """The timelines of all cases; groups worth comparing first, and the first of them open.

    A case of several launches is shown by the launch of median throughput. Runs whose spans are
    not in the store are left out.
    """
    measured = ok_runs(runs)
    shown = measured.groupby("case_id", sort=False)["tokens_per_s"].transform(_is_median)
    measured = measured[shown.astype(bool)]
    others = [axis for axis in axes if axis != "schedule"]
    titles = pd.Series([settings_text(r, others) for _, r in measured.iterrows()], measured.index)
    members = {title: measured[titles == title] for title in dict.fromkeys(titles)}
    ordered = sorted(members, key=lambda title: _worth_of(members[title]), reverse=True)
    found = [_group(store, title, members[title]) for title in ordered]
    drawn = [group for group in found if group is not None]
    return [replace(group, is_open=number < NUM_OPEN) for number, group in enumerate(drawn)]


def _is_median(values: pd.Series) -> pd.Series:
    """True for one value: the lower of the two middle ones."""
    middle = values.sort_values(kind="stable").index[(len(values) - 1) // 2]
    return pd.Series(values.index == middle, values.index)


def _worth_of(members: pd.DataFrame) -> tuple[bool, int, int, int]:
    """How much a group deserves to be seen first: sound, with rivals, large."""
    first = members.iloc[0]
    is_sound = not any(
        is_oversubscribed(run) or is_not_finite(run) for _, run in members.iterrows()
    )
    num_schedules = int(members["schedule"].nunique())
    return is_sound, num_schedules, int(first["world_size"]), int(first["num_microbatches"])


def _group(store: Store, title: str, members: pd.DataFrame) -> Group | None:
    shown = []
    for _, run in members.iterrows():
        name = axis_text("schedule", run["schedule"])
        with contextlib.suppress(StoreError):
            shown.append(_shown(store, run, name, MEDIAN, has_plan=False))
    return Group(title, _drawn(store, shown), is_open=False) if shown else None
