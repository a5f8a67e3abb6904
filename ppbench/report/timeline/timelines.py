"""Timelines: steps of runs stacked on one time axis, in groups that differ only in schedule.

The runs of a group share one figure, since AFAB and 1F1B compare at a glance only on one scale.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.program import Program, from_json
from ppbench.analysis.metrics import MEDIAN, SLOWEST, chosen_step, compute_spans, step_starts
from ppbench.analysis.pairs import stages_of_pairs
from ppbench.analysis.replicas import slowest_replica
from ppbench.analysis.transfers import waiting_ns
from ppbench.display.cases import (
    Axes,
    axis_text,
    case_text,
    is_not_finite,
    is_oversubscribed,
    settings_text,
)
from ppbench.display.document import Picture, of_page
from ppbench.display.explanation import has_parts, headline
from ppbench.display.fields import figure
from ppbench.display.units import MISSING, is_missing, milliseconds, percent
from ppbench.errors import StoreError, UsageError, first_line
from ppbench.report.scripts import pack_bytes
from ppbench.report.timeline.drawing import MS, SECONDS, Drawing, Packed, Unit, packed
from ppbench.report.timeline.marks import Ints, Step
from ppbench.store import Store, check_ok, missing_spans

OK = "ok"
NUM_OPEN = 2  # groups that are open initially
_ACTION = ["op", "stage", "microbatch"]
_WORK = [op.value for op in (*COMPUTE_OPS, Op.OPT)]
_HTML = """\
<div class="chart" role="figure" aria-label="{{ label }}" data-timeline="{{ name }}" \
style="min-height: {{ height }}px"></div>"""


@dataclass(frozen=True)
class Timeline:
    """Measured or planned steps as a page draws them, with a title and facts."""

    name: str
    facts: str
    packed: Packed
    explanations: tuple[str, ...] = ()  # where each run's idle time went; "" if unknown
    run_ids: tuple[str, ...] = ()
    is_failed: bool = False  # a single failed run, with its finished actions

    @property
    def is_of_replicas(self) -> bool:
        return "replicas" in self.packed.meta

    @property
    def is_in_a_row(self) -> bool:
        """Whether steps beside the one that it is of are drawn."""
        return any("windows" in step for step in self.packed.meta["steps"])

    def picture(self, name: str, label: str = "") -> Picture:
        """Return where a page that has it by this name draws it; `label` is read aloud."""
        label = label or f"Timeline of {self.name}"
        return of_page(_HTML, label=label, name=name, height=self.packed.meta["height"])

    @cached_property
    def meta(self) -> str:
        """What a page reads before the columns, packed."""
        return pack_bytes(json.dumps(self.packed.meta, separators=(",", ":")).encode())

    @cached_property
    def columns(self) -> str:
        return pack_bytes(self.packed.columns)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in schedule or policy (or launch), on one time axis."""

    title: str
    timeline: Timeline
    is_open: bool


class _Drawn(NamedTuple):
    """What is drawn of a run: a measured step and, if asked for, the planned one."""

    run: pd.Series
    name: str
    facts: str
    steps: tuple[Step, ...]

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])


class _Measured(NamedTuple):
    """What is stored of the chosen step of a run and of those beside it."""

    steps: pd.DataFrame  # of the run
    number: int
    spans: pd.DataFrame


def timeline(
    store: Store,
    runs: Sequence[pd.Series],
    names: Sequence[str],
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
) -> Timeline:
    """Draw a step of each run, one above the other, followed by its plan if `has_plan`.

    A failed run shows the finished and the unfinished actions of its last step. Raises StoreError
    if there are no spans, UsageError for a step that was not measured, for a run without a plan and
    for one that failed before there was anything to draw.
    """
    drawn = _drawn_of(store, runs, names, choice, has_plan=has_plan)
    return _timeline(drawn, {own.run_id: _explanation(store, own.run) for own in drawn})


def steps_of(
    store: Store,
    runs: Sequence[pd.Series],
    names: Sequence[str],
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
) -> list[Step]:
    """Return the steps that `timeline` draws; raises as `timeline` does."""
    drawn = _drawn_of(store, runs, names, choice, has_plan=has_plan)
    return [step for own in drawn for step in own.steps]


def _drawn_of(
    store: Store, runs: Sequence[pd.Series], names: Sequence[str], choice: str, *, has_plan: bool
) -> list[_Drawn]:
    """Return what is drawn of every run that has spans. Raises StoreError if none has."""
    drawn, errors = [], []
    measured = _measured(store, runs, choice)
    for run, name in zip(runs, names, strict=True):
        try:
            drawn.append(_drawn_of_run(store, run, name, choice, measured, has_plan=has_plan))
        except StoreError as error:
            errors.append(error)
    if errors and not drawn:
        raise errors[0]
    return drawn


def _measured(store: Store, runs: Sequence[pd.Series], choice: str) -> dict[str, _Measured]:
    """Read the chosen step of each run that has computations in it, all at once."""
    run_ids = [str(run["run_id"]) for run in runs if run["status"] == OK]
    steps = {str(key): own for key, own in store.table("steps", run_ids).groupby("run_id")}
    chosen = {run_id: chosen_step(own, choice) for run_id, own in steps.items()}
    read = store.spans_of_steps({i: [n - 1, n, n + 1] for i, n in chosen.items()})
    return {
        str(key): _Measured(steps[str(key)], number, own)
        for key, own in read.groupby("run_id")
        if len(compute_spans(own[own["step"] == (number := chosen[str(key)])]))
    }


def _drawn_of_run(
    store: Store,
    run: pd.Series,
    name: str,
    choice: str,
    measured: Mapping[str, _Measured],
    *,
    has_plan: bool,
) -> _Drawn:
    if run["status"] != OK:
        # It has neither measured steps nor a plan.
        for option, is_given in {"--step": choice != MEDIAN, "--planned": has_plan}.items():
            if is_given:
                raise UsageError(
                    f"run {run['run_id']}: status is {run['status']}; only the last actions of its "
                    f"ranks can be drawn; leave {option} out"
                )
        return _drawn_of_failed(store, run, f"{name}: {run['status']}")
    if (read := measured.get(str(run["run_id"]))) is None:
        raise missing_spans(run)
    steps = read.steps.set_index("step", drop=False)
    names = {each: f"step {each}" for each in (read.number - 1, read.number, read.number + 1)}
    written = run.get("program")
    program = from_json(written) if isinstance(written, str) else None
    shown = step_in_a_row(with_pairs(read.spans, program), read.number, names, steps["step_ns"])
    whose = f"replica {shown.replica} of {len(shown.others) + 1}, the slowest"
    text = facts(run, steps.loc[[read.number]].iloc[0], choice, whose if shown.others else "")
    shown = shown.titled(f"{name} · {text}")
    if not has_plan:
        return _Drawn(run, name, text, (shown,))
    spans = store.table("planned", [run["run_id"]])
    spans = spans[spans["replica"].eq(shown.replica)]
    if not shown.beside:
        spans = spans[spans["step"].eq(0)]
    if spans.empty:
        raise UsageError(
            f"run {run['run_id']} stored no plan; leave --planned out, or measure it again "
            "with: ppbench sweep FILE --rerun"
        )
    # Messages have the bytes of the measured step, whose replica it is.
    sizes = shown.spans.drop_duplicates(_ACTION).set_index(_ACTION)["num_bytes"]
    actions = pd.MultiIndex.from_frame(spans[_ACTION])
    spans = spans.assign(num_bytes=sizes.reindex(actions).fillna(0).to_numpy(int))
    modelled = {"step_ns": "modelled_step_ns", "bubble_fraction": "modelled_bubble_fraction"}
    figures = pd.Series({key: run.get(column) for key, column in modelled.items()})
    title = " · ".join([f"{name}, planned with its own mean costs", *_step_facts(figures)])
    planned = planned_step(with_pairs(spans, program)).titled(title)
    return _Drawn(run, name, text, (shown, planned))


def with_pairs(spans: pd.DataFrame, program: Program | None) -> pd.DataFrame:
    """Return the spans with the column `is_paired`, where the program has pairs."""
    if program is None or not program.paired:
        return spans
    is_half = stages_of_pairs(spans, program).notna()
    return spans.assign(is_paired=is_half & (spans["op"] == Op.F.value))


def step_in_a_row(
    spans: pd.DataFrame, number: int, names: Mapping[int, str], step_ns: pd.Series | None = None
) -> Step:
    """Return a step between those beside it, as far as there are spans of these.

    Each rank begins a step when it has ended the one before. Of measured steps, `step_ns` tells
    whether they did: after a pause, a step is not as long as from the end of the one before.
    """
    own, edges = spans[spans["step"] == number], _edges(spans, list(names))
    begin_ns, slowest = int(compute_spans(own)["start_ns"].min()), 0
    if own["replica"].any():
        own = own.assign(waiting_ns=own["waiting_ns"].fillna(waiting_ns(own)))
        begin_ns, slowest = int(step_starts(own).min()), slowest_replica(own)

    def follows(step: int) -> bool:
        if not {step - 1, step} <= set(edges) or (edges[step - 1][1] > edges[step][0]).any():
            return False
        lasted = edges[step][1] - edges[step - 1][1]
        return step_ns is None or bool(lasted.sum() // lasted.size == step_ns.get(step))

    period_ns, windows = None, {}
    has_before, has_after = follows(number), follows(number + 1)
    if has_before or has_after:
        begins, ends = edges[number]
        windows[number] = np.minimum(begins, begin_ns), ends
        if has_before:
            before_ns = edges[number - 1][1]
            windows |= {number - 1: edges[number - 1], number: (before_ns, ends)}
            period_ns = round(float((ends - before_ns).mean()))
        if has_after:
            windows[number + 1] = ends, edges[number + 1][1]

    def of_replica(replica: int) -> Step:
        """Return the step of a replica with those of it that are beside it."""
        found = {
            each: Step(
                "",
                rows[rows["replica"] == replica],
                replica=replica,
                begin_ns=begin_ns,
                windows_ns=tuple(edge[replica] for edge in windows[each]) if windows else None,
                name=names[each] if windows else "",
            )
            for each in sorted(windows) or [number]
            for rows in [own if each == number else spans[spans["step"] == each]]
        }
        step = found.pop(number)
        return replace(step, beside=tuple(found.values()), period_ns=period_ns)

    others = [int(replica) for replica in sorted(own["replica"].unique()) if replica != slowest]
    return replace(of_replica(slowest), others=tuple(map(of_replica, others)))


def _edges(spans: pd.DataFrame, steps: Sequence[int]) -> dict[int, tuple[Ints, Ints]]:
    """Return when each rank begins and ends its work in each step, by replica and rank.

    Steps in which one of them has no work are left out.
    """
    columns = ["replica", "rank", "step", "start_ns", "end_ns"]
    work = spans.loc[spans["op"].isin(_WORK), columns].to_numpy(np.int64)
    shape = int(spans["replica"].max()) + 1, int(spans["rank"].max()) + 1
    edges = {}
    for number in steps:
        replica, rank, _, start_ns, end_ns = work[work[:, 2] == number].T
        if len(np.unique(replica * shape[1] + rank)) == shape[0] * shape[1]:
            begins, ends = (np.full(shape, edge) for edge in (start_ns.max(), end_ns.min()))
            np.minimum.at(begins, (replica, rank), start_ns)
            np.maximum.at(ends, (replica, rank), end_ns)
            edges[number] = begins, ends
    return edges


def _drawn_of_failed(store: Store, run: pd.Series, name: str) -> _Drawn:
    """Return the last step with any computation, and the unfinished actions."""
    flight, spans = (store.table(table, [run["run_id"]]) for table in ("flight", "spans"))
    replica = failed_replica(flight)
    whose = f" · replica {replica}" if flight["replica"].any() else ""
    spans, flight = (rows[rows["replica"].eq(replica)] for rows in (spans, flight))
    computed = compute_spans(spans)
    if flight.empty and computed.empty:
        check_ok(run, "timeline")
    last = computed["step"].max() if len(computed) else None
    step = Step("", spans[spans["step"] == last], flight)
    where = "" if is_missing(run["error_rank"]) else f" at rank {int(run['error_rank'])}"
    which = "" if last is None else f" · step {last}"
    title = f"failed{where}{which}{whose}"
    parts = [title, first_line(run["error"])]
    if step.ended_ns > step.end_ns:
        quiet_ns = step.ended_ns - step.last_change_ns
        is_short = quiet_ns < SECONDS.ns
        quiet = milliseconds(quiet_ns) if is_short else f"{quiet_ns / SECONDS.ns:,.1f} s"
        parts.append(f"ended {quiet} after the last event, beyond the right edge")
    text = " · ".join(filter(None, parts))
    return _Drawn(run, name, text, (replace(step, title=f"{name} · {title}"),))


def failed_replica(flight: pd.DataFrame) -> int:
    """Return the replica of the first rank that is gone, or else that waits for no other."""
    is_gone = flight["process"].isin(["stopped", "dead"])
    for rows in (flight[is_gone], flight[flight["waits_for_rank"].isna()], flight):
        if len(rows):
            return int(rows["replica"].iloc[0])
    return 0


def _timeline(drawn: Sequence[_Drawn], explanations: Mapping[str, str]) -> Timeline:
    steps = [step for own in drawn for step in own.steps]
    if len(steps) == 1:
        steps = [steps[0].titled("")]  # it is the page's heading
    return Timeline(
        " and ".join(own.name for own in drawn),
        drawn[0].facts if len(drawn) == 1 else "",
        _packed(steps),
        tuple(explanations[own.run_id] for own in drawn),
        tuple(own.run_id for own in drawn),
        is_failed=len(drawn) == 1 and drawn[0].run["status"] != OK,
    )


def _explanation(store: Store, run: pd.Series) -> str:
    if not has_parts(run):
        return ""
    return headline(run, store.table("edges", [run["run_id"]]))


def _packed(steps: Sequence[Step], unit: Unit = MS) -> Packed:
    """Lay out and pack steps; a single one of replicas has the others behind it."""
    return packed(Drawing(steps, unit, others=steps[0].others if len(steps) == 1 else ()))


def small(steps: Sequence[Step]) -> Timeline:
    """Draw the computations of steps, without those beside them, on one time axis."""
    facts = [step.title.split(" · ") for step in steps]
    titles = [[one for one in own if not one.startswith("step ")] for own in facts]  # short ones
    alone = [
        replace(step, title=" · ".join(title), beside=(), others=(), windows_ns=None)
        for step, title in zip(steps, titles, strict=True)
    ]
    names = " and ".join(name for name, *_ in titles)
    return Timeline(f"one step of {names}", "", packed(Drawing(alone, is_small=True)))


def planned(spans: pd.DataFrame, name: str, facts: str) -> Timeline:
    """Draw a simulated step, in ms or, from 1 s on, in s; of replicas, the slowest one's.

    Of steps -1 to 1 of a running training, it is step 0 with the others beside it.
    """
    unit = MS if spans["end_ns"].max() < SECONDS.ns else SECONDS
    return Timeline(name, facts, _packed([planned_step(spans)], unit))


def planned_step(spans: pd.DataFrame) -> Step:
    """A simulated step, of replicas that of the slowest one with the others; in a row, step 0."""
    known = spans if "waiting_ns" in spans else spans.assign(waiting_ns=float("nan"))
    return step_in_a_row(known, 0, {-1: "the step before", 0: "the step", 1: "the step after"})


def facts(run: pd.Series, step: pd.Series, choice: str = MEDIAN, whose: str = "") -> str:
    """Return a timeline's heading: the figures of this step, not the run's medians.

    `whose` step it is comes before them, for a run of replicas.
    """
    which = {MEDIAN: ", the median one", SLOWEST: ", the slowest"}.get(choice, "")
    parts = [
        f"step {step['step']}{which}",
        *([whose] if whose else []),
        *_step_facts(step),
        f"theory {percent(run['bubble_fraction_theory'])}",
    ]
    marks = {"not finite": is_not_finite(run), "oversubscribed": is_oversubscribed(run)}
    return " · ".join([*parts, *(mark for mark, is_set in marks.items() if is_set)])


def _step_facts(step: pd.Series) -> list[str]:
    """Return the duration, throughput and bubble of a row of `steps`, if they are stored."""
    written = [
        milliseconds(step.get("step_ns")),
        figure("tokens_per_s", step.get("tokens_per_s")),
        f"bubble {percent(step.get('bubble_fraction'))}",
    ]
    return [text for text in written if MISSING not in text]


def rivalry(axes: Axes) -> str:
    """Return the setting in which rivals differ: the schedule or, of one schedule, the policy."""
    return "sharding_policy" if "sharding_policy" in axes and "schedule" not in axes else "schedule"


def timelines(
    store: Store, runs: pd.DataFrame, axes: Axes
) -> tuple[dict[str, Timeline], list[Group]]:
    """Draw the median step of each run by itself, by its id, and beside its rivals, in groups.

    Rivals are runs that differ only in `rivalry` or launch. Of each case the launch of median
    throughput is drawn beside the others; the groups most worth comparing come first, and the
    first ones are open. Runs without stored spans are left out.
    """
    rival_axis = rivalry(axes)
    others = [axis for axis in axes if axis != rival_axis]
    settings = runs[["case_id", *others]].to_dict("records")
    titles = np.array([settings_text(run, others) for run in settings], object)
    is_ok = (runs["status"] == "ok").to_numpy(bool)
    speeds = runs[is_ok].sort_values("tokens_per_s", kind="stable").groupby("case_id")
    medians = speeds["run_id"].agg(lambda ids: ids.iloc[(len(ids) - 1) // 2])  # or the lower one
    is_median = runs["run_id"].isin(medians).to_numpy(bool)

    def worth(title: str) -> tuple[bool, int, int, int]:
        """Rank a group: sound runs first, then more schedules, then larger cases."""
        members = runs[(titles == title) & is_median]
        first, rows = members.iloc[0], members[["cautions"]].to_dict("records")
        is_sound = not any(is_oversubscribed(run) or is_not_finite(run) for run in rows)
        num_schedules = int(members["schedule"].nunique())
        return is_sound, num_schedules, int(first["world_size"]), int(first["num_microbatches"])

    every = [run for _, run in runs.iterrows()]
    measured = _measured(store, every, MEDIAN)
    drawable: dict[str, _Drawn] = {}
    for run in every:
        with contextlib.suppress(StoreError, UsageError):
            name = case_text(run, axes)
            own = _drawn_of_run(store, run, name, MEDIAN, measured, has_plan=False)
            drawable[own.run_id] = own
    explanations = {run_id: _explanation(store, own.run) for run_id, own in drawable.items()}
    groups: list[Group] = []
    for title in sorted(dict.fromkeys(titles[is_median]), key=worth, reverse=True):
        members = runs[(titles == title) & is_median]
        together = []
        for run_id, rival in zip(members["run_id"], members[rival_axis], strict=True):
            if (shown := drawable.get(run_id)) is not None:
                name = axis_text(rival_axis, rival)
                steps = (shown.steps[0].titled(f"{name} · {shown.facts}"),)
                together.append(shown._replace(name=name, steps=steps))
        if together:
            line = _timeline(together, explanations)
            groups.append(Group(title, line, is_open=len(groups) < NUM_OPEN))
    return {run_id: _timeline([own], explanations) for run_id, own in drawable.items()}, groups
