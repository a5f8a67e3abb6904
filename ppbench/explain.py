"""`ppbench explain`: where a run's idle time went, by rank, and what its step could be instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from engine.plan.lower import Policy
from engine.plan.program import Program, from_json
from ppbench.analysis.attribution import PARTS, PHASES, attribute, figures_of
from ppbench.analysis.costs import stored_costs
from ppbench.analysis.transfers import edges as edges_of
from ppbench.analysis.transfers import messages
from ppbench.analysis.whatif import (
    HALVES_NOTE,
    LIKE_OTHERS,
    NotAsked,
    Posting,
    WhatIf,
    as_modelled,
    needs_halves,
    other_schedules,
    same_program,
    without_standouts,
)
from ppbench.errors import UsageError
from ppbench.format import Format
from ppbench.listing import as_records, render
from ppbench.report.explanation import PART_MEANINGS, PART_NAMES, has_parts, parts_of
from ppbench.report.explanation import explain as sentences_of
from ppbench.report.units import milliseconds, percent
from ppbench.store import Store

PART_COLUMNS = ["part", "per_step_ns", "share_of_bubble", "share_of_rank_time", "meaning"]
BY_RANK_COLUMNS = ["rank", "idle_ns", *PARTS, *PHASES]
EDGE_COLUMNS = [
    "edge",
    "num_bytes",
    "moving_ns",
    "bytes_per_s",
    "sender_waiting_ns",
    "receiver_waiting_ns",
]
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


def explain(name: str, results: Path, how: Format) -> str:
    """The explanation of one run as text. Raises UsageError where there is none."""
    explained = _explained(Store(results), name)
    if how is Format.json:
        return json.dumps(_everything(explained), indent=2, allow_nan=False)
    if how is Format.csv:
        return render(explained.rows, how, [])
    return _for_people(explained, how)


def _explained(store: Store, name: str) -> _Explained:
    run = store.find(name)
    if run["status"] != "ok":
        raise UsageError(f"run {run['run_id']}: status is {run['status']}; nothing to explain")
    posting = Posting(Policy(run["transfer_policy"]), int(run["transfer_look_ahead"]))
    lowered = posting.lower(from_json(run["program"]))
    if has_parts(run):
        rows, edges = (store.table(table, [run["run_id"]]) for table in ("attribution", "edges"))
    else:
        run, rows, edges = _attributed_now(store, run, lowered)
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


def _attributed_now(
    store: Store, run: pd.Series, lowered: Program
) -> tuple[pd.Series, pd.DataFrame, pd.DataFrame]:
    """A run of an older version, with what a newer one would have stored of it."""
    spans, steps = (store.table(table, [run["run_id"]]) for table in ("spans", "steps"))
    if spans.empty:
        raise UsageError(f"run {run['run_id']}: its spans are not in the store; measure it again")
    step_ns = steps.set_index("step")["step_ns"]
    attribution = attribute(spans, lowered, step_ns)
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
        "schedule": run["schedule"],
        "world_size": int(run["world_size"]),
        "num_microbatches": int(run["num_microbatches"]),
        "num_steps": int(rows["step"].nunique()),
        "step_ns": float(run["step_ns"]),
        "bubble_mean": float(run["bubble_mean"]),
        "sentences": _sentences(explained),
        "parts": {name: {"share_of_rank_time": s} for name, s in parts_of(run).items()},
        "all_steps": totals,
        "by_step": as_records(rows.groupby("step", as_index=False).sum().drop(columns="rank")),
        "by_step_and_rank": as_records(rows),
        "op_costs_ns": json.loads(run["op_costs_ns"]),
        "op_variation": float(run["op_variation"]),
        "edges": as_records(explained.edges),
        "modelled": {**asdict(explained.model), "residual": float(run["model_residual"])},
        "what_if": [asdict(answer) for answer in explained.answers],
        "not_asked": [asdict(question) for question in explained.not_asked],
        "notes": explained.notes,
    }


def _sentences(explained: _Explained) -> list[str]:
    """The stored explanation, and what the standouts among stages and links cost."""
    model = explained.model
    standouts = [
        f"With {answer.question} the step would take {milliseconds(answer.step_ns)} as modelled, "
        f"and {milliseconds(model.idle_ns - answer.idle_ns)} less of the ranks' time would be idle."
        for answer in explained.answers
        if answer.question.endswith(LIKE_OTHERS) and answer.step_ns < 0.995 * model.step_ns
    ]
    *most, residual = sentences_of(explained.run, explained.edges)
    return [*most, *standouts, residual]


def _for_people(explained: _Explained, how: Format) -> str:
    run = explained.run
    parts = [
        _title(run),
        "\n".join(_sentences(explained)),
        render(_parts_table(explained), how, PART_COLUMNS),
        "Idle time by rank, mean of a step: its parts, and the same by phase.",
        render(_by_rank(explained.rows), how, BY_RANK_COLUMNS),
    ]
    if not explained.edges.empty:
        parts += ["Messages, mean.", render(_named(explained.edges), how, EDGE_COLUMNS)]
    parts += [
        "What if: the step as modelled, at the costs that were measured.",
        render(_what_if_table(explained), how, WHAT_IF_COLUMNS),
        *explained.notes,
    ]
    return "\n\n".join(parts)


def _title(run: pd.Series) -> str:
    low, high = run["step_ns_low"], run["step_ns_high"]
    interval = "" if pd.isna(low) else f" (95 %: {milliseconds(low)} to {milliseconds(high)})"
    return (
        f"{run['run_id']}: {run['schedule']}, {run['world_size']} ranks, "
        f"{run['num_microbatches']} microbatches; step {milliseconds(run['step_ns'])}{interval}, "
        f"bubble {percent(run['bubble_fraction'])}"
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
                "meaning": PART_MEANINGS[name],
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
