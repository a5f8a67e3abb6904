"""Explains a run's idle time by cause and by rank, and models its step under other conditions.

explanation = ppbench.explain("last")
explanation.sentences           # in words
explanation.parts               # schedule, imbalance, transfers, jitter, launch gaps
explanation.what_if             # the modelled step, with other costs and other schedules
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from engine.plan.schedules.registry import SCHEDULES
from ppbench.analysis.attribution import PHASES, REPLICA_PARTS, parts_in
from ppbench.analysis.costs import slow_link, slow_stage, stored_costs
from ppbench.analysis.job_times import times_of
from ppbench.analysis.pairs import IN_ORDER, contention_of, words_of
from ppbench.analysis.policy_whatif import POLICY_NOTE, other_sharing
from ppbench.analysis.running import stored_following
from ppbench.analysis.stragglers import Stragglers, stragglers_of
from ppbench.analysis.whatif import (
    HALVES_NOTE,
    LIKE_OTHERS,
    Inapplicable,
    WhatIf,
    as_modelled,
    needs_halves,
    other_schedules,
    same_program,
    without_outliers,
)
from ppbench.console import note
from ppbench.display.cases import cautions_of, is_time_sliced, settings_text, usual_axes
from ppbench.display.document import Block, Result, Text
from ppbench.display.explanation import PART_NAMES, parts_of
from ppbench.display.explanation import explain as sentences_of
from ppbench.display.replicas import folded, folding_note
from ppbench.display.rows import Rows, as_records
from ppbench.display.tables import ALL_IN_MARKDOWN, Table
from ppbench.display.units import counted, is_missing, milliseconds, percent
from ppbench.errors import StoreError, UsageError
from ppbench.store import Store, missing_spans
from ppbench.store.programs import modelled_run, program_of_run

PART_COLUMNS = ["part", "per_step_ns", "share_of_bubble", "share_of_rank_time"]
EDGE_COLUMNS = [
    *("edge", "num_bytes", "moving_ns", "bytes_per_s"),
    *("sender_waiting_ns", "receiver_waiting_ns"),
]
WHAT_IF_COLUMNS = ["what_if", "step_ns", "change", "idle_ns", "bubble_fraction", "held"]
BY_RANK_HEADING = (
    "Idle time by rank, mean over steps: by part, and by phase. The schedule and "
    "transfers lengthen the step, so they cost every rank the same."
)
BY_STEP_AND_RANK = "by_step_and_rank"
_IN_TITLE = ("schedule", "world_size", "num_microbatches")


@dataclass(frozen=True, eq=False)
class Explanation:
    """The idle time of one run, by cause, step and rank."""

    run: pd.Series
    frame: pd.DataFrame
    """Idle time by step and rank, in whole nanoseconds: its parts, and the same by phase."""
    edges: pd.DataFrame
    """A row per channel: its messages and their speed."""
    model: WhatIf
    """The modelled step, at the measured costs."""
    answers: list[WhatIf]
    """The modelled step with other costs, and under other schedules."""
    not_asked: list[Inapplicable]
    notes: list[str]

    def __repr__(self) -> str:
        return f"Explanation({self.title})"

    def __str__(self) -> str:
        return "\n".join([self.title, *self.sentences, *self.doubts])

    @property
    def title(self) -> str:
        """The run, its workload, its median step and bubble."""
        run = self.run
        low, high = run["step_ns_low"], run["step_ns_high"]
        interval = "" if pd.isna(low) else f" (95 %: {milliseconds(low)} to {milliseconds(high)})"
        settings = settings_text(run, usual_axes(run, _IN_TITLE))
        return (
            f"{run['run_id']}: {settings}; median step {milliseconds(run['step_ns'])}{interval}, "
            f"median bubble {percent(run['bubble_fraction'])}"
        )

    @property
    def sentences(self) -> list[str]:
        """The explanation in words, with the cost of a slow stage or link."""
        standouts = [
            f"With {answer.question}, the model predicts a step of {milliseconds(answer.step_ns)}, "
            f"and {milliseconds(self.model.idle_ns - answer.idle_ns)} less idle time of the ranks."
            for answer in self.answers
            if answer.question.endswith(LIKE_OTHERS)
        ]
        *most, residual = sentences_of(self.run, self.edges)
        return [*most, *standouts, residual]

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the figures: outliers among the steps, and the run's cautions."""
        doubts = []
        if (num_outliers := self.run["num_outliers"]) and not is_missing(num_outliers):
            doubts.append(f"These means include {counted(int(num_outliers), 'outlying step')}.")
        if names := cautions_of(self.run):
            doubts.append(f"Cautions: {', '.join(names)}; ppbench report explains them.")
        return doubts

    @property
    def parts(self) -> pd.DataFrame:
        """A row per cause of idle time, as means over steps."""
        bubble, num_steps = float(self.run["bubble_mean"]), self.frame["step"].nunique()
        return pd.DataFrame(
            [
                {
                    "part": PART_NAMES[name],
                    "per_step_ns": self.frame[f"{name}_ns"].sum() / num_steps,
                    "share_of_bubble": share / bubble if bubble else 0.0,
                    "share_of_rank_time": share,
                }
                for name, share in parts_of(self.run).items()
            ]
        )

    @property
    def ranks(self) -> pd.DataFrame:
        """A row per rank, as means over steps."""
        return self.frame.drop(columns="step").groupby(["replica", "rank"], as_index=False).mean()

    @property
    def what_if(self) -> pd.DataFrame:
        """A row per modelled step, the one at the measured costs first."""
        rows: list[Mapping[str, object]] = [
            {
                "what_if": answer.question,
                "step_ns": answer.step_ns,
                "change": answer.step_ns / self.model.step_ns - 1,
                "idle_ns": answer.idle_ns,
                "bubble_fraction": answer.bubble_fraction,
                "held": answer.held,
            }
            for answer in (self.model, *self.answers)
        ]
        return pd.DataFrame(rows)

    @property
    def result(self) -> Result:
        """The document, with all values as its data."""
        data = self.as_dict()
        del data[BY_STEP_AND_RANK]
        return Result(self._blocks(), Rows.of(self.frame), data, key=BY_STEP_AND_RANK)

    def _repr_html_(self) -> str:
        return self.result.html()

    def _blocks(self) -> list[Block]:
        def table(frame: pd.DataFrame, columns: Sequence[str], *essential: str) -> Table:
            return Table(Rows.of(frame), columns, essential, remedy=ALL_IN_MARKDOWN)

        blocks: list[Block] = [
            Text(self.title),
            Text([*self.sentences, *self.doubts]),
            table(self.parts, PART_COLUMNS),
            Text(BY_RANK_HEADING),
        ]
        for kinds in (parts_in(self.frame), PHASES):  # so that each adds up at any width
            ranks, names = folded(self.ranks, "rank", ["rank", "idle_ns", *kinds], "idle_ns")
            blocks.append(table(ranks, names, *kinds))
        if text := folding_note(self.ranks, "rank"):
            blocks.append(Text(text))
        if not (edges := self.edges).empty:
            names = [f"{s} to {t}" for s, t in zip(edges["source"], edges["target"], strict=True)]
            named = edges.assign(edge=names)
            shown = folded(named, "edge", EDGE_COLUMNS, "receiver_waiting_ns")
            blocks += [Text("Messages: means over all measured steps."), table(*shown)]
        if self.run["world_size"] > 1:
            blocks += [
                Text("What if: the modelled step, at the measured costs."),
                table(self.what_if, WHAT_IF_COLUMNS),
                *map(Text, self.notes),
                *(Text(f"{one.question} does not fit: {one.reason}.") for one in self.not_asked),
            ]
        return blocks

    def as_dict(self) -> dict[str, object]:
        """All values, as JSON has them; parts are whole nanoseconds, summed over ranks."""
        run, rows, parts = self.run, self.frame, parts_of(self.run)
        low, high = run["step_ns_low"], run["step_ns_high"]
        # The largest cause other than the schedule, and a stage or link that alone is slow.
        cause = max((name for name in parts if name != "structure"), key=lambda name: parts[name])
        slow = {"imbalance": slow_stage, "transfer": slow_link}
        costs = stored_costs(run, self.edges)
        standout = slow[cause](costs) if cause in slow else None
        totals = {
            column: int(rows[column].sum()) for column in ("idle_ns", *parts_in(rows), *PHASES)
        }
        by_step = rows.drop(columns=["rank", "replica"]).groupby("step", as_index=False).sum()
        return {
            "run_id": run["run_id"],
            "model": run["model_preset"],
            "device": run["device"],
            "schedule": run["schedule"],
            "world_size": int(run["world_size"]),
            "num_microbatches": int(run["num_microbatches"]),
            "num_steps": int(rows["step"].nunique()),
            "num_outliers": None if is_missing(run["num_outliers"]) else int(run["num_outliers"]),
            "cautions": cautions_of(run),
            "step_ns": float(run["step_ns"]),
            "step_ns_interval": None if is_missing(low) else [float(low), float(high)],
            "bubble_fraction": float(run["bubble_fraction"]),
            "bubble_mean": float(run["bubble_mean"]),
            "cause": {
                "part": cause,
                "share_of_rank_time": parts[cause],
                "stage_or_link": None if standout is None else standout.index,
                "ns": None if standout is None else standout.ns,
                "others_ns": None if standout is None else standout.others_ns,
            },
            "sentences": self.sentences,
            "parts": {
                name: {"share_of_rank_time": share, "total_ns": totals[f"{name}_ns"]}
                for name, share in parts.items()
            },
            "all_steps": totals,
            "by_step": as_records(by_step),
            BY_STEP_AND_RANK: as_records(rows),
            "op_costs_ns": json.loads(run["op_costs_ns"]),
            "op_variation": float(run["op_variation"]),
            "edges": as_records(self.edges),
            "modelled": {**asdict(self.model), "residual": float(run["model_residual"])},
            "what_if": [
                {**asdict(answer), "change": answer.step_ns / self.model.step_ns - 1}
                for answer in self.answers
            ],
            "not_asked": [asdict(question) for question in self.not_asked],
            "notes": self.notes,
        }


def explain(run: str, *, results: str | Path = "results") -> Explanation:
    """Explain one run, by its id, a unique prefix of it, or `last`.

    Raises UsageError for a run that is not ok, StoreError for one whose spans are lost.
    """
    store = Store(Path(results))
    return _explained(store, store.find(run))


def explanations_of(store: Store, names: Sequence[str]) -> list[Explanation]:
    """The explanations of runs, and of all runs of a sweep of these names.

    Of several runs, those that are not ok are left out, with a note. Raises as `explain` does.
    """
    runs = store.named(names)
    is_ok = runs["status"].eq("ok")
    if not is_ok.any():
        is_ok[:] = True
    for _, run in runs[~is_ok].iterrows():
        note(f"run {run['run_id']}: left out, its status is {run['status']}")
    return [_explained(store, run) for _, run in runs[is_ok].iterrows()]


def stragglers_of_run(store: Store, name: str) -> tuple[str, Stragglers]:
    """The id of a run of a store, and who is slow in it.

    Raises UsageError for a run that is not ok, StoreError for one whose spans are lost.
    """
    run = store.find(name)
    _check_ok(run)
    run_id = str(run["run_id"])
    spans, steps = (store.table(table, [run_id]) for table in ("spans", "steps"))
    if spans.empty:
        raise missing_spans(run)
    # Other cases have their turns between two rounds.
    by_round = steps.sort_values("step").set_index("step")["round"]
    paused = by_round.index[by_round.notna() & by_round.ne(by_round.shift())]
    job = spans, program_of_run(run), int(run["replicas"]), stored_following(run)
    try:
        return run_id, stragglers_of(times_of(*job, after_pause=paused.tolist()))
    except KeyError as error:
        raise StoreError(f"run {run_id}: {error.args[0]} has no span in some step") from None


def _explained(store: Store, run: pd.Series) -> Explanation:
    _check_ok(run)
    tables = ("attribution", "edges", "collectives")
    rows, edges, moved = (store.table(name, [run["run_id"]]) for name in tables)
    is_sent, is_shared = int(run["world_size"]) > 1, int(run["replicas"]) > 1
    has_moved = is_shared and run["mode"] == "train" and run["sharding_policy"] != "none"
    if rows.empty or (is_sent and edges.empty) or (has_moved and moved.empty):
        raise StoreError(
            f"run {run['run_id']}: its tables attribution, edges and collectives are not all in "
            "the store (missing or unreadable); measure it again with: ppbench sweep FILE --rerun"
        )
    model = modelled_run(run, edges, moved)
    others = [*other_sharing(model), *other_schedules(model)]
    # Parts of replicas that the run does not have are left out.
    unused = [part for part in REPLICA_PARTS if part not in parts_in(rows)]
    notes = [HALVES_NOTE] if needs_halves(model.costs.mean) else []
    if text := _pairs_of(store, run):
        notes.append(text)
    if is_shared:
        more = f"Who of its replicas and ranks is slow: ppbench stragglers {run['run_id']}"
        notes += [POLICY_NOTE, more]
    return Explanation(
        run,
        rows.drop(columns=["run_id", *unused], errors="ignore"),
        edges.drop(columns=["run_id"], errors="ignore"),
        as_modelled(model),
        [
            *without_outliers(model),
            *same_program(model),
            *(o for o in others if isinstance(o, WhatIf)),
        ],
        [o for o in others if isinstance(o, Inapplicable)],
        notes,
    )


def _pairs_of(store: Store, run: pd.Series) -> str | None:
    """How the pairs of a forward and a backward went, where the schedule has any."""
    schedule, program = SCHEDULES.get(str(run["schedule"])), program_of_run(run)
    if schedule is None or schedule.pairs is None:
        return None
    if not program.paired:
        return IN_ORDER
    spans = store.table("spans", [run["run_id"]])
    return None if spans.empty else words_of(contention_of(spans, program))


def _check_ok(run: pd.Series) -> None:
    if run["status"] != "ok":
        raise UsageError(
            f"run {run['run_id']}: status is {run['status']}, so there is nothing to explain; "
            f"why it failed: ppbench show {run['run_id']}"
        )
    if is_time_sliced(run):
        raise UsageError(
            f"run {run['run_id']}: its ranks shared a GPU, which computes for one process at a "
            "time, so nobody's idle time is known; use no more ranks on a machine than it has GPUs"
        )
