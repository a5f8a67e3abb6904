"""Trials of a plan: its best proposals and 1F1B, measured in turns, against what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from engine.plan.schedules.registry import CSV_PREFIX
from ppbench.config.case import Case, Planned
from ppbench.config.programs import digest_of
from ppbench.config.sweep import Sweep
from ppbench.display.units import milliseconds
from ppbench.files import write_file
from ppbench.planning.configuration import Proposal
from ppbench.planning.handover import program_text
from ppbench.planning.plan import Plan
from ppbench.planning.request import AUTO
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.store import Store

_VARIED = (
    *("schedule", "stages_per_rank", "num_microbatches", "train_microbatch_size"),
    *("model_partition", "train_recompute"),
)


@dataclass(frozen=True)
class Trials:
    """The proposals that were measured, in the order of the plan; runs failed have no step."""

    frame: pd.DataFrame
    """A row for each: what it is, its predicted and measured step and peak, and the error."""

    @property
    def regret(self) -> float | None:
        """How much longer the first choice took than the best of all; None if either failed."""
        steps = self.frame["measured_step_ns"]
        first = steps.iloc[0]
        return None if pd.isna(first) else float(first / steps.min() - 1)

    @property
    def sentence(self) -> str:
        """What the trials say about the first choice."""
        steps = self.frame["measured_step_ns"]
        if self.regret is None:
            return "The first choice was not measured: its runs failed; see: ppbench ls"
        first, least = milliseconds(steps.iloc[0]), milliseconds(steps.min())
        best = self.frame["schedule"].iloc[int(steps.argmin())]
        if self.regret == 0:
            return f"Measured, the first choice is the best of {len(steps)}: {first}."
        return (
            f"Measured, the first choice takes {first}, and the best, {best}, {least}: "
            f"a regret of {100 * self.regret:.1f} %."
        )


def measure(
    plan: Plan, sweep: Sweep, num: int, launches: int, folder: Path, display: Display | None = None
) -> Trials:
    """Measure the best `num` proposals and 1F1B, in launches that take turns.

    Runs go into the results folder, programs of the solver into its folder `plans`. Raises
    UsageError for what cannot be run here, SweepInterruptedError.
    """
    proposals = list(plan.proposals[:num])
    if plan.baseline is not None and plan.baseline not in proposals:
        proposals.append(plan.baseline)
    case, measured = sweep.cases[0]
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    cases = [
        case_of(proposal, case, folder / "plans" / f"{sweep.name}-{number}.csv")
        for number, proposal in enumerate(proposals, 1)
    ]
    planned: list[Planned] = [(one, replace(measured, launches=launches)) for one in cases]
    trial = replace(sweep, name=f"{sweep.name}-plan", cases=tuple(planned), axes=_VARIED)
    done = run_sweep(trial, Store(folder), Choice(reruns=True), display)
    return Trials(_compared(proposals, cases, done.frame))


def case_of(proposal: Proposal, case: Case, file: Path) -> Case:
    """The given case with a proposal's pipeline; a program of the solver is written."""
    one = proposal.configuration
    schedule, digest = one.schedule, ""
    if schedule == AUTO:
        write_file(file, [program_text(proposal.program)])
        schedule, digest = f"{CSV_PREFIX}{file}", digest_of(file)
    is_mixed = len(set(one.recompute)) > 1
    return replace(
        case,
        schedule=schedule,
        program_digest=digest,
        memory_limit=Case.memory_limit,
        world_size=one.ranks,
        stages_per_rank=one.stages_per_rank,
        num_microbatches=one.num_microbatches,
        train_microbatch_size=one.microbatch_size,
        model_partition=one.layers,
        train_recompute=any(one.recompute),
        train_recompute_stages=one.recompute if is_mixed else (),
    )


def _compared(
    proposals: Sequence[Proposal], cases: Sequence[Case], runs: pd.DataFrame
) -> pd.DataFrame:
    """Predicted and measured figures side by side; the measured ones are medians of launches."""
    rows = []
    good = runs[runs["status"] == "ok"]
    for proposal, case in zip(proposals, cases, strict=True):
        own = good[good["case_id"] == case.case_id]
        step = own["step_ns"].median()
        one = proposal.configuration
        rows.append(
            {
                "schedule": one.schedule,
                "stages_per_rank": one.stages_per_rank,
                "microbatch_size": one.microbatch_size,
                "predicted_step_ns": proposal.step_ns,
                "predicted_low_ns": proposal.step_low_ns,
                "predicted_high_ns": proposal.step_high_ns,
                "measured_step_ns": step,
                "num_launches": len(own),
                "step_error": step / proposal.step_ns - 1,
                "predicted_peak_bytes": max(proposal.peak_high_bytes),
                "measured_peak_bytes": own["peak_memory_bytes"].median(),
            }
        )
    return pd.DataFrame(rows)
