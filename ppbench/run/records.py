"""Makes the rows of a run from its spans, its program and its facts.

measured by ranks   CaseResult --+
attached, imported               +--> FinishedRun -- rows_of --> Rows --> store
(ppbench.external) ------------+
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from engine import device_variables
from engine.model.descriptions import FlopFacts
from engine.plan.program import Program, to_json
from engine.plan.spans import COLUMNS
from ppbench import __version__
from ppbench.analysis.attribution import attribute, figures_of
from ppbench.analysis.collectives import collective_figures
from ppbench.analysis.costs import measured_slices
from ppbench.analysis.metrics import rank_figures, run_figures, step_figures, windows
from ppbench.analysis.mfu import Peak, mfu_figures
from ppbench.analysis.reference import ReferenceTimes, reference_figures
from ppbench.analysis.transfers import (
    Receive,
    corrected_end_ns,
    edges,
    messages,
    reconciled_end_ns,
    waiting_ns,
)
from ppbench.cautions import MAX_OVER_PLAN, MAX_RELATIVE_DEVIATION, MIN_STEPS, Caution
from ppbench.config.case import Case
from ppbench.config.programs import bubble_in_theory, planned_step_ns
from ppbench.run.failures.evidence import Diagnosis
from ppbench.run.failures.post_mortem import flight_rows
from ppbench.run.job import Attempt, Job, PlannedRun
from ppbench.run.machine.environment import (
    ON_GPUS,
    fingerprint_here,
    read_environment,
    runtime_code,
)
from ppbench.run.machine.measuring_code import code_hash
from ppbench.run.machine.placement import Place, has_too_few_cores, shares_device
from ppbench.run.machine.telemetry import (
    ROW_COLUMNS,
    Figures,
    is_disturbed,
    is_throttled,
    node_figures,
)
from ppbench.run.verification.losses import check_first_loss, check_last_loss
from ppbench.run.verification.record import NOT_VERIFIED, Verified
from ppbench.runtimes import ENGINE
from ppbench.statistics.step_times import LOOK_BACK, has_settled, is_outlier, median_interval
from ppbench.store import Store


@dataclass(frozen=True)
class RankResult:
    """Measurements of one rank."""

    facts: dict[str, object]  # columns of `ranks`
    spans: dict[str, list[object]]  # columns of the spans of all turns
    losses: list[float | None]  # of every step, warm-up included; None off the last stage
    num_tokens: list[int]  # trained on in every step, warm-up included; the same on all ranks
    telemetry: list[Figures] = field(default_factory=list)  # samples of the node, from its first
    memory: list[tuple[int, int]] = field(default_factory=list)  # (start in ns, bytes) of levels
    peak: tuple[str, Peak] | None = None  # the device's name and peak speed
    early: set[Receive] = field(default_factory=set)  # had arrived before the rank waited for it
    not_finite: NotFinite | None = None  # where this rank first saw NaN or infinity
    reference: ReferenceTimes | None = None  # beside the steps
    after_pause: list[int] = field(default_factory=list)  # the first step of each turn
    round_of: dict[int, int] = field(default_factory=dict)  # of each measured step


@dataclass(frozen=True)
class CaseResult:
    """Measurements of all ranks, replica after replica, and facts of the whole case."""

    ranks: list[RankResult]
    facts: dict[str, object]  # columns of `runs`
    warmup_step_ns: list[int]  # of the steps before those that were measured, on rank 0
    lowered: Program  # the program that was run, with its transfers
    flops: FlopFacts | None = None  # of a token; None where nothing is computed
    training: str = ""  # the key of what was trained, if it is trained
    expected_loss: float | None = None  # of the first step, if it is known
    places: tuple[Place, ...] = ()  # where each rank is
    verified: Verified = NOT_VERIFIED


@dataclass(frozen=True)
class FinishedRun:
    """A run that is to be stored: measured by ppbench, attached, or imported."""

    case: Case
    program: Program
    lowered: Program  # the program with its transfers
    spans: pd.DataFrame  # columns of `engine.plan.spans.Span`, on rank 0's clock
    ranks: Sequence[Mapping[str, object]]  # columns of `ranks`, in order
    facts: Mapping[str, object]  # columns of `runs`
    losses: Mapping[int, float | None]  # by step
    num_tokens: Mapping[int, int | None]  # by step
    first_loss: float | None
    last_loss: float | None
    not_finite: NotFinite | None = None
    early: Collection[Receive] = frozenset()  # receives that had arrived before they were awaited
    completion_seen_on_wait: bool = False  # a receive ends with the wait for it, not on arrival
    planned_step_ns: int | None = None
    cautions: Collection[Caution] = ()  # those that its own figures do not show
    after_pause: Collection[int] = frozenset()  # steps that follow no other one at once
    round_of: Mapping[int, int] = field(default_factory=dict)  # of each step in a round


@dataclass(frozen=True)
class Rows:
    """A run's row and its parts of the other tables."""

    run: dict[str, object]
    tables: dict[str, pd.DataFrame]
    origin_ns: int  # the first span's start, from which the times in the tables count


def rows_of(finished: FinishedRun) -> Rows:
    """Make the rows of a run from its spans and its program."""
    case, program = finished.case, finished.program
    spans = finished.spans.copy()
    origin_ns = int(spans["start_ns"].min())
    spans[["start_ns", "end_ns"]] -= origin_ns
    spans["end_ns"] = corrected_end_ns(spans, finished.early)
    spans["end_ns"] = reconciled_end_ns(
        spans, completion_seen_on_wait=finished.completion_seen_on_wait
    )
    paused = finished.after_pause
    lead_ins = [step for step in paused if step not in finished.round_of]
    of_ranks = windows(spans, case.world_size, paused)
    steps = step_figures(spans, of_ranks, finished.num_tokens)
    of_ranks = of_ranks.drop(index=lead_ins, level="step")
    steps, spans = (
        rows[~rows["step"].isin(lead_ins)].reset_index(drop=True) for rows in (steps, spans)
    )
    moved = messages(spans)
    steps["round"] = [finished.round_of.get(step) for step in steps["step"]]
    steps["loss"] = [finished.losses.get(step) for step in steps["step"]]
    steps["loss"] = steps["loss"].astype(float)
    steps["is_outlier"] = is_outlier(steps["step_ns"].tolist())
    makespan_ns = steps.set_index("step")["makespan_ns"]
    ranks = pd.DataFrame(finished.ranks).assign(**rank_figures(spans, of_ranks))
    figures = run_figures(steps)
    slices = measured_slices(spans, program.slices)
    lowered = replace(finished.lowered, slices=slices)
    attribution = attribute(spans, lowered, of_ranks, moved, meets=case.meets)
    first = finished.not_finite
    errors = [int(str(rank.get("clock_error_ns", 0))) for rank in finished.ranks]
    # Within a rank times are exact: its clock's offset does not matter.
    ends = zip(moved["replica"], moved["source_rank"], moved["target_rank"], strict=True)
    p, planned_ns = case.world_size, finished.planned_step_ns
    error_ns = [errors[d * p + source] + errors[d * p + target] for d, source, target in ends]
    own = {
        Caution.not_finite: first is not None,
        Caution.noisy_steps: figures["step_relative_deviation"] > MAX_RELATIVE_DEVIATION,
        Caution.behind_plan: planned_ns and figures["step_ns"] > MAX_OVER_PLAN * planned_ns,
        Caution.coarse_clock: (moved["end_ns"] - moved["recv_start_ns"] < error_ns).any(),
        Caution.few_steps: len(steps) < MIN_STEPS,
    }
    cautions = [caution for caution in Caution if own.get(caution) or caution in finished.cautions]
    # The memory is that of the rank that needs most; null where nothing was allocated.
    known = ranks[ranks["peak_memory_bytes"].notna()].sort_values("peak_memory_bytes")
    fullest = known.iloc[-1].to_dict() if len(known) else {}
    run = {
        **finished.facts,
        **figures,
        "num_outliers": int(steps["is_outlier"].sum()),
        "rounds": rounds_text(steps),
        **figures_of(attribution, spans, of_ranks, makespan_ns),
        "peak_memory_bytes": fullest.get("peak_memory_bytes"),
        "predicted_peak_memory_bytes": fullest.get("predicted_peak_memory_bytes"),
        "peak_held_microbatches": int(ranks["peak_held_microbatches"].max()),
        # All null where nothing was computed or its loss is not known.
        "is_finite": None if finished.first_loss is None else first is None,
        "not_finite_step": None if first is None else first.step,
        "not_finite_rank": None if first is None else first.rank,
        "not_finite_what": None if first is None else first.what,
        "first_loss": finished.first_loss,
        "last_loss": finished.last_loss,
        "program": to_json(replace(program, slices=slices)),
        "bubble_fraction_theory": bubble_in_theory(case, program),
        "planned_step_ns": planned_ns,
        "cautions": ",".join(caution.name for caution in cautions),
    }
    for name in ("step_ns", "tokens_per_s"):
        low, high = median_interval(steps[name]) or (None, None)
        run |= {f"{name}_low": low, f"{name}_high": high}
    if Caution.time_sliced in finished.cautions:  # how long a rank was idle is not known
        run |= {column: None for column in run if _is_of_idle_time(column)}
        for table in (steps, ranks):
            table[[name for name in table.columns if _is_of_idle_time(str(name))]] = float("nan")
    planned = pd.DataFrame(attribution.planned(), columns=list(COLUMNS))
    joined = attribution.collectives
    tables = {
        "spans": spans.assign(waiting_ns=waiting_ns(spans, moved, joined)),
        "steps": steps,
        "ranks": ranks,
        "planned": planned.drop(columns="num_bytes"),
        "attribution": attribution.rows,
        "edges": edges(moved),
        **({"collectives": collective_figures(joined)} if len(joined) else {}),
    }
    return Rows(run, tables, origin_ns)


OF_ROUNDS = ("step_ns", "tokens_per_s", "bubble_fraction")
"""The figures of steps that a run has for each of its rounds."""


def rounds_text(steps: pd.DataFrame) -> str | None:
    """The median figures of each round, as JSON; None for steps that were in none."""
    by_round = steps.dropna(subset=["round"]).groupby("round")[list(OF_ROUNDS)].median()
    if by_round.empty:
        return None
    known = by_round.astype(object).where(by_round.notna(), None)
    columns = {"round": [int(number) for number in by_round.index]}
    return json.dumps(columns | {name: known[name].tolist() for name in OF_ROUNDS})


def _is_of_idle_time(column: str) -> bool:
    is_measured = column.startswith("bubble_") and column != "bubble_fraction_theory"
    return is_measured or column in ("modelled_bubble_fraction", "idle_fraction")


def write_result(
    job: Job, planned: PlannedRun, attempt: Attempt, result: CaseResult, status: str = "ok"
) -> dict[str, object]:
    """Store a case that ran; return its row.

    One that was stopped between two rounds is `interrupted`, with the rounds that it had. Raises
    DisagreementError for a run whose losses are wrong.
    """
    case, store = planned.case, Store(Path(job.results))
    finished = finished_run(planned, result)
    if result.expected_loss is not None:
        check_first_loss(case, finished.first_loss, result.expected_loss)
        if status == "ok":
            check_last_loss(
                store.folder, planned, result.training, finished.last_loss, attempt.run_id
            )
    rows = rows_of(finished)
    ranks, num_tokens = rows.tables["ranks"], rows.tables["steps"]["num_tokens"]
    tokens_per_s = float(str(rows.run["tokens_per_s"]))
    peaks = [rank.peak for rank in result.ranks if rank.peak is not None]
    energy: dict[str, object] = {"energy_per_token_j": None, "energy_source": None}
    # Of what computes alone. Ranks that share a GPU have a part of its energy each; those of a
    # machine have all of its packages'. Emulated ones train on no token.
    is_on_gpus = case.device in ON_GPUS
    source, column = ("gpus", "gpu_energy_j") if is_on_gpus else ("cpu packages", "cpu_energy_j")
    if not case.is_emulated and column in ranks and ranks[column].notna().all():
        joules = ranks[column]
        if not is_on_gpus:
            machines = pd.Series([place.machine for place in result.places], index=joules.index)
            joules = joules[~machines.duplicated()]
        per_token_j = joules.sum() / int(num_tokens.sum())
        energy = {"energy_per_token_j": per_token_j, "energy_source": source}
    given = result.flops, case.seq_len, tokens_per_s, peaks
    mfu = mfu_figures(*given, has_backward=case.trains)
    nodes = [
        (place.machine, rank.facts) for place, rank in zip(result.places, result.ranks, strict=True)
    ]
    run = {
        **_row_of(job, planned),
        **rows.run,
        **mfu,
        "mfu": None if Caution.time_sliced in finished.cautions else mfu["mfu"],
        **energy,
        **reference_figures([rank.reference for rank in result.ranks]),
        # Emulated ranks sleep, and want no core.
        **node_figures(nodes, 0 if case.is_emulated else case.launch_threads_per_rank),
        "run_id": attempt.run_id,
        "attempt": attempt.attempt,
        "status": status,
        "verified": result.verified.how,
        "verified_difference": result.verified.difference,
        "verification_s": result.verified.seconds,
        "tokens_per_step": int(num_tokens.median()),
        "num_warmup_steps": len(result.warmup_step_ns),
        "warmup_step_ns": json.dumps(result.warmup_step_ns),
    }
    samples = [
        {**row, "hostname": rank.facts.get("hostname")}
        for rank in result.ranks
        for row in rank.telemetry
    ]
    telemetry = pd.DataFrame(samples, columns=["hostname", *ROW_COLUMNS])
    telemetry["time_ns"] -= rows.origin_ns
    levels = [
        (*divmod(number, case.world_size), *level)
        for number, rank in enumerate(result.ranks)
        for level in rank.memory
    ]
    memory = pd.DataFrame(levels, columns=["replica", "rank", "time_ns", "num_bytes"])
    memory["time_ns"] -= memory["time_ns"].min() if levels else 0
    store.write_run(run, {**rows.tables, "telemetry": telemetry, "memory": memory})
    return run


def finished_run(planned: PlannedRun, result: CaseResult) -> FinishedRun:
    """Join the measurements of a case's ranks."""
    case, measure = planned.case, planned.measure
    ranks, warmup = result.ranks, result.warmup_step_ns
    with_loss = (rank.losses for rank in ranks if rank.losses[0] is not None)
    losses = next(with_loss, ranks[0].losses)  # of the last stage's rank, where any is computed
    is_engines = case.runtime == ENGINE or case.is_emulated  # others place transfers as they like
    program = result.lowered.compute_only() if is_engines else result.lowered
    num_threads = 0 if case.is_emulated else case.launch_threads_per_rank
    cautions = {
        Caution.oversubscribed: has_too_few_cores(result.places, num_threads),
        Caution.time_sliced: shares_device(result.places),
        Caution.unsettled_steps: len(warmup) > LOOK_BACK and not has_settled(warmup),
        Caution.busy_machine: any(is_disturbed(rank.facts) for rank in ranks),
        Caution.throttled: any(is_throttled(rank.facts) for rank in ranks),
        Caution.bare_stage: bool(bare_stages(case, result.facts)),
        Caution.no_warmup: measure.warmup_steps == 0,
    }
    return FinishedRun(
        case,
        program,
        result.lowered,
        pd.concat([pd.DataFrame(rank.spans) for rank in ranks], ignore_index=True),
        [rank.facts for rank in ranks],
        result.facts,
        dict(enumerate(losses)),
        dict(enumerate(ranks[0].num_tokens)),
        first_loss=losses[0],
        last_loss=losses[min(measure.warmup_steps + measure.steps, len(losses)) - 1],
        not_finite=first_of(rank.not_finite for rank in ranks),
        early={
            (*receive, number // case.world_size)
            for number, rank in enumerate(ranks)
            for receive in rank.early
        },
        completion_seen_on_wait=str(result.facts.get("transport", "")).startswith("gloo"),
        planned_step_ns=planned_step_ns(case, result.lowered) if case.is_emulated else None,
        cautions=[caution for caution, holds in cautions.items() if holds],
        after_pause=ranks[0].after_pause,
        round_of=ranks[0].round_of,
    )


def write_failure(job: Job, planned: PlannedRun, attempt: Attempt, diagnosis: Diagnosis) -> None:
    """Store the failure of a run whose ranks died. Raises StoreError."""
    case, rank = planned.case, diagnosis.rank
    if rank is not None and rank < case.num_processes:  # else it takes no part in the case
        rank %= case.world_size
    run = {
        **_row_of(job, planned),
        "run_id": attempt.run_id,
        "attempt": attempt.attempt,
        "status": diagnosis.status,
        "verified": "no: the run failed",
        "error": diagnosis.error,
        "error_rank": rank,
        "last_actions": json.dumps(diagnosis.last_actions),
        "cautions": "",
    }
    tables = {}
    if diagnosis.post_mortem is not None:
        flight = flight_rows(diagnosis.post_mortem, diagnosis.at_ns)
        tables = {"flight": flight, "spans": diagnosis.spans}
    Store(Path(job.results)).write_run(run, tables)


def _row_of(job: Job, planned: PlannedRun) -> dict[str, object]:
    """Return the columns of `runs` that are known before the run begins."""
    environment, commit, case = read_environment(), job.commit, planned.case
    return {
        "sweep_id": job.sweep_id,
        "sweep_name": job.sweep_name,
        "sweep_file": job.sweep_file,
        "resume_key": planned.resume_key,
        "case_id": case.case_id,
        "launch": planned.launch,
        "position": planned.position,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **case.settings(),
        "tokens_per_step": case.tokens_per_step,
        **planned.measure.settings(),
        **({} if commit is None else dataclasses.asdict(commit)),
        "fingerprint": fingerprint_here(
            case.device, case.num_processes, case.launch_threads_per_rank
        ),
        "device_variables": variables_of(case.device),
        "environment": environment.as_json(),
        "code": code_hash(),
        "runtime_code": runtime_code(case.runtime),
        "ppbench_version": __version__,
    }


def variables_of(device: str) -> str | None:
    """Return the variables that a rank's accelerator started with, as JSON; None without one.

    A failed run's row has those of the process that writes it, which are the ranks' own.
    """
    if device not in ON_GPUS:
        return None
    environ = dict(os.environ)
    device_variables.prepare(environ)
    return json.dumps(device_variables.recorded(environ))


def bare_stages(case: Case, facts: Mapping[str, object]) -> list[int]:
    """Return the stages without parameters, unless the user has listed the layers of each stage."""
    if isinstance(case.model_partition, tuple):
        return []
    sizes: list[int] = json.loads(str(facts.get("parameters_per_stage") or "[]"))
    return [stage for stage, size in enumerate(sizes) if size == 0]


LOSS = "loss"


@dataclass(frozen=True)
class NotFinite:
    """Where a rank first saw a number that is not finite."""

    step: int  # as in `steps`: warm-up steps come first
    rank: int
    what: str  # such as `loss` or `gradient of lm_head.weight`


def first_of(seen: Iterable[NotFinite | None]) -> NotFinite | None:
    """Return the earliest place; within a step the loss comes before gradients."""
    known = [place for place in seen if place is not None]
    return min(known, key=lambda place: (place.step, place.what != LOSS, place.rank), default=None)


def first_loss_not_finite(losses: Mapping[int, float], rank: int) -> NotFinite | None:
    """Return the first loss that is not finite, for runs of which only losses are known.

    `rank` has the last stage.
    """
    wrong = (step for step, loss in sorted(losses.items()) if not math.isfinite(loss))
    return next((NotFinite(step, rank, LOSS) for step in wrong), None)
