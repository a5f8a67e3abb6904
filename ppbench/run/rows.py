"""Rows of the store from what the ranks of a case report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from engine.model.answers import FlopFacts
from engine.plan.program import Program, to_json
from engine.plan.spans import COLUMNS
from ppbench import __version__
from ppbench.analysis.attribution import Attribution, attribute, figures_of
from ppbench.analysis.metrics import rank_figures, run_figures, step_figures
from ppbench.analysis.mfu import Peak, mfu_figures
from ppbench.analysis.post_mortem import flight_rows
from ppbench.analysis.stats import LOOK_BACK, has_settled, is_outlier, median_interval
from ppbench.analysis.transfers import (
    Receive,
    edges,
    hastened_end_ns,
    messages,
    settled_end_ns,
    waiting_ns,
)
from ppbench.cautions import cautions_for
from ppbench.config.case import Case
from ppbench.config.possible import program_of
from ppbench.run.agreement import check_first_loss, check_last_loss, must_agree
from ppbench.run.durations import lowered_of, planned_step_ns, simulated
from ppbench.run.environment import code_hash, read_environment, runtime_code
from ppbench.run.evidence import Judgement
from ppbench.run.job import Begun, Item, Job
from ppbench.run.not_finite import NotFinite, columns_of, first_of
from ppbench.run.telemetry import ROW_COLUMNS, Figures, Summary, is_disturbed, is_throttled
from ppbench.run.verification.record import NOT_VERIFIED, Verified
from ppbench.store import Store


@dataclass(frozen=True)
class RankResult:
    """What one rank measured."""

    facts: dict[str, object]  # columns of `ranks`
    spans: dict[str, list[object]]  # columns of the measured steps' spans
    losses: list[float | None]  # of every step, warm-up included; None off the last stage
    num_tokens: list[int]  # trained on in every step, warm-up included; the same on all ranks
    telemetry: list[Figures] = field(default_factory=list)  # samples of the node, from its first
    summary: Summary = field(default_factory=Summary)  # of the node and the rank's GPU
    memory: list[tuple[int, int]] = field(default_factory=list)  # from when on, how many bytes
    peak: tuple[str, Peak] | None = None  # the device's name and what it could compute
    early: set[Receive] = field(default_factory=set)  # was there when the rank asked for it
    not_finite: NotFinite | None = None  # where this rank first saw NaN or infinity


@dataclass(frozen=True)
class CaseResult:
    """What all ranks measured, in order of rank, and what holds for the whole case."""

    ranks: list[RankResult]
    facts: dict[str, object]  # columns of `runs`
    warmup_step_ns: list[int]  # of the steps before those that were measured, on rank 0
    flops: FlopFacts | None = None  # of a token; None where nothing is computed
    lowered: Program | None = None  # what was run; None: the case's own program
    expected_loss: float | None = None  # of the first step; None where none is known
    verified: Verified = NOT_VERIFIED


def write_result(job: Job, item: Item, begun: Begun, result: CaseResult) -> float:
    """Store a case that ran; returns its tokens per second.

    Raises DisagreementError for a run that trained something else than it should.
    """
    case, store = item.case, Store(Path(job.results))
    program = result.lowered if must_agree(case) and result.lowered else program_of(case)
    losses = _losses(item, result)
    if result.expected_loss is not None:
        check_first_loss(case, losses["first_loss"], result.expected_loss)
        check_last_loss(item, losses["last_loss"], store)
    spans, origin_ns = _spans_of(result)
    moved = messages(spans)
    steps = _steps_of(spans, case, result)
    by_rank = rank_figures(spans, steps.set_index("step")["step_ns"], case.world_size)
    ranks = pd.DataFrame([rank.facts for rank in result.ranks]).assign(**by_rank)
    figures = run_figures(steps)
    attribution = attribute(spans, lowered_of(case, program), steps.set_index("step")["step_ns"])
    planned_ns = planned_step_ns(case) if case.is_emulated else None
    not_finite = first_of(rank.not_finite for rank in result.ranks)
    run = {
        **_row_of(job, item),
        **result.facts,
        **figures,
        **intervals(steps),
        **figures_of(attribution, spans, steps["step_ns"]),
        **peaks(ranks),
        **losses,
        **columns_of(not_finite, is_known=losses["first_loss"] is not None),
        **_mfu(case, result, figures["tokens_per_s"]),
        **_energy(case, ranks, int(steps["num_tokens"].sum())),
        "run_id": begun.run_id,
        "attempt": begun.attempt,
        "status": "ok",
        "verified": result.verified.how,
        "verified_difference": result.verified.difference,
        "program": to_json(program),
        "tokens_per_step": int(steps["num_tokens"].median()),
        "bubble_fraction_theory": simulated(case, program).bubble_fraction,
        "planned_step_ns": planned_ns,
        "num_warmup_steps": len(result.warmup_step_ns),
        "warmup_step_ns": json.dumps(result.warmup_step_ns),
        "cautions": _cautions(item, figures, planned_ns, moved, result),
    }
    measured = {"steps": steps, "ranks": ranks, "edges": edges(moved)}
    store.write_run(run, {**measured, **_timed(spans, attribution), **_watched(result, origin_ns)})
    return figures["tokens_per_s"]


def _timed(spans: pd.DataFrame, attribution: Attribution) -> dict[str, pd.DataFrame]:
    """Tables of what was timed, and of what the program makes of it."""
    return {
        "spans": spans.assign(waiting_ns=waiting_ns(spans)),
        "planned": planned_spans(attribution),
        "attribution": attribution.rows,
    }


def _watched(result: CaseResult, origin_ns: int) -> dict[str, pd.DataFrame]:
    """Tables of what was watched beside the steps."""
    return {"telemetry": _samples(result, origin_ns), "memory": _memory_timelines(result)}


def _spans_of(result: CaseResult) -> tuple[pd.DataFrame, int]:
    """Of all ranks, their times from the first one's start; and that start."""
    spans = pd.concat([pd.DataFrame(rank.spans) for rank in result.ranks], ignore_index=True)
    origin_ns = int(spans["start_ns"].min())
    spans[["start_ns", "end_ns"]] -= origin_ns
    early = set().union(*(rank.early for rank in result.ranks))
    spans["end_ns"] = hastened_end_ns(spans, early)
    over_gloo = str(result.facts.get("transport", "")).startswith("gloo")
    spans["end_ns"] = settled_end_ns(spans, is_noted_when_taken=over_gloo)
    return spans, origin_ns


def _samples(result: CaseResult, origin_ns: int) -> pd.DataFrame:
    """The telemetry of all nodes, its times as those of the spans."""
    rows = [
        {**row, "hostname": rank.facts.get("hostname")}
        for rank in result.ranks
        for row in rank.telemetry
    ]
    samples = pd.DataFrame(rows, columns=["hostname", *ROW_COLUMNS])
    samples["time_ns"] -= origin_ns
    return samples


def _memory_timelines(result: CaseResult) -> pd.DataFrame:
    """Of the extra step for memory, its times from when the first rank began it."""
    rows = [(rank, *level) for rank, of in enumerate(result.ranks) for level in of.memory]
    levels = pd.DataFrame(rows, columns=["rank", "time_ns", "num_bytes"])
    levels["time_ns"] -= levels["time_ns"].min() if rows else 0
    return levels


def _mfu(case: Case, result: CaseResult, tokens_per_s: float) -> dict[str, object]:
    peaks = [rank.peak for rank in result.ranks if rank.peak is not None]
    return dict(mfu_figures(result.flops, case.seq_len, tokens_per_s, peaks))


def _energy(case: Case, ranks: pd.DataFrame, num_tokens: int) -> dict[str, object]:
    """Joules per token over the measured steps, of the GPUs if they tell, else of the CPUs.

    Ranks that share a GPU or a node share its energy. Emulated ones train on no token.
    """
    sources = {"gpus": ("gpu_energy_j", "device"), "cpu packages": ("cpu_energy_j", "hostname")}
    for source, (column, owner) in sources.items():
        if not case.is_emulated and column in ranks and ranks[column].notna().all():
            joules = ranks.drop_duplicates(list({"hostname", owner}))[column].sum()
            return {"energy_per_token_j": joules / num_tokens, "energy_source": source}
    return {"energy_per_token_j": None, "energy_source": None}


def _steps_of(spans: pd.DataFrame, case: Case, result: CaseResult) -> pd.DataFrame:
    tokens_of_step = dict(enumerate(result.ranks[0].num_tokens))
    steps = step_figures(spans, case.world_size, tokens_of_step)
    losses = _losses_by_step(result)
    steps["loss"] = [losses[step] for step in steps["step"]]
    steps["is_outlier"] = is_outlier(steps["step_with_optimizer_ns"].tolist())
    return steps


def intervals(steps: pd.DataFrame) -> dict[str, object]:
    """Where the medians lie, and how many steps stand apart."""
    found: dict[str, object] = {"num_outliers": int(steps["is_outlier"].sum())}
    for name in ("step_ns", "tokens_per_s"):
        low, high = median_interval(steps[name]) or (None, None)
        found |= {f"{name}_low": low, f"{name}_high": high}
    return found


def planned_spans(attribution: Attribution) -> pd.DataFrame:
    spans = pd.DataFrame(attribution.modelled.spans(), columns=list(COLUMNS))
    return spans.drop(columns="num_bytes")


def peaks(ranks: pd.DataFrame) -> dict[str, object]:
    """The rank that needs most; None where nothing was allocated."""
    known = ranks[ranks["peak_memory_bytes"].notna()].sort_values("peak_memory_bytes")
    fullest = known.iloc[-1].to_dict() if len(known) else {}
    return {
        **{
            name: fullest.get(name) for name in ("peak_memory_bytes", "predicted_peak_memory_bytes")
        },
        "peak_held_microbatches": int(ranks["peak_held_microbatches"].max()),
    }


def _losses(item: Item, result: CaseResult) -> dict[str, float | None]:
    """Of the first step, and of the last that every run of this measurement makes."""
    losses = _losses_by_step(result)
    last = item.measure.warmup_steps + item.measure.steps - 1
    return {"first_loss": losses[0], "last_loss": losses[last]}


def _losses_by_step(result: CaseResult) -> list[float | None]:
    """From the rank that has the last stage; all None where there is none."""
    with_loss = (rank.losses for rank in result.ranks if rank.losses[0] is not None)
    return next(with_loss, result.ranks[0].losses)


def write_failure(job: Job, item: Item, begun: Begun, judgement: Judgement) -> None:
    """Store what became of a run whose ranks died. Raises StoreError."""
    run = {
        **_row_of(job, item),
        "run_id": begun.run_id,
        "attempt": begun.attempt,
        "status": judgement.status,
        "verified": "no: the run failed",
        "error": judgement.error,
        "error_rank": judgement.rank,
        "last_actions": json.dumps(judgement.last_actions),
        "cautions": "",
    }
    tables = {}
    if judgement.found is not None:
        tables = {
            "flight": flight_rows(judgement.found, judgement.at_ns),
            "spans": judgement.spans,
        }
    Store(Path(job.results)).write_run(run, tables)


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
        "position": item.position,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **case.settings(),
        "tokens_per_step": case.tokens_per_step,
        **item.measure.settings(),
        **({} if commit is None else dataclasses.asdict(commit)),
        "fingerprint": environment.fingerprint(
            case.device, case.world_size, case.launch_threads_per_rank
        ),
        "environment": environment.as_json(),
        "code": code_hash(),
        "runtime_code": runtime_code(case.runtime),
        "ppbench_version": __version__,
    }


def _is_oversubscribed(case: Case) -> bool:
    environment = read_environment()
    if case.is_emulated:
        return False  # ranks sleep
    if case.device == "cuda":
        return environment.shares_gpus(case.device, case.world_size)
    return case.world_size * case.launch_threads_per_rank > environment.num_cores


def has_coarse_clock(moved: pd.DataFrame, errors: Sequence[int]) -> bool:
    """Whether some transfer's span is shorter than what its two ranks' clocks may be apart.

    Within a rank times are exact, whatever its clock's offset. `errors` are the ranks'
    `clock_error_ns`.
    """
    ends = zip(moved["source_rank"], moved["target_rank"], strict=True)
    apart = [errors[source] + errors[target] for source, target in ends]
    spans_ns = moved["end_ns"] - moved["recv_start_ns"]
    return bool((spans_ns < apart).any())


def bare_stages(case: Case, facts: Mapping[str, object]) -> list[int]:
    """The stages without parameters, unless the user has listed the layers of each stage."""
    if isinstance(case.model_partition, tuple):
        return []
    sizes: list[int] = json.loads(str(facts.get("parameters_per_stage") or "[]"))
    return [stage for stage, size in enumerate(sizes) if size == 0]


def _cautions(
    item: Item,
    figures: Mapping[str, float],
    planned_ns: int | None,
    moved: pd.DataFrame,
    result: CaseResult,
) -> str:
    case, measure, warmup = item.case, item.measure, result.warmup_step_ns
    errors = [int(str(rank.facts.get("clock_error_ns", 0))) for rank in result.ranks]
    found = cautions_for(
        is_not_finite=any(rank.not_finite is not None for rank in result.ranks),
        is_oversubscribed=_is_oversubscribed(case),
        warmup_steps=measure.warmup_steps,
        num_steps=measure.steps,
        relative_deviation=figures["step_relative_deviation"],
        has_settled=len(warmup) <= LOOK_BACK or has_settled(warmup),
        over_plan=figures["step_ns"] / planned_ns if planned_ns else 1.0,
        has_coarse_clock=has_coarse_clock(moved, errors),
        is_busy_machine=any(is_disturbed(rank.summary) for rank in result.ranks),
        is_throttled=any(is_throttled(rank.summary) for rank in result.ranks),
        has_bare_stage=bool(bare_stages(case, result.facts)),
    )
    return ",".join(caution.name for caution in found)
