"""Trials of a plan: its best proposals and 1F1B, measured in turns, against what was predicted.

proposals --cases--> rounds of launches, as `recommendation.race` asks for --> table and sentence
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import pandas as pd

from engine.plan.schedules.registry import CSV_PREFIX
from ppbench.comparison.known import known_of
from ppbench.comparison.measurement import reach_text
from ppbench.config.case import Case, Measure
from ppbench.config.programs import digest_of
from ppbench.config.sweep import Sweep
from ppbench.console import note
from ppbench.display.cases import cautions_of
from ppbench.display.tables import as_records
from ppbench.display.units import counted, duration, milliseconds, percent
from ppbench.files import write_file
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Noise
from ppbench.judge.lead import Regret
from ppbench.judge.noise import noise_of_launches
from ppbench.planning.handover import program_text
from ppbench.planning.plan import AUTO, Plan, Proposal
from ppbench.recommendation.race import (
    STEP,
    Finding,
    Outcome,
    SetAside,
    Steps,
    Stop,
    interval_of,
    race,
)
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice, forget_rerun, note_rerun, plan_sweep, rerun_since
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
    regret: Regret | None
    """How much longer the first choice took than the best of all; None if it failed."""
    finding: Finding = Finding.open
    cautions: tuple[Counter[str], ...] = ()
    """How many launches of each proposal carry which caution."""
    stop: Stop | None = None
    """Why no more launches were made."""

    @property
    def sentence(self) -> str:
        """What the trials say about the first choice."""
        if self.regret is None:
            return "The first choice was not measured: its runs failed; see: ppbench ls"
        # The cautions of launches that the finding stands on.
        concerned = [0] if self.regret.rival is None else [0, self.regret.rival]
        parts = [
            f"{name_of(self.frame, at)}: {', '.join(f'{n} {name}' for name, n in found.items())}"
            for at, found in enumerate(self.cautions)
            if found and at in concerned
        ]
        mind = f" Mind the cautions of launches of {'; of '.join(parts)}." if parts else ""
        return f"{self._finding(self.regret)}{mind}"

    def as_dict(self) -> dict[str, object]:
        """The table and the finding, as JSON has them; an unknown end of an interval is None."""
        known: dict[str, object] = {}
        if self.regret is not None:
            known = {"finding": str(self.finding), **vars(self.regret)}
        if known.get("high") == math.inf:
            known["high"] = None
        known["sentence"] = self.sentence
        if self.stop is not None:
            known["stop"] = str(self.stop)
        return {"trials": as_records(self.frame), "regret": known}

    def _finding(self, regret: Regret) -> str:
        steps = self.frame["measured_step_ns"]
        first, num = milliseconds(steps[0]), len(steps)
        if self.finding is Finding.best or regret.rival is None:
            others = ": the others failed or are" if steps.isna().any() else "; the others are"
            return f"Measured, the first choice is the best of {num}, {first}{others} slower."
        by = f"{percent(regret.estimate)}, with an unknown error"
        if math.isfinite(regret.high):
            by = f"{percent(regret.estimate)} ({percent(regret.low)} to {percent(regret.high)})"
        rival = name_of(self.frame, regret.rival)
        theirs = milliseconds(steps[regret.rival])
        match self.finding:
            case Finding.within:
                return (
                    f"Measured, the first choice is the best of {num} or within 2 % of it: it "
                    f"takes {first}, and {rival} {theirs}; a regret of {by}."
                )
            case Finding.slower:
                return (
                    f"Measured, the first choice is slower by {by} than {rival}: it takes {first}, "
                    f"that {theirs}."
                )
        launches = int(self.frame["num_launches"].max())
        return (
            f"Open after {counted(launches, 'launch')}: the first choice takes {first}, "
            f"and {rival} {theirs}; a regret of {by}. More launches would help: --max-launches "
            f"{max(2 * launches, 6)}."
        )


def name_of(frame: pd.DataFrame, arm: int) -> str:
    """A proposal's name in a sentence, by its place in the table."""
    return "the first choice" if arm == 0 else f"{frame['schedule'][arm]} (number {arm + 1})"


def measure(
    plan: Plan, sweep: Sweep, num: int, most: int, folder: Path, display: Display | None = None
) -> Trials:
    """Measure the best `num` proposals and 1F1B, at most `most` launches of each, in turns.

    Runs go into the results folder, programs of the solver into its folder `plans`. Raises
    UsageError for what cannot be run here, SweepInterruptedError; what is measured is kept then,
    and the same trials go on with it.
    """
    proposals = list(plan.proposals[:num])
    if plan.baseline is not None and plan.baseline not in proposals:
        proposals.append(plan.baseline)
    case, measured = chosen_case(plan, sweep)
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    cases = []
    for proposal in proposals:  # no other plan writes another program under that name
        digest = sha256(program_text(proposal.program).encode()).hexdigest()[:12]
        cases.append(case_of(proposal, case, folder / "plans" / f"{sweep.name}-{digest}.csv"))
    planned = tuple((one, replace(measured, launches=most)) for one in cases)
    trial = replace(sweep, name=f"{sweep.name}-plan", cases=planned, axes=_VARIED)
    store = Store(folder)
    whole = plan_sweep(trial, store, Choice(reruns=True))
    if kept := len(whole.items) - len(whole.missing):
        note(f"{counted(kept, 'launch')} of trials that were stopped are kept")
    note_rerun(whole, store)
    since = rerun_since(store, whole.sweep_id)
    runs: dict[int, pd.DataFrame] = {}  # that are ok, by the place of their case
    round_s: float | None = None  # of a launch of each, of those made last

    def steps_of(places: Sequence[int], num_launches: int) -> list[list[float]]:
        """Bring these cases to so many launches; return the steps of all cases' launches."""
        nonlocal round_s
        part = [(cases[place], replace(measured, launches=num_launches)) for place in places]
        began_s, choice = time.monotonic(), Choice(since=since)
        result = run_sweep(replace(trial, cases=tuple(part)), store, choice, display)
        if num_made := len(result.plan.missing):
            round_s = (time.monotonic() - began_s) * len(places) / num_made
        good = result.frame[result.frame["status"] == "ok"]
        for place in places:
            runs[place] = good[good["case_id"] == cases[place].case_id]
        return [runs[place][STEP.name].dropna().tolist() for place in range(len(cases))]

    frame = table_of(proposals)
    known = known_of(trial, folder, num_sides=1)
    for text in forecast_texts(
        known.noise, "noise of stored launches", known.round_s, len(cases), most
    ):
        note(text)

    def note_forecast(steps: Steps) -> None:
        """Note what could not be said beforehand, now that there are launches."""
        level = None if known.noise else noise_of_launches(STEP, steps)
        noise = None if level is None else level.noise
        for text in forecast_texts(noise, "noise so far", round_s, len(steps), most):
            note(text)

    outcome = race(
        steps_of,
        len(cases),
        most,
        lambda one: note(set_aside_text(frame, one)),
        note_forecast,
    )
    note(stop_text(outcome, most))
    stop = outcome.stop(most)
    if outcome.regret is None or stop is not Stop.failed:  # else the same command can go on
        forget_rerun(whole, store)
    return replace(trials_of(frame, outcome, runs), stop=stop)


def forecast_texts(
    noise: Noise | None, origin: str, round_s: float | None, num_arms: int, most: int
) -> Iterator[str]:
    """Which difference is found with how many launches of each, and how long these take."""
    if noise is not None and most >= FEWEST_LAUNCHES:
        planned = tuple(range(FEWEST_LAUNCHES, most + 1))
        reach = reach_text(noise, planned, num_arms * (num_arms - 1) // 2)
        yield f"{reach} ({origin} {percent(noise.deviation)})"
    if round_s is not None:
        yield (
            f"one launch of each takes about {duration(round_s)}: at most "
            f"{duration(most * round_s)} for {counted(most, 'launch')} of each"
        )


def stop_text(outcome: Outcome, most: int) -> str:
    """Why no more launches are made, in a line."""
    num = counted(max(map(len, outcome.steps)), "launch")
    match outcome.stop(most):
        case Stop.decided:
            return f"stopped: decided after {num} of each"
        case Stop.most:
            return f"stopped: --max-launches {most} reached, and not decided"
    return f"stopped: launches failed after {num} of each, and it is not decided; see: ppbench ls"


def set_aside_text(frame: pd.DataFrame, one: SetAside) -> str:
    """A line of progress for a proposal that is not measured further."""
    text = f"set aside after {counted(one.num_launches, 'launch')}: {name_of(frame, one.arm)}"
    if one.longer is None:
        return f"{text}, whose runs failed; see: ppbench ls"
    low, high = (percent(end - 1) for end in (one.longer.low, one.longer.high))
    by = percent(one.longer.estimate - 1)
    return f"{text}, slower by {by} ({low} to {high}) than {name_of(frame, one.best)}"


def chosen_case(plan: Plan, sweep: Sweep) -> tuple[Case, Measure]:
    """The settings of a sweep file's case, with the policy that a plan chose for its replicas."""
    case, measured = sweep.cases[0]
    return replace(case, sharding_policy=plan.request.sharding), measured


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


def table_of(proposals: Sequence[Proposal]) -> pd.DataFrame:
    """A row for each proposal, with what is predicted of it."""
    return pd.DataFrame(
        {
            "schedule": proposal.configuration.schedule,
            "stages_per_rank": proposal.configuration.stages_per_rank,
            "microbatch_size": proposal.configuration.microbatch_size,
            "predicted_step_ns": proposal.step_ns,
            "predicted_low_ns": proposal.step_low_ns,
            "predicted_high_ns": proposal.step_high_ns,
            "predicted_peak_bytes": max(proposal.peak_high_bytes),
        }
        for proposal in proposals
    )


def trials_of(frame: pd.DataFrame, outcome: Outcome, runs: dict[int, pd.DataFrame]) -> Trials:
    """Predicted and measured figures side by side: means of launches, with 95 % intervals."""
    steps = outcome.steps
    intervals = [interval_of(steps, arm) if own else None for arm, own in enumerate(steps)]
    of_arms = [runs[arm] for arm in range(len(steps))]
    frame = frame.assign(
        measured_step_ns=[math.nan if one is None else one.estimate for one in intervals],
        measured_low_ns=[math.nan if one is None else one.low for one in intervals],
        measured_high_ns=[math.nan if one is None else one.high for one in intervals],
        num_launches=list(map(len, steps)),
        step_error=lambda known: known["measured_step_ns"] / known["predicted_step_ns"] - 1,
        measured_peak_bytes=[own["peak_memory_bytes"].median() for own in of_arms],
    )
    cautions = tuple(
        Counter(name for row in own.to_dict("records") for name in cautions_of(row))
        for own in of_arms
    )
    frame.loc[frame["measured_high_ns"] == math.inf, ["measured_low_ns", "measured_high_ns"]] = None
    return Trials(frame, outcome.regret, outcome.finding, cautions)
