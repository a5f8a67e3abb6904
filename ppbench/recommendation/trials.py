"""Measures the best proposals of a plan, and 1F1B, as the cases of one sweep.

    proposals --cases--> sweep until it is known which case to take --judgement--> answer

They take turns in the same processes, as those of `ppbench sweep --budget` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pandas as pd

from engine.plan.schedules.registry import CSV_PREFIX
from ppbench.config.kinds import seconds_of
from ppbench.config.programs import digest_of
from ppbench.config.sweep import Sweep
from ppbench.console import note
from ppbench.display.cases import varying_axes
from ppbench.display.units import percent, written
from ppbench.files import write_file
from ppbench.judge.verdicts import Verdict
from ppbench.planning.handover import case_of, chosen_case, program_text
from ppbench.planning.plan import AUTO, Plan, Proposal
from ppbench.report.pages.advice import NO_END
from ppbench.report.pages.conclusions import conclude
from ppbench.report.pages.judgement import Judged, judge
from ppbench.report.pages.plan import Trials
from ppbench.report.until_answered import UntilAnswered
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.store import Store

_VARIED = (
    *("schedule", "stages_per_rank", "num_microbatches", "train_microbatch_size"),
    *("model_partition", "train_recompute", "slices_number"),
)


def measure(
    plan: Plan,
    sweep: Sweep,
    num: int,
    most: int,
    folder: Path,
    *,
    reruns: bool = False,
    display: Display | None = None,
    command: str = "",
) -> Trials:
    """Measure the best `num` proposals and 1F1B until it is known which of them to take.

    Each has at most `most` launches, within the budget of the sweep file. Runs go into the results
    folder, programs of the solver into its folder `plans`; what is there counts, unless it `reruns`
    all. `command` does this again. Raises UsageError for what cannot be run here,
    SweepInterruptedError; what is measured is kept then.
    """
    proposals = list(plan.proposals[:num])
    if plan.baseline is not None and plan.baseline not in proposals:
        proposals.append(plan.baseline)
    case, measured = chosen_case(plan, sweep)
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    cases = []
    for proposal in proposals:
        text = program_text(proposal.program)  # no other plan writes another one under that name
        digest = sha256(text.encode()).hexdigest()[:12]
        file = folder / "plans" / f"{sweep.name}-{digest}.csv"
        one = case_of(proposal.configuration, case, file)
        if proposal.configuration.schedule == AUTO:
            write_file(file, [text])
            one = replace(one, program_digest=digest_of(file))
        cases.append(one)
    # Without a budget they are judged by looks all the same.
    measured = replace(measured, launches=most, budget=measured.budget or NO_END)
    planned = tuple((one, measured) for one in cases)
    trial = replace(sweep, name=f"{sweep.name}-plan", cases=planned, axes=_VARIED)
    budget_s = seconds_of(measured.budget)
    policy = UntilAnswered(trial, Store(folder), budget_s, note, are_ranks_free=True)
    again = f"{command} --rerun" if reruns and command else command
    choice = Choice(reruns=reruns)
    done = run_sweep(trial, Store(folder), choice, display, again or None, policy=policy)
    if not policy.stop:  # it has not seen the last launch
        policy(done.frame)
    ids = [one.case_id for one in cases]
    return trials_of(proposals, ids, done.frame, command, [Store(folder)])


def trials_of(
    proposals: Sequence[Proposal],
    case_ids: Sequence[str],
    runs: pd.DataFrame,
    command: str = "",
    stores: Iterable[Store] = (),
) -> Trials:
    """Judge the runs of proposals, which are given with the ids of their cases.

    Measured steps are those of the throughput that is judged: its median over launches, and the
    range of these; of a single launch it is the interval of its steps. The number of ranks is a
    choice of the plan, so that tokens/s of all ranks together are compared.
    """
    is_ours = runs["schedule"].str.startswith(CSV_PREFIX)  # named as in the plan
    runs = runs.assign(schedule=runs["schedule"].mask(is_ours, AUTO))
    judged = judge(runs, varying_axes(runs), stores, are_ranks_free=True)
    found = judged.of_runs.set_index("case_id").reindex(list(case_ids)).reset_index()
    tokens = pd.Series([one.tokens_per_s * one.step_ns for one in proposals])
    frame = pd.DataFrame(
        {
            "schedule": proposal.configuration.schedule,
            "world_size": proposal.configuration.ranks,
            "stages_per_rank": proposal.configuration.stages_per_rank,
            "microbatch_size": proposal.configuration.microbatch_size,
            "predicted_step_ns": proposal.step_ns,
            "predicted_low_ns": proposal.step_low_ns,
            "predicted_high_ns": proposal.step_high_ns,
            "predicted_peak_bytes": max(proposal.peak_bytes),
        }
        for proposal in proposals
    ).assign(
        measured_step_ns=tokens / found["tokens_per_s"],
        measured_low_ns=tokens / found["high"],
        measured_high_ns=tokens / found["low"],
        num_launches=found["num_launches"].fillna(0).astype(int),
        step_error=lambda known: known["measured_step_ns"] / known["predicted_step_ns"] - 1,
        measured_peak_bytes=found["peak_memory_bytes"],
    )
    sentences = [_of_first(judged, case_ids[0])]
    if len(errors := frame["step_error"].dropna()):
        ends = [written(end, "+.1f", "%", 100) for end in (errors.min(), errors.max())]
        sentences.append(
            f"Measured steps differ from predicted ones by {' to '.join(dict.fromkeys(ends))}: a "
            "prediction counts computations and messages, and nothing else of the machine."
        )
    is_ok = bool((runs["status"] == "ok").all()) and bool(frame["num_launches"].all())
    conclusions = conclude(judged, runs, command)
    by_case = dict(zip(case_ids, proposals, strict=True))
    to_take = by_case.get(conclusions.sentence.case_id)
    return Trials(tuple(proposals), frame, conclusions, tuple(sentences), is_ok, to_take)


def _of_first(judged: Judged, case_id: str) -> str:
    """Say how the first choice of the plan did."""
    for judgement in judged.judgements:
        if case_id not in judgement.arms:
            continue
        place = judgement.arms.index(case_id)
        text = f"The first choice of the plan is {judgement.names[place]}"
        change = judgement.change(place, 0) if place else None
        if change is None:
            return f"{text}."
        is_cautious = judgement.cautions or judgement.has_several_machines
        if is_cautious or change.ratio is None or not change.is_decided:
            return f"{text}; whether it is as fast is open."
        if change.verdict is Verdict.same:
            return f"{text}, which is as fast."
        less = percent(1 - change.ratio.estimate)
        return f"{text}: it trains {less} fewer tokens/s than {judgement.names[0]}."
    return "The first choice of the plan was not measured: its runs failed; see: ppbench ls"
