"""A run that ppbench did not start, written as one that it did.

The figures are made by the same functions as a sweep's. What is not known is null; of the settings,
which are columns that every run has, `settings_told` lists those that are known, and the others are
`unknown`, or 0 and false where they are no text. The workload's id rests on the name that its owner
gave it beside them, so that two unknown models are never taken for one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pandas as pd

from engine.plan.lower import Policy, lower
from engine.plan.program import Program, to_json
from engine.plan.rules import ProgramError, check
from engine.plan.schedules.registry import SCHEDULES, ScheduleError, build_program
from engine.plan.simulate import peak_activations, simulate, uniform
from ppbench import __version__
from ppbench.analysis.attribution import attribute, figures_of
from ppbench.analysis.metrics import rank_figures, run_figures, step_figures
from ppbench.analysis.stats import is_outlier
from ppbench.analysis.transfers import edges, messages, settled_end_ns, waiting_ns
from ppbench.cautions import cautions_for
from ppbench.config.case import UNKNOWN, Case
from ppbench.errors import UsageError
from ppbench.run.environment import code_hash
from ppbench.run.not_finite import NotFinite, columns_of, first_loss_not_finite
from ppbench.run.rows import has_coarse_clock, intervals, peaks, planned_spans
from ppbench.store import Condition, Store, new_run_id

_LOOK_AHEAD = 1
_LOWERED = ("transfer_policy", "transfer_look_ahead")
"""How a stored program's transfers are put in again: always known."""


@dataclass(frozen=True)
class Told:
    """What its owner tells of a run."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)  # fields of Case
    tokens_per_step: int | None = None


@dataclass(frozen=True)
class Account:
    """What was seen of a run."""

    origin: str  # `imported` or `attached`
    program: Program  # without transfers
    spans: pd.DataFrame  # columns of `engine.plan.spans.Span`, on rank 0's clock
    ranks: Sequence[Mapping[str, object]]  # columns of `ranks`, in order
    facts: Mapping[str, object]  # columns of `runs`
    losses: Mapping[int, float] = field(default_factory=dict)  # by step
    num_warmup_steps: int | None = None
    is_oversubscribed: bool = False
    is_noted_when_taken: bool = False  # a receive ends when it was taken, not when it was there
    number: int = 0  # of runs that may be written at once, which one it is


def named_program(program: Program, name: str | None = None) -> Program:
    """The program by its name: the given one, or the registered schedule's that it is."""
    if name is None:
        name = next(filter(lambda one: _is_of(program, one), SCHEDULES), program.schedule)
    return dataclasses.replace(program, schedule=name)


def _is_of(program: Program, name: str) -> bool:
    try:
        known = build_program(
            name, program.world_size, program.num_microbatches, _stages_per_rank(program)
        )
    except ScheduleError:
        return False
    return (known.placement, known.actions) == (program.placement, program.actions)


def _stages_per_rank(program: Program) -> int:
    return max(len(program.placement.stages_of(rank)) for rank in range(program.world_size))


def check_legal(program: Program) -> None:
    """Raises UsageError for what is no whole step of training."""
    try:
        check(program)
    except ProgramError as error:
        raise UsageError(
            f"the actions are no whole training step: {error}\n"
            "Are all ranks of one pipeline there, and forward and backward both?"
        ) from None


def write_run(account: Account, told: Told, store: Store) -> str:
    """Store the run; returns its id. Raises UsageError, StoreError."""
    check_legal(account.program)
    run_id, program = new_run_id(), account.program
    case = _case_of(account, told)
    spans = account.spans.sort_values(["step", "rank", "start_ns"], ignore_index=True)
    spans[["start_ns", "end_ns"]] -= int(spans["start_ns"].min())
    spans["end_ns"] = settled_end_ns(spans, is_noted_when_taken=account.is_noted_when_taken)
    steps = _steps_of(spans, account, told)
    step_ns, moved = steps.set_index("step")["step_ns"], messages(spans)
    lowered = lower(program, Policy.EARLY, _LOOK_AHEAD)
    attribution = attribute(spans, lowered, step_ns)
    ranks = _ranks_of(account, spans, step_ns)
    figures = run_figures(steps)
    run = {
        **_identity(run_id, account, told, case, store),
        **account.facts,
        **figures,
        **intervals(steps),
        **figures_of(attribution, spans, steps["step_ns"]),
        **peaks(ranks),
        **_losses(account),
        **columns_of(_not_finite(account), is_known=bool(account.losses)),
        "run_id": run_id,
        "program": to_json(program),
        "num_stages": program.num_stages,
        "tokens_per_step": told.tokens_per_step,
        "bubble_fraction_theory": _theory(program),
        "num_warmup_steps": account.num_warmup_steps,
        "measure_steps": len(steps),
        "cautions": _cautions(account, figures, steps, moved),
    }
    tables = {
        "spans": spans.assign(waiting_ns=waiting_ns(spans)),
        "steps": steps,
        "ranks": ranks,
        "planned": planned_spans(attribution),
        "attribution": attribution.rows,
        "edges": _edges_of(moved),
    }
    store.write_run(run, tables)
    return run_id


def _edges_of(moved: pd.DataFrame) -> pd.DataFrame:
    """Of messages whose size nobody told, none."""
    found = edges(moved)
    is_told = found["num_bytes"] > 0
    return found.assign(
        num_bytes=found["num_bytes"].where(is_told), bytes_per_s=found["bytes_per_s"].where(is_told)
    )


def _case_of(account: Account, told: Told) -> Case:
    """With what is known of it; the rest as the module says."""
    program = account.program
    known = {
        "schedule": program.schedule,
        "world_size": program.world_size,
        "num_microbatches": program.num_microbatches,
        "stages_per_rank": _stages_per_rank(program),
        **told.settings,
    }
    unknown = {
        one.name: _unknown(one.default)
        for one in dataclasses.fields(Case)
        if one.name not in _LOWERED
    }
    return Case(**{**unknown, "seq_len": UNKNOWN, **known})  # type: ignore[arg-type]  # as declared


def _unknown(default: object) -> object:
    if isinstance(default, tuple):
        return ()
    return UNKNOWN if isinstance(default, str) else type(default)()


def _identity(
    run_id: str, account: Account, told: Told, case: Case, store: Store
) -> dict[str, object]:
    """What the run is, and which of several it is. None stands for another, so that none is hidden
    by another that has the same `resume_key`.
    """
    case_id = _digest(case.case_id, told.name)
    sweep_id = _digest(account.origin, told.name)
    same = [Condition("sweep_id", "=", sweep_id), Condition("case_id", "=", case_id)]
    before = store.runs(["launch"], same)["launch"]
    launch = (0 if before.empty else int(before.max()) + 1) + account.number
    known = {"schedule", "world_size", "num_microbatches", "stages_per_rank", *told.settings}
    return {
        "sweep_id": sweep_id,
        "sweep_name": told.name,
        "resume_key": _digest(sweep_id, case_id, run_id),
        "case_id": case_id,
        "launch": launch,
        "position": 0,
        "attempt": 1,
        "status": "ok",
        "origin": account.origin,
        "settings_told": json.dumps(sorted(known)),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **case.settings(),
        "code": code_hash(),
        "ppbench_version": __version__,
    }


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _steps_of(spans: pd.DataFrame, account: Account, told: Told) -> pd.DataFrame:
    numbers = [int(number) for number in spans["step"].unique()]
    tokens = dict.fromkeys(numbers, told.tokens_per_step)
    steps = step_figures(spans, account.program.world_size, tokens)
    steps["loss"] = [account.losses.get(int(number)) for number in steps["step"]]
    steps["loss"] = steps["loss"].astype(float)
    steps["is_outlier"] = is_outlier(steps["step_with_optimizer_ns"].tolist())
    return steps


def _ranks_of(account: Account, spans: pd.DataFrame, step_ns: pd.Series) -> pd.DataFrame:
    """A microbatch is held from its forward to the end of its backward: the program tells."""
    program, held = account.program, peak_activations(account.program)
    ranks = pd.DataFrame(account.ranks).assign(
        **rank_figures(spans, step_ns, program.world_size),
        peak_held_microbatches=held,
        planned_peak_held_microbatches=held,
        stages=[json.dumps(program.placement.stages_of(r)) for r in range(program.world_size)],
    )
    for column in ("peak_memory_bytes", "predicted_peak_memory_bytes"):
        if column not in ranks:
            ranks[column] = None
    return ranks


def _losses(account: Account) -> dict[str, float | None]:
    """`last_loss` is of the last step that was watched."""
    numbers = sorted(account.losses)
    if not numbers:
        return {"first_loss": None, "last_loss": None}
    return {"first_loss": account.losses[numbers[0]], "last_loss": account.losses[numbers[-1]]}


def _not_finite(account: Account) -> NotFinite | None:
    """By the losses, which the rank of the last stage has."""
    return first_loss_not_finite(account.losses, account.program.placement.ranks[-1])


def _theory(program: Program) -> float:
    unit = program.num_stages
    return simulate(program, uniform(program.placement, unit, unit, unit)).bubble_fraction


def _cautions(
    account: Account, figures: Mapping[str, float], steps: pd.DataFrame, moved: pd.DataFrame
) -> str:
    errors = [int(str(rank.get("clock_error_ns", 0))) for rank in account.ranks]
    warmup = account.num_warmup_steps
    found = cautions_for(
        is_not_finite=_not_finite(account) is not None,
        is_oversubscribed=account.is_oversubscribed,
        warmup_steps=1 if warmup is None else warmup,  # not known to be missing
        num_steps=len(steps),
        relative_deviation=figures["step_relative_deviation"],
        has_coarse_clock=has_coarse_clock(moved, errors),
    )
    return ",".join(caution.name for caution in found)


def check_name(name: str, where: str) -> None:
    """Raises UsageError for a name that names nothing."""
    if not name.strip():
        raise UsageError(f"{where}: is empty; expected a name for the run, such as titan")
