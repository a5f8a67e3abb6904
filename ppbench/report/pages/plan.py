"""The page of a plan: what to run, what that gains, throughput against memory, one step, a table.

Proposals that were measured lead it. It holds no chart of plotly, so it is small and opens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.plan.predict import WalkedStep
from engine.plan.spans import COLUMNS
from ppbench.display.document import Block, Code, Facts, Picture, Result, Section, Text
from ppbench.display.rows import Rows, as_records
from ppbench.display.tables import Detail, Table
from ppbench.display.units import counted, milliseconds, percent, size
from ppbench.planning.plan import Configuration, Plan, Proposal
from ppbench.planning.words import SHOWN, TRIED, pipeline_text, row_of, sentences_of
from ppbench.report.charts.frontier import Point, frontier
from ppbench.report.pages.conclusions import Conclusions, Tile, tiled
from ppbench.report.pages.provenance import PLAN, About
from ppbench.report.pages.templates import page as page_of
from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.timelines import Timeline, small

_KIND = "A plan: predicted, not measured."
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
        return self.conclusions.answers

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
    steps: Sequence[tuple[Proposal, WalkedStep]]
    origin: str  # where the costs are from
    commands: Sequence[tuple[str, str]]  # what to do next, and the command for it
    command: str  # makes the page again
    trials: Trials | None = None


def document_of(
    plan: Plan, trials: Trials | None, *, is_page: bool = False
) -> tuple[Rows, list[Block]]:
    """Return the rows of a plan, or of its trials, and what a terminal and a page say of it.

    A page has tiles too, and opens the stages of each proposal.
    """
    first, *others = sentences_of(plan, is_measured=trials is not None)
    proposals = list(plan.proposals)
    if plan.baseline is not None and plan.baseline not in proposals:
        proposals.append(plan.baseline)
    rows = Rows.of_records([row_of(proposal) for proposal in proposals])
    hidden = () if len(plan.request.ranks) > 1 else ("world_size",)
    shown, tried = (
        {name: column for name, column in columns.items() if name not in hidden}
        for columns in (SHOWN, TRIED)
    )
    details = []
    for number, one in enumerate(proposals if is_page else ()):
        facts = {"peak by rank": ", ".join(map(size, one.peak_bytes))}
        html = f"{Text(pipeline_text(one.configuration)).html()}\n{Facts(facts).html()}"
        details.append(Detail(f"stages-{number}", name_of(one.configuration), html))
    table = Table(rows, shown, ("step_ns",), name="The best few", details=details)
    predicted: list[Block] = [
        Text(first, kind="lead" if trials is None else ""),
        *([_tiles(plan)] if is_page else []),
        *([Text(others)] if others else []),
    ]
    if trials is None:
        return rows, [
            Section("answer", "", predicted),
            Section("proposals", "The best few", [table]),
        ]
    measured = Rows.of(trials.frame)
    answer: list[Block] = [trials.conclusions, Text(trials.sentences)]
    if trials.conclusions.notes:
        answer.append(Section("", "", [Text(trials.conclusions.notes)], of_page=True))
    return measured, [
        Section("answer", "", [*answer, Table(measured, tried, name="Measured")]),
        Section("predicted", "What was predicted", predicted),
        Section("proposals", "The best few", [table]),
    ]


def _tiles(plan: Plan) -> Picture:
    """The figures of the first choice beside those of 1F1B."""
    best, baseline, limit = plan.first, plan.baseline, plan.request.memory_bytes
    rivals = ["", "", ""]
    if baseline is not None and baseline.configuration != best.configuration:
        rivals = [
            f"1F1B {baseline.tokens_per_s:,.0f}",
            f"1F1B {size(max(baseline.peak_bytes))}",
            f"1F1B {percent(baseline.bubble_fraction)}",
        ]
    of = "" if limit is None else f"of {size(limit)}"
    tiles = [
        Tile("tokens/s", f"{best.tokens_per_s:,.0f}", milliseconds(best.step_ns), rivals[0]),
        Tile("peak memory, fullest rank", size(max(best.peak_bytes)), of, rivals[1]),
        Tile("bubble", percent(best.bubble_fraction), "", rivals[2]),
    ]
    return tiled(tiles)


def render_plan(page: PlanPage) -> str:
    """Return the page as HTML: what a terminal says, with pictures and what to do next."""
    plan, trials, request = page.plan, page.trials, page.plan.request
    _, (*answers, proposals) = document_of(plan, trials, is_page=True)
    heading = "Throughput against memory, as predicted"
    pictures = [Section("", heading, [_picture(plan)])]
    timelines = dict[str, Timeline]()
    if all(step.program.num_computations <= MOST_SPANS for _, step in page.steps):
        steps = []
        for proposal, simulation in page.steps:
            spans = pd.DataFrame(simulation.spans(), columns=list(COLUMNS))
            facts = f"{milliseconds(proposal.step_ns)}, bubble {percent(proposal.bubble_fraction)}"
            steps.append(Step(f"{name_of(proposal.configuration)} · {facts}", spans))
        if steps:
            timelines["small"] = small(steps)
            drawn = timelines["small"].picture("small")
            pictures.append(Section("", "One step, as simulated", [drawn]))
    batch = request.replicas * request.global_batch
    memory = "no limit" if request.memory_bytes is None else f"{size(request.memory_bytes)} each"
    asked = {"costs": page.origin, "ranks": f"{' or '.join(map(str, request.ranks))}, {memory}"}
    if request.replicas > 1:
        asked["replicas"] = f"{request.replicas}, which share by {request.sharding}"
    asked |= {
        "global batch": f"{batch} sequences of {request.seq_len} tokens",
        "schedules": ", ".join(request.schedules),
        "stages per rank": " or ".join(map(str, request.stages_per_rank)),
        "recompute": request.recompute,
    }
    blocks = [*answers, Section("pictures", "", pictures, kind="pictures"), proposals]
    if page.commands:
        blocks.append(Section("next", "Run it", [Code(cmd, text) for text, cmd in page.commands]))
    blocks.append(Section("reproduce", "What was asked", [Facts(asked), Code(page.command)]))
    first = sentences_of(plan)[0] if trials is None else trials.answers[0]
    kind = "A plan, with the best proposals measured." if trials else _KIND
    about = About(kind=PLAN, title=page.title, answer=first)
    return page_of(Result(blocks), about, kind, timelines=timelines)


def _picture(plan: Plan) -> Picture:
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
        f"{configuration.num_slices} slices",
    ]
    return ", ".join(part for part in parts if part not in ("1 stages per rank", "1 slices"))
