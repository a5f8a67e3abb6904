"""Rows of the store from what the ranks of a case report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ppbench import __version__
from ppbench.analysis.metrics import (
    rank_figures,
    run_figures,
    settled_end_ns,
    step_figures,
)
from ppbench.cautions import cautions_for
from ppbench.config.case import Case
from ppbench.run.durations import simulated
from ppbench.run.environment import code_hash, read_environment
from ppbench.run.job import PEER_LOST, Item, Job, RankError
from ppbench.store import Store


@dataclass(frozen=True)
class RankResult:
    """What one rank measured."""

    facts: dict[str, object]  # columns of `ranks`
    spans: dict[str, list[object]]  # columns of the measured steps' spans
    losses: list[float | None]  # of every step, warm-up included; None off the last stage
    num_tokens: list[int]  # trained on in every step, warm-up included; the same on all ranks


@dataclass(frozen=True)
class CaseResult:
    """What all ranks measured, in order of rank, and what holds for the whole case."""

    ranks: list[RankResult]
    facts: dict[str, object]  # columns of `runs`


def write_result(job: Job, item: Item, run_id: str, result: CaseResult) -> float:
    """Store a case that ran; returns its tokens per second."""
    case = item.case
    spans = pd.concat([pd.DataFrame(rank.spans) for rank in result.ranks], ignore_index=True)
    spans[["start_ns", "end_ns"]] -= spans["start_ns"].min()
    spans["end_ns"] = settled_end_ns(spans)
    tokens_of_step = dict(enumerate(result.ranks[0].num_tokens))
    steps = step_figures(spans, case.world_size, tokens_of_step)
    losses = _losses(result)
    steps["loss"] = [losses[step] for step in steps["step"]]
    by_rank = rank_figures(spans, steps.set_index("step")["step_ns"], case.world_size)
    ranks = [
        {**rank.facts, **figures}
        for rank, figures in zip(result.ranks, by_rank.to_dict("records"), strict=True)
    ]
    peaks = [rank["peak_memory_bytes"] for rank in ranks]
    figures, theory = run_figures(steps), simulated(case)
    run = {
        **_row_of(job, item),
        **result.facts,
        **figures,
        "run_id": run_id,
        "status": "ok",
        "tokens_per_step": int(steps["num_tokens"].median()),
        "bubble_fraction_theory": theory.bubble_fraction,
        "planned_step_ns": theory.makespan_ns if case.is_emulated else None,
        "peak_memory_bytes": max((p for p in peaks if p is not None), default=None),
        "peak_held_microbatches": max(rank["peak_held_microbatches"] for rank in ranks),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "cautions": _cautions(item, figures, theory.makespan_ns),
    }
    Store(Path(job.results)).write_run(run, steps, ranks, spans)
    return figures["tokens_per_s"]


def _losses(result: CaseResult) -> list[float | None]:
    """Of every step, from the rank that has the last stage; all None where there is none."""
    with_loss = (rank.losses for rank in result.ranks if rank.losses[0] is not None)
    return next(with_loss, result.ranks[0].losses)


def close_run(job: Job, item: Item, run_id: str, errors: list[RankError]) -> tuple[str, str]:
    """Account for a run whose workers died; returns its status and why, in a line.

    It is `ok` if its row was stored before they died. Otherwise it failed: `errors` has the cause
    first, and when no rank left more than the loss of a peer, a worker was killed or crashed.
    """
    store = Store(Path(job.results))
    if store.has_run(run_id):
        return "ok", "its workers died after it was stored"
    status = errors[0].status if errors else PEER_LOST
    lines = [f"rank {error.rank}: {error.message}\n{error.traceback}" for error in errors[:1]]
    if status == PEER_LOST:
        lines.insert(0, "a worker died without a Python error: it was killed, or crashed")
    run = {**_row_of(job, item), "run_id": run_id, "status": status, "error": "\n".join(lines)}
    store.write_run({**run, "cautions": ""}, pd.DataFrame(), [], pd.DataFrame())
    return status, lines[0].splitlines()[0]


def _row_of(job: Job, item: Item) -> dict[str, object]:
    """What is known of a run before it has begun."""
    environment, commit, case = read_environment(), job.commit, item.case
    return {
        "sweep_id": job.sweep_id,
        "sweep_name": job.sweep_name,
        "sweep_file": job.sweep_file,
        "resume_key": item.resume_key,
        "case_id": case.case_id,
        "launch": item.launch,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **case.settings(),
        "tokens_per_step": case.tokens_per_step,
        **item.measure.settings(),
        "commit": None if commit is None else commit.commit,
        "branch": None if commit is None else commit.branch,
        "is_dirty": None if commit is None else commit.is_dirty,
        "fingerprint": environment.fingerprint(
            case.device, case.world_size, case.launch_threads_per_rank
        ),
        "environment": environment.as_json(),
        "code": code_hash(),
        "ppbench_version": __version__,
    }


def _is_oversubscribed(case: Case) -> bool:
    environment = read_environment()
    if case.is_emulated:
        return False  # ranks sleep
    if case.device == "cuda":
        return environment.shares_gpus(case.device, case.world_size)
    return case.world_size * case.launch_threads_per_rank > environment.num_cores


def _cautions(item: Item, figures: Mapping[str, float], planned_ns: int) -> str:
    case, measure = item.case, item.measure
    found = cautions_for(
        is_oversubscribed=_is_oversubscribed(case),
        warmup_steps=measure.warmup_steps,
        num_steps=measure.steps,
        relative_deviation=figures["step_relative_deviation"],
        over_plan=figures["step_ns"] / planned_ns if case.is_emulated else 1.0,
    )
    return ",".join(caution.name for caution in found)
