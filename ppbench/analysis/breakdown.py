"""Classes of spans that changed between two sides: computations, transfers, collectives, waiting.

A step time shows how much slower a step became; its spans show which work became slower. Each
launch gives one number per class, the median over the actions of all its steps, and launches are
compared with launches as everywhere: comparing spans with spans would make every difference
significant.

Waiting is treated separately. A rank waits because something else takes longer, so waiting changes
with every cause and explains none; it is reported alone only where nothing else has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from engine.plan.action import Op
from ppbench.analysis.collectives import collectives
from ppbench.analysis.metrics import compute_spans, step_starts
from ppbench.analysis.transfers import messages
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Evidence, Launches, Metric
from ppbench.judge.verdicts import Change, judge

DURATION = Metric("duration_ns", higher_is_better=False, in_points=False)
EVERYWHERE = -1
"""The place of a class that is summed over all stages and ranks."""
MATTERS = 0.01
"""Change of a class within which it is the same."""
NEGLIGIBLE = 0.005
"""Share of a step below which the contribution of a class is not reported."""


class Kind(StrEnum):
    """Kind of spans; the last is an effect, the others are causes."""

    compute = "compute"
    optimizer = "optimizer"
    transfer = "transfer"
    collective = "collective"
    waiting = "waiting"


@dataclass(frozen=True, order=True)
class SpanClass:
    """Spans that do the same work: an op of a stage, a rank's optimizer, a channel.

    Replicas do the same work: their spans are of one class.
    """

    kind: Kind
    place: int  # the stage; the rank of an optimizer and of waiting; the sending stage; EVERYWHERE
    op: str = ""  # of computations and collectives
    target: int = -1  # the receiving stage of a transfer


@dataclass(frozen=True)
class Figure:
    """Time of a class of spans in one launch."""

    ns: float  # median over actions; for waiting, over steps
    num_per_step: float

    @property
    def per_step_ns(self) -> float:
        return self.ns * self.num_per_step


Figures = Mapping[SpanClass, Figure]


@dataclass(frozen=True)
class Moved:
    """A class of spans on both sides; `contribution_ns` is its change of a rank's time per step."""

    of: SpanClass
    change: Change
    contribution_ns: float
    is_tested: bool
    has_moved: bool
    may_have_moved: bool  # whether the launches leave room for a change that matters


def launch_figures(spans: pd.DataFrame) -> dict[SpanClass, Figure]:
    """Figures of a launch's classes, from the spans of all its steps and replicas."""
    num_steps = max(1, spans["step"].nunique() * spans["replica"].nunique())
    optimizer = spans[spans["op"] == Op.OPT.value]
    compute = compute_spans(spans)
    durations: dict[SpanClass, pd.Series] = {}
    for (op, stage), group in compute.groupby(["op", "stage"]):
        durations[SpanClass(Kind.compute, int(str(stage)), str(op))] = _durations(group)
    for rank, group in optimizer.groupby("rank"):
        durations[SpanClass(Kind.optimizer, int(str(rank)))] = _durations(group)
    for (source, target), group in messages(spans).groupby(["source", "target"]):
        channel = SpanClass(Kind.transfer, int(str(source)), target=int(str(target)))
        durations[channel] = group["moving_ns"]
    # Of collectives, the times in which bytes move: waiting for other replicas is not theirs.
    for (kind, stage), group in collectives(spans).groupby(["op", "stage"], observed=True):
        durations[SpanClass(Kind.collective, int(str(stage)), str(kind))] = group["moving_ns"]
    figures = {
        own: Figure(float(ns.median()), len(ns) / num_steps) for own, ns in durations.items()
    }
    # Waiting time of each rank, the mean of its replicas: the step minus its computations.
    program = spans[spans["op"] != Op.OPT.value]
    step_ns = program.groupby("step")["end_ns"].max() - step_starts(spans)
    busy = _durations(compute).groupby([compute["step"], compute["rank"]]).sum()
    for waiter, busy_ns in (busy.unstack(fill_value=0) / spans["replica"].nunique()).items():
        waiting = SpanClass(Kind.waiting, int(str(waiter)))
        figures[waiting] = Figure(float((step_ns - busy_ns).median()), 1)
    return figures


def _durations(spans: pd.DataFrame) -> pd.Series:
    return spans["end_ns"] - spans["start_ns"]


def of_whole_pipeline(figures: Figures) -> Figures:
    """The figures of a launch summed over stages and ranks, per step.

    For sides whose stages are different slices of the model, and so do not compare one by one.
    """
    sums: dict[SpanClass, float] = {}
    for spans, figure in figures.items():
        whole = SpanClass(spans.kind, EVERYWHERE, spans.op)
        sums[whole] = sums.get(whole, 0.0) + figure.per_step_ns
    return {whole: Figure(ns, 1) for whole, ns in sums.items()}


def with_whole_backwards(
    base: Sequence[Figures], head: Sequence[Figures]
) -> tuple[list[Figures], list[Figures]]:
    """Join the two halves of the backward on a side whose other side does not split it."""
    is_halved, is_head_halved = (
        any(spans.op == Op.I.value for figures in side for spans in figures)
        for side in (base, head)
    )
    if is_halved == is_head_halved:
        return list(base), list(head)
    return [_joined(figures) for figures in base], [_joined(figures) for figures in head]


def _joined(figures: Figures) -> Figures:
    """B of each stage as the sum of its halves I and W, if it has both."""
    joined = dict(figures)
    for spans, half in figures.items():
        other = SpanClass(Kind.compute, spans.place, Op.W.value)
        if spans.op == Op.I.value and other in figures:
            del joined[spans], joined[other]
            whole = Figure(half.ns + figures[other].ns, half.num_per_step)
            joined[SpanClass(Kind.compute, spans.place, Op.B.value)] = whole
    return joined


def breakdown(base: Sequence[Figures], head: Sequence[Figures], step_ns: float) -> list[Moved]:
    """Compare every class that both sides have: causes first, each by size of contribution.

    `base` and `head` have one element per launch; `step_ns` is a step of the base. Causes are
    tested together and waiting separately: with one Holm correction they would weaken each other.
    """
    shared = sorted(set().union(*base) & set().union(*head))
    causes = [spans for spans in shared if spans.kind is not Kind.waiting]
    waits = [spans for spans in shared if spans.kind is Kind.waiting]
    return [*_tested(causes, base, head, step_ns), *_tested(waits, base, head, step_ns)]


def _tested(
    classes: Sequence[SpanClass], base: Sequence[Figures], head: Sequence[Figures], step_ns: float
) -> list[Moved]:
    known = {
        spans: [[figures[spans] for figures in side if spans in figures] for side in (base, head)]
        for spans in classes
    }
    pairs = []
    for both in known.values():
        base_side, head_side = (Launches(tuple(one.ns for one in side)) for side in both)
        pairs.append(Evidence(base_side, head_side, resolution=MATTERS))
    moved, least_ns = [], NEGLIGIBLE * step_ns
    for (spans, both), change in zip(known.items(), judge(DURATION, pairs), strict=True):
        base_ns, head_ns = (  # medians over launches of the time per step
            float(pd.Series([figure.per_step_ns for figure in figures]).median())
            for figures in both
        )
        contribution_ns = head_ns - base_ns
        # The largest change that the interval by launches allows; without one, as of times that
        # are 0, it is taken as it was measured.
        most_ns = math.fabs(contribution_ns)
        has_moved = most_ns >= least_ns and change.verdict.is_claim
        if change.ratio is not None:
            ends = (change.ratio.low, change.ratio.high)
            most_ns = base_ns * max(math.fabs(end - 1) for end in ends)
        is_tested = min(change.num_base, change.num_head) >= FEWEST_LAUNCHES
        moved.append(
            Moved(spans, change, contribution_ns, is_tested, has_moved, most_ns >= least_ns)
        )
    return sorted(moved, key=lambda part: (-abs(part.contribution_ns), part.of))
