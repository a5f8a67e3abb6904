"""The page of a plan: what to run, what that gains, throughput against memory, one step, a table.

Proposals that were measured lead it. It holds no chart of plotly, so it is small and opens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.plan.predict import TimedStep
from engine.plan.spans import COLUMNS
from ppbench.display.rows import as_records
from ppbench.display.units import MISSING, NS_PER_MS, counted, milliseconds, percent, size
from ppbench.planning.plan import Configuration, Plan, Proposal
from ppbench.planning.words import pipeline_text, sentences_of
from ppbench.report.charts.frontier import Frontier, Point, frontier
from ppbench.report.pages.conclusions import Conclusions, Tile
from ppbench.report.pages.provenance import PLAN, About
from ppbench.report.pages.strips import strips_of
from ppbench.report.pages.templates import render
from ppbench.report.timeline.marks import Step

MOST_SPANS = 200_000
"""Actions of a step that is drawn; of more, a strip would show nothing but stripes."""


@dataclass(frozen=True)
class Trials:
    """Proposals that were measured, and which of them to take."""

    proposals: tuple[Proposal, ...]
    frame: pd.DataFrame
    """A row for each, in the order of the plan: its predicted and measured step, peak and error."""
    conclusions: Conclusions
    sentences: tuple[str, ...]  # how the first choice did, and how far predictions were off
    is_ok: bool  # whether every run succeeded
    to_take: Proposal | None = None  # as the runs say; None where that is open

    @property
    def answers(self) -> list[str]:
        """Which proposal to take, for each number of ranks, and what would decide what is open."""
        said = self.conclusions.sentence
        texts = [said.text, said.advice, said.command]
        return [*filter(None, texts), *(other.text for other in self.conclusions.others)]

    def as_dict(self) -> dict[str, object]:
        """The table and the answer, as JSON has them."""
        said = self.conclusions.sentence
        answer = {"grade": said.grade, "sentences": [*self.answers, *self.sentences]}
        return {"trials": as_records(self.frame), "answer": answer}


@dataclass(frozen=True)
class PlanPage:
    """The content of a page; `steps` are the simulated steps of the first choice and of 1F1B."""

    title: str
    plan: Plan
    steps: Sequence[tuple[Proposal, TimedStep]]
    origin: str  # where the costs are from
    commands: Sequence[tuple[str, str]]  # what to do next, and the command for it
    command: str  # makes the page again
    trials: Trials | None = None


def render_plan(page: PlanPage) -> str:
    """Return the page as HTML."""
    plan, trials = page.plan, page.trials
    first, *others = sentences_of(plan, is_measured=trials is not None)
    proposals = list(plan.proposals)
    baseline = plan.baseline
    configurations = [proposal.configuration for proposal in proposals]
    if baseline is not None and baseline.configuration not in configurations:
        proposals.append(baseline)
    best, request = plan.first, plan.request
    rivals = ["", "", ""]
    if baseline is not None and baseline.configuration != best.configuration:
        rivals = [
            f"1F1B {baseline.tokens_per_s:,.0f}",
            f"1F1B {size(max(baseline.peak_bytes))}",
            f"1F1B {percent(baseline.bubble_fraction)}",
        ]
    limit = "" if request.memory_bytes is None else f"of {size(request.memory_bytes)}"
    tiles = [
        Tile("tokens/s", f"{best.tokens_per_s:,.0f}", milliseconds(best.step_ns), rivals[0]),
        Tile("peak memory, fullest rank", size(max(best.peak_bytes)), limit, rivals[1]),
        Tile("bubble", percent(best.bubble_fraction), "", rivals[2]),
    ]
    measured: dict[Configuration, str] = {}
    if trials is not None:
        for proposal, row in zip(trials.proposals, trials.frame.to_dict("records"), strict=True):
            num = row["num_launches"]
            measured[proposal.configuration] = (
                f"{milliseconds(row['measured_step_ns'])} in {counted(num, 'launch')}"
                if num
                else "failed"
            )
    rows = []
    for proposal in proposals:
        ends = (f"{ns / NS_PER_MS:,.1f}" for ns in (proposal.step_low_ns, proposal.step_high_ns))
        rows.append(
            {
                "name": name_of(proposal.configuration),
                "details": pipeline_text(proposal.configuration),
                "measured": measured.get(proposal.configuration, MISSING),
                "step": f"{milliseconds(proposal.step_ns)} [{', '.join(ends)}]",
                "tokens_per_s": f"{proposal.tokens_per_s:,.0f}",
                "bubble": percent(proposal.bubble_fraction),
                "peaks": ", ".join(map(size, proposal.peak_bytes)),
                "is_baseline": proposal == baseline,
            }
        )
    drawn = []
    are_drawn = all(step.program.num_computations <= MOST_SPANS for _, step in page.steps)
    for proposal, simulation in page.steps if are_drawn else ():
        spans = pd.DataFrame(simulation.spans(), columns=list(COLUMNS))
        name = name_of(proposal.configuration)
        figures = f"{milliseconds(proposal.step_ns)}, bubble {percent(proposal.bubble_fraction)}"
        drawn.append((name, Step(name, spans), figures))
    batch = request.replicas * request.global_batch
    replicas = f"{request.replicas}, which share by {request.sharding}"
    memory = "no limit" if request.memory_bytes is None else f"{size(request.memory_bytes)} each"
    return render(
        "plan.html",
        title=page.title,
        about=About(
            kind=PLAN, title=page.title, answer=first if trials is None else trials.answers[0]
        ),
        trials=trials,
        lead=first,
        sentences=others,
        tiles=tiles,
        picture=_picture(plan),
        strips=strips_of(drawn) if drawn else None,
        rows=rows,
        facts=[
            ("costs", page.origin),
            ("ranks", f"{' or '.join(map(str, request.ranks))}, {memory}"),
            *([("replicas", replicas)] if request.replicas > 1 else []),
            ("global batch", f"{batch} sequences of {request.seq_len} tokens"),
            ("schedules", ", ".join(request.schedules)),
            ("stages per rank", " or ".join(map(str, request.stages_per_rank))),
            ("recompute", request.recompute),
        ],
        commands=page.commands,
        command=page.command,
    )


def _picture(plan: Plan) -> Frontier:
    """The proposals, the baseline and the front of all that was found."""
    request = plan.request
    tokens = request.replicas * request.global_batch * request.seq_len
    kinds = [(plan.first, "chosen"), *((proposal, "proposed") for proposal in plan.proposals)]
    if plan.baseline is not None:
        kinds.insert(1, (plan.baseline, "baseline"))
    points: dict[Configuration, Point] = {}
    for proposal, kind in kinds:
        name, most = name_of(proposal.configuration), max(proposal.peak_bytes)
        point = Point(most, proposal.tokens_per_s, name, kind)
        points.setdefault(proposal.configuration, point)
    for found in plan.frontier:
        speed = tokens / found.step_ns * 1e9
        point = Point(found.memory_bytes, speed, name_of(found.configuration), "found")
        points.setdefault(found.configuration, point)
    return frontier(list(points.values()), request.memory_bytes)


def name_of(configuration: Configuration) -> str:
    """Return a configuration in short: `zbv, 4 ranks, 2 stages per rank, 16 microbatches of 2`."""
    each = configuration.microbatch_size
    parts = [
        configuration.schedule,
        counted(configuration.ranks, "rank"),
        f"{configuration.stages_per_rank} stages per rank",
        f"{counted(configuration.num_microbatches, 'microbatch')} of {each}",
    ]
    return ", ".join(part for part in parts if part != "1 stages per rank")
