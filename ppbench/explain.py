"""`ppbench explain`: where a run's idle time went, by rank, and what its step could be instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pandas as pd

from ppbench.analysis.attribution import PARTS, PHASES, figures_of
from ppbench.analysis.costs import slow_link, slow_stage, stored_costs
from ppbench.analysis.transfers import edges as edges_of
from ppbench.analysis.transfers import messages
from ppbench.analysis.whatif import (
    HALVES_NOTE,
    LIKE_OTHERS,
    NotAsked,
    WhatIf,
    as_modelled,
    needs_halves,
    other_schedules,
    same_program,
    stored_program,
    without_standouts,
)
from ppbench.errors import StoreError, UsageError
from ppbench.format import Format
from ppbench.listing import as_records, render
from ppbench.report.cases import cautions_of, settings_text, usual_axes
from ppbench.report.explanation import PART_NAMES, has_parts, parts_of
from ppbench.report.explanation import explain as sentences_of
from ppbench.report.recovered import (
    attribution_of_run,
    edges_of_run,
    is_complete,
    steps_of_run,
)
from ppbench.report.units import is_missing, milliseconds, percent
from ppbench.store import Store, no_spans

PART_COLUMNS = ["part", "per_step_ns", "share_of_bubble", "share_of_rank_time"]
BY_RANK_COLUMNS = ["rank", "idle_ns", *PARTS, *PHASES]
EDGE_COLUMNS = [
    "edge",
    "num_bytes",
    "moving_ns",
    "bytes_per_s",
    "sender_waiting_ns",
    "receiver_waiting_ns",
]
BY_RANK_HEADING = (
    "Idle time by rank, mean of a step: its parts, and the same by phase. The schedule, transfers "
    "and\nlaunch gaps lengthen the step, so they cost every rank the same."
)
WHAT_IF_COLUMNS = ["what_if", "step_ns", "change", "idle_ns", "bubble_fraction", "held"]


@dataclass(frozen=True)
class _Explained:
    """All that is known of a run's idle time."""

    run: pd.Series
    rows: pd.DataFrame  # by step and rank
    edges: pd.DataFrame
    model: WhatIf
    answers: list[WhatIf]
    not_asked: list[NotAsked]
    notes: list[str]


def explain(name: str, store: Store, how: Format) -> str:
    """The explanation of one run as text. Raises UsageError where there is none."""
    explained = _explained(store, name)
    if how is Format.json:
        return json.dumps(_everything(explained), indent=2, allow_nan=False)
    if how is Format.csv:
        return render(explained.rows, how, [])
    return _for_people(explained, how)


def _explained(store: Store, name: str) -> _Explained:
    run = store.find(name)
    if run["status"] != "ok":
        raise UsageError(
            f"run {run['run_id']}: status is {run['status']}, so there is nothing to explain; "
            f"why it failed: ppbench show {run['run_id']}"
        )
    lowered, posting = stored_program(run)
    if has_parts(run):
        rows, edges = _stored_rows(store, run), edges_of_run(store, run)
        if rows.empty or not is_complete(run, edges):
            raise StoreError(
                f"run {run['run_id']}: its tables attribution and edges are not both in the store, "
                "nor the spans that they follow from (missing or unreadable); measure it again "
                "with: ppbench sweep FILE --rerun"
            )
    else:
        run, rows, edges = _attributed_now(store, run)
    costs = stored_costs(run, edges)
    others = list(other_schedules(lowered, costs, posting))
    return _Explained(
        run,
        rows.drop(columns=["run_id", "schema_version"], errors="ignore"),
        edges.drop(columns=["run_id", "schema_version"], errors="ignore"),
        as_modelled(lowered, costs),
        [
            *without_standouts(lowered, costs),
            *same_program(lowered, costs),
            *(o for o in others if isinstance(o, WhatIf)),
        ],
        [o for o in others if isinstance(o, NotAsked)],
        [HALVES_NOTE] if needs_halves(costs) else [],
    )


def _stored_rows(store: Store, run: pd.Series) -> pd.DataFrame:
    """Idle time by step and rank: as stored, else from the spans; none without either."""
    rows = store.table("attribution", [run["run_id"]])
    if len(rows):
        return rows
    made = attribution_of_run(store, run)
    return rows if made is None else made.rows


def _attributed_now(store: Store, run: pd.Series) -> tuple[pd.Series, pd.DataFrame, pd.DataFrame]:
    """A run of an older version, with what a newer one would have stored of it."""
    spans, steps = store.table("spans", [run["run_id"]]), steps_of_run(store, run)
    attribution = attribution_of_run(store, run)
    if attribution is None:
        raise no_spans(store, run)
    step_ns = steps.set_index("step")["step_ns"]
    spans = spans[spans["step"].isin(steps["step"])]
    figures = figures_of(attribution, spans, step_ns)
    complete = run.astype(object)
    for column, value in figures.items():
        complete[column] = value
    return complete, attribution.rows, edges_of(messages(spans))


def _everything(explained: _Explained) -> dict[str, object]:
    """All that programs may want to know. Parts are whole nanoseconds, summed over ranks."""
    run, rows = explained.run, explained.rows
    totals = {column: int(rows[column].sum()) for column in ("idle_ns", *PARTS, *PHASES)}
    return {
        "run_id": run["run_id"],
        "schema_version": int(run["schema_version"]),
        "model": run["model_preset"],
        "device": run["device"],
        "schedule": run["schedule"],
        "world_size": int(run["world_size"]),
        "num_microbatches": int(run["num_microbatches"]),
        "num_steps": int(rows["step"].nunique()),
        "num_outliers": None if is_missing(run["num_outliers"]) else int(run["num_outliers"]),
        "cautions": cautions_of(run),
        "step_ns": float(run["step_ns"]),
        "step_ns_interval": None
        if is_missing(run["step_ns_low"])
        else [float(run["step_ns_low"]), float(run["step_ns_high"])],
        "bubble_fraction": float(run["bubble_fraction"]),
        "bubble_mean": float(run["bubble_mean"]),
        "cause": _cause(explained),
        "sentences": _sentences(explained),
        "parts": {
            name: {"share_of_rank_time": share, "total_ns": totals[f"{name}_ns"]}
            for name, share in parts_of(run).items()
        },
        "all_steps": totals,
        "by_step": as_records(rows.groupby("step", as_index=False).sum().drop(columns="rank")),
        "by_step_and_rank": as_records(rows),
        "op_costs_ns": json.loads(run["op_costs_ns"]),
        "op_variation": float(run["op_variation"]),
        "edges": as_records(explained.edges),
        "modelled": {**asdict(explained.model), "residual": float(run["model_residual"])},
        "what_if": [
            {**asdict(answer), "change": answer.step_ns / explained.model.step_ns - 1}
            for answer in explained.answers
        ],
        "not_asked": [asdict(question) for question in explained.not_asked],
        "notes": explained.notes,
    }


def _cause(explained: _Explained) -> dict[str, object]:
    """The largest part that is not the schedule's, and the stage or link that alone is slow."""
    parts = parts_of(explained.run)
    costs = stored_costs(explained.run, explained.edges)
    slow = {"imbalance": slow_stage, "transfer": slow_link}
    part = max((name for name in parts if name != "structure"), key=lambda name: parts[name])
    standout = slow[part](costs) if part in slow else None
    return {
        "part": part,
        "share_of_rank_time": parts[part],
        "stage_or_link": None if standout is None else standout.index,
        "ns": None if standout is None else standout.ns,
        "others_ns": None if standout is None else standout.others_ns,
    }


def _sentences(explained: _Explained) -> list[str]:
    """The stored explanation, and what the standouts among stages and links cost."""
    model = explained.model
    standouts = [
        f"Were {answer.question}, the step would take {milliseconds(answer.step_ns)} as modelled, "
        f"and {milliseconds(model.idle_ns - answer.idle_ns)} less of the ranks' time would be idle."
        for answer in explained.answers
        if answer.question.endswith(LIKE_OTHERS)
    ]
    *most, residual = sentences_of(explained.run, explained.edges)
    return [*most, *standouts, residual]


def _for_people(explained: _Explained, how: Format) -> str:
    run = explained.run
    parts = [
        _title(run),
        "\n".join([*_sentences(explained), *_doubts(run)]),
        render(_parts_table(explained), how, PART_COLUMNS),
        BY_RANK_HEADING,
        render(_by_rank(explained.rows), how, BY_RANK_COLUMNS),
    ]
    if not explained.edges.empty:
        parts += ["Messages, mean.", render(_named(explained.edges), how, EDGE_COLUMNS)]
    if run["world_size"] > 1:
        parts += [
            "What if: the step as modelled, at the costs that were measured.",
            render(_what_if_table(explained), how, WHAT_IF_COLUMNS),
            *explained.notes,
            *(f"{one.question} does not fit: {one.reason}." for one in explained.not_asked),
        ]
    return "\n\n".join(parts)


def _doubts(run: pd.Series) -> list[str]:
    """What the figures above are to be taken with."""
    doubts = []
    if (num_outliers := run["num_outliers"]) and not is_missing(num_outliers):
        stand, are = ("step stands", "is") if num_outliers == 1 else ("steps stand", "are")
        doubts.append(f"{num_outliers:.0f} {stand} apart and {are} in these means.")
    if names := cautions_of(run):
        doubts.append(f"Cautions: {', '.join(names)}; ppbench report tells what they mean.")
    return doubts


_IN_TITLE = ("schedule", "world_size", "num_microbatches")


def _title(run: pd.Series) -> str:
    low, high = run["step_ns_low"], run["step_ns_high"]
    interval = "" if pd.isna(low) else f" (95 %: {milliseconds(low)} to {milliseconds(high)})"
    settings = settings_text(run, usual_axes(run, _IN_TITLE))
    return (
        f"{run['run_id']}: {settings}; median step "
        f"{milliseconds(run['step_ns'])}{interval}, median bubble {percent(run['bubble_fraction'])}"
    )


def _parts_table(explained: _Explained) -> pd.DataFrame:
    rows, bubble = explained.rows, float(explained.run["bubble_mean"])
    num_steps = rows["step"].nunique()
    return pd.DataFrame(
        [
            {
                "part": PART_NAMES[name],
                "per_step_ns": rows[f"{name}_ns"].sum() / num_steps,
                "share_of_bubble": share / bubble if bubble else 0.0,
                "share_of_rank_time": share,
            }
            for name, share in parts_of(explained.run).items()
        ]
    )


def _by_rank(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop(columns="step").groupby("rank", as_index=False).mean()


def _named(edges: pd.DataFrame) -> pd.DataFrame:
    names = [f"{s} to {t}" for s, t in zip(edges["source"], edges["target"], strict=True)]
    return edges.assign(edge=names)


def _what_if_table(explained: _Explained) -> pd.DataFrame:
    model = explained.model
    rows: list[Mapping[str, object]] = [
        {
            "what_if": answer.question,
            "step_ns": answer.step_ns,
            "change": answer.step_ns / model.step_ns - 1,
            "idle_ns": answer.idle_ns,
            "bubble_fraction": answer.bubble_fraction,
            "held": answer.held,
        }
        for answer in (model, *explained.answers)
    ]
    return pd.DataFrame(rows)
