"""The marks of one step in a timeline: bars by kind, each with the text that it shows.

Marks are numbers and a few phrases per kind, from which every drawing of a step is made.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, JOINING_OPS, OPS, RECV_OPS, SEND_OPS, Op
from engine.plan.spans import Lane, lane_of
from ppbench.analysis.transfers import waiting_ns
from ppbench.analysis.waits import (
    NONE,
    Cause,
    Gaps,
    Spans,
    Waits,
    critical_path,
    gaps,
    moments,
    waits,
)
from ppbench.display.colors import (
    IDLE_COLORS,
    LIGHTEST,
    OP_COLORS,
    OP_WORDS,
    OPEN_COLORS,
    ink_on,
    tinted,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MOVING = SEND_OPS | RECV_OPS | frozenset(JOINING_OPS)
"""The ops that move bytes, to another rank or between replicas."""
WAITING_TINT = 0.55
"""The whiteness of the waiting part of a transfer."""
CAUSE_WORDS = {
    Cause.STAGE: "idle: another stage",
    Cause.TRANSFER: "idle: message",
    Cause.GATHER: "idle: parameters",
    Cause.HOST: "idle: host",
    Cause.REDUCE: "idle: last collective",
    Cause.NO_WORK: "idle: no work left",
}
_AFTER_ALL = {
    Cause.REDUCE: "until its last collective is over; all is computed",
    Cause.NO_WORK: "all is computed in this step",
}
NO_GAP = "no gap before it"
OPEN_WORDS = {
    "waiting": "waiting at the end",
    "working": "at work at the end",
    "stopped": "stopped",
    "dead": "dead",
}
"""The states of a failed run's ranks when they were last seen."""
_HATCHES = {"waiting": "/", "working": "\\", "stopped": "x", "dead": "x"}
_PLACE = "rank {rank}, stage {stage}"
_TIMES = ("start {start}", "duration {duration}")
_QUIET_SHARE = 0.5
"""Idle time drawn after a failed run's last event, as a share of the time before it."""


@dataclass(frozen=True)
class Phrases:
    """A phrase per mark: `words[codes]`, in which `{}` stands for the time `amount_ns`."""

    words: list[str]
    codes: Ints
    amount_ns: Ints


@dataclass(frozen=True)
class Kind:
    """The properties that the marks of one kind share.

    `lines` are its text. In them `{start}`, `{duration}` and `{phrase}` stand for those of a mark,
    and other names in braces for its `numbers`.
    """

    name: str
    lane: Lane
    colors: list[str]
    lines: tuple[str, ...]
    group: str = ""  # of kinds that are shown and hidden together; by default its name
    is_idle: bool = False
    has_text: bool = False  # the microbatch is written inside
    hatch: str = ""  # plotly's name of a pattern, for unfinished actions
    op: str = ""  # of an action
    beside: int = 0  # -1: of the step before the one that is shown, 1: of the one after it

    @property
    def is_listed(self) -> bool:
        """Whether it has an entry of its own in the legend."""
        return not self.beside and self.group in ("", self.name)

    @property
    def inks(self) -> list[str]:
        """The text colour on each of the colours, if there is text."""
        return [ink_on(color) for color in self.colors] if self.has_text or self.hatch else []


@dataclass(frozen=True)
class Marks:
    """The bars of one kind, ordered by `row` and start. Times in nanoseconds since the step began.

    A row is a rank or, in a drawing of several steps, lies as far down as a rank's middle.
    `numbers` appear in the text: times where the name ends in `_ns`, sizes in bytes, and counts.
    `shade` is an index into the kind's colours.
    """

    kind: Kind
    row: Ints | Floats
    begin_ns: Ints
    width_ns: Ints
    numbers: dict[str, Ints]
    shade: Ints
    phrases: Phrases | None = None
    labels: tuple[str, ...] = ()  # written inside instead of the microbatch

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class Step:
    """One step of a run, measured or planned: a title and its spans.

    `spans` has the columns of `engine.plan.spans.Span` for a single step, at least one computation,
    and any index; the columns `waiting_ns` and `is_paired`, of the forwards of pairs, are optional.
    Time 0 is the start of the first
    computation; receives may be posted earlier.

    For a failed run, `spans` are the finished actions, possibly none, and `flight` are its rows of
    the store's table `flight`: the state of each rank when it was last seen.

    Of replicas, it is the step of one; `others` are those of the others, in their order, and
    `begin_ns` is when the step of all began.

    Of steps in a row, `windows_ns` are when each rank begins and ends this one, and `beside` are
    those right before and after it. They share `begin_ns`, their time 0.
    """

    title: str
    spans: pd.DataFrame
    flight: pd.DataFrame | None = None
    replica: int = 0
    others: tuple[Step, ...] = ()
    begin_ns: int | None = None
    windows_ns: tuple[Ints, Ints] | None = None
    beside: tuple[Step, ...] = ()
    name: str = ""  # of a step in a row
    period_ns: int | None = None  # the mean of its windows, over all replicas

    def titled(self, title: str) -> Step:
        """Return the same step under another title, with all that is computed of it."""
        _ = self.marks
        other = copy.copy(self)
        object.__setattr__(other, "title", title)
        return other

    @cached_property
    def marks(self) -> list[Marks]:
        """The marks by kind, without empty kinds.

        These are idle time by cause, computations by op, unfinished actions by the state of their
        rank, and transfers and collectives by op, each in a waiting and a moving part.
        """
        finished = [*_idle(self), *_computations(self)] if self.has_computations else []
        return [each for each in [*finished, *_unfinished(self), *_transfers(self)] if len(each)]

    @cached_property
    def marks_in_a_row(self) -> list[Marks]:
        """The marks, and those of the steps beside it, whose texts name their step."""
        found = list(self.marks)
        for step in self.beside:
            side = -1 if step.end_ns < self.end_ns else 1
            for marks in step.marks:
                kind = replace(marks.kind, beside=side, lines=(*marks.kind.lines, step.name))
                found.append(replace(marks, kind=kind))
        return found

    @cached_property
    def shown_ns(self) -> tuple[int, int]:
        """The first and the last time of it and of the steps beside it."""
        steps = self, *self.beside
        begun = (step.windows_ns[0] for step in steps if step.windows_ns is not None)
        begins = [0, *(int(begin_ns.min()) - self.origin_ns for begin_ns in begun)]
        return min(begins), max(step.end_ns for step in steps)

    @cached_property
    def columns(self) -> Spans:
        return Spans.of(self.spans)

    @cached_property
    def waits(self) -> Waits:
        begin_ns = self.begin_ns if self.windows_ns is None else self.windows_ns[0]
        pairs = self.spans.get("is_paired")
        is_paired = None if pairs is None else pairs.to_numpy(bool)
        return waits(self.columns, begin_ns, is_paired)

    @cached_property
    def has_computations(self) -> bool:
        return bool(self.columns.are(COMPUTE_OPS).any())

    @cached_property
    def origin_ns(self) -> int:
        if self.begin_ns is not None:
            return self.begin_ns
        if self.flight is not None and not self.has_computations:
            return int(self.flight["since_ns"].min())
        return int(self.waits.spans.start_ns.min())

    @cached_property
    def end_ns(self) -> int:
        """The end of the drawing; for a failed run, some time after the last event."""
        if self.flight is None:
            return int(self.spans["end_ns"].max()) - self.origin_ns
        last = max(0, self.last_change_ns)
        quiet = self.ended_ns - last
        return max(1, last + (min(quiet, round(_QUIET_SHARE * last)) if last else quiet))

    @cached_property
    def last_change_ns(self) -> int:
        """The time at which a failed run's last action began or ended."""
        assert self.flight is not None
        return most(self.spans["end_ns"], self.flight["since_ns"]) - self.origin_ns

    @cached_property
    def ended_ns(self) -> int:
        """The time at which a failed run was ended."""
        assert self.flight is not None
        return most(self.spans["end_ns"], self.flight["until_ns"]) - self.origin_ns

    @cached_property
    def num_ranks(self) -> int:
        last_seen = () if self.flight is None else (self.flight["rank"],)
        return most(self.spans["rank"], *last_seen) + 1

    @cached_property
    def num_stages(self) -> int:
        return max(0, most(self.spans["stage"])) + 1

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        stage, first = np.unique(self.waits.spans.stage, return_index=True)
        return dict(zip(stage.tolist(), self.waits.spans.rank[first].tolist(), strict=True))

    @cached_property
    def path(self) -> Spans:
        """Return the computations on the critical path in order."""
        return self.waits.spans.at(critical_path(self.waits))


def joined(parts: Sequence[tuple[Marks, float]]) -> Marks:
    """Return the marks of one kind in several steps, each of which has its own first row."""
    every = [marks for marks, _ in parts]
    row = np.concatenate([marks.row + first for marks, first in parts])
    order = np.lexsort((np.concatenate([marks.begin_ns for marks in every]), row))

    def column(of: Callable[[Marks], Ints]) -> Ints:
        return np.concatenate([of(marks) for marks in every])[order]

    colors = list(dict.fromkeys(color for marks in every for color in marks.kind.colors))
    places = {id(marks): np.array(list(map(colors.index, marks.kind.colors))) for marks in every}
    phrases = None
    if told := [marks.phrases for marks in every if marks.phrases is not None]:
        firsts = itertools.accumulate((len(own.words) for own in told), initial=0)
        codes = [own.codes + first for own, first in zip(told, firsts, strict=False)]
        phrases = Phrases(
            [word for own in told for word in own.words],
            np.concatenate(codes)[order],
            np.concatenate([own.amount_ns for own in told])[order],
        )
    labels = [label for marks in every for label in marks.labels]
    return Marks(
        replace(every[0].kind, colors=colors),
        row[order],
        column(lambda marks: marks.begin_ns),
        column(lambda marks: marks.width_ns),
        {name: column(lambda marks, name=name: marks.numbers[name]) for name in every[0].numbers},  # type: ignore[misc]
        column(lambda marks: places[id(marks)][marks.shade]),
        phrases,
        tuple(labels[n] for n in order.tolist()) if labels else (),
    )


def most(*columns: pd.Series) -> int:
    """Return the highest number in any of the columns, -1 if all are empty."""
    return max((int(column.max()) for column in columns if len(column)), default=NONE)


def _unfinished(step: Step) -> list[Marks]:
    """Return what each rank was doing when it was last seen, until the run was ended."""
    if step.flight is None:
        return []
    every = step.flight.sort_values("rank")
    is_waiting = every["is_waiting"].eq(True) | every["waits_for_rank"].notna()
    states = np.where(
        every["process"].isin(["stopped", "dead"]),
        every["process"],
        np.where(is_waiting, "waiting", "working"),
    )
    kinds = []
    for state, name in OPEN_WORDS.items():
        rows = every[states == state]
        # An action may have begun before the drawing starts; its hover text has the true start.
        since = np.maximum(rows["since_ns"].to_numpy(np.int64) - step.origin_ns, 0)
        until = rows["until_ns"].to_numpy(np.int64) - step.origin_ns
        lines = (name, "{phrase}", *_TIMES)
        kind = Kind(name, Lane.COMPUTE, [OPEN_COLORS[state]], lines, hatch=_HATCHES[state])
        rank = rows["rank"].to_numpy(np.int64)
        none = np.zeros(len(rows), np.int64)
        phrases = Phrases(rows["account"].astype(str).tolist(), np.arange(len(rows)), none)
        labels = tuple(rows["action"].fillna("").astype(str))
        width = np.maximum(until - since, 0)
        kinds.append(Marks(kind, rank, since, width, {"rank": rank}, none, phrases, labels))
    return kinds


def _idle(step: Step) -> list[Marks]:
    until_ns = None
    if step.windows_ns is not None:
        until_ns = step.windows_ns[1].copy()  # the optimizer is no idle time
        last = step.columns.at(step.columns.are([Op.OPT]))
        np.minimum.at(until_ns, last.rank, last.start_ns)
    every, kinds = gaps(step.waits, until_ns), []
    for cause, name in CAUSE_WORDS.items():
        if step.flight is not None and cause in _AFTER_ALL:
            continue  # no rank of a failed run has finished its work
        pieces = every.at(every.cause == cause)
        has_next = pieces.position != NONE
        following = step.waits.spans.at(np.where(has_next, pieces.position, 0))
        microbatch = np.where(has_next, following.microbatch, NONE)
        zeros = np.zeros(len(following), np.int64)
        if cause in _AFTER_ALL:
            reason, reasons = "{phrase}", Phrases([_AFTER_ALL[cause]], zeros, zeros)
        else:
            reason = "{phrase} of microbatch {microbatch}"
            reasons = Phrases(*_phrases_of(step, cause, following), zeros)
        lines = (name, reason, "rank {rank}", *_TIMES)
        kind = Kind(name, Lane.COMPUTE, [IDLE_COLORS[cause]], lines, is_idle=True)
        numbers = {"rank": pieces.rank, "microbatch": microbatch}
        kinds.append(_marks(kind, step, pieces, numbers, zeros, reasons))
    return kinds


def _phrases_of(step: Step, cause: Cause, waiting: Spans) -> tuple[list[str], Ints]:
    """Return a phrase per pair of op and stage that waits, and the phrase index of each row."""
    codes, found = pd.factorize(waiting.op * step.num_stages + waiting.stage)
    phrases = []
    for pair in found.tolist():
        code, stage = divmod(int(pair), step.num_stages)
        producer = stage + (-1 if OPS[code] is Op.F else 1)
        product = "forward" if OPS[code] is Op.F else "gradient"
        where = f"stage {producer} (rank {step.rank_of_stage.get(producer, '?')})"
        reasons = {
            Cause.STAGE: f"until {where} has computed the {product}",
            Cause.TRANSFER: f"until the {product} has arrived from {where}, where it was ready,",
            Cause.GATHER: f"until the parameters of stage {stage} are gathered,",
            Cause.HOST: f"before the {OP_WORDS[OPS[code]]}, whose inputs were ready,",
        }
        phrases.append(reasons[cause])
    return phrases, np.asarray(codes, np.int64)


def _computations(step: Step) -> list[Marks]:
    compute = step.waits.spans
    places = np.stack([compute.rank, compute.stage])
    (rank, _), inverse = np.unique(places, axis=1, return_inverse=True)
    # 0 for the first stage that a rank computes, 1 for the second, and so on
    shades: Ints = (np.arange(len(rank)) - np.searchsorted(rank, rank))[inverse.ravel()]
    most_shades = int(shades.max())
    pieces = np.diff(np.stack(moments(step.waits)), axis=0)
    kinds = []
    for op in (op for op in Op if op in COMPUTE_OPS):
        at = np.flatnonzero(compute.are([op]))
        bars = compute.at(at)
        lines = (OP_WORDS[op], "microbatch {microbatch}", _PLACE, *_TIMES, "{phrase}")
        whiteness = (LIGHTEST * n / max(1, most_shades) for n in range(most_shades + 1))
        colors = [tinted(OP_COLORS[op], share) for share in whiteness]
        kind = Kind(OP_WORDS[op], Lane.COMPUTE, colors, lines, has_text=True, op=op.value)
        # How long the rank was idle before each computation, and the main cause.
        mostly, gap = pieces[:, at].argmax(axis=0), pieces[:, at].sum(axis=0)
        words, codes = [NO_GAP], np.zeros(len(at), np.int64)
        for cause in (Cause.STAGE, Cause.TRANSFER, Cause.GATHER, Cause.HOST):
            chosen = np.flatnonzero((mostly == cause) & (gap > 0))
            phrases, indices = _phrases_of(step, cause, compute.at(at[chosen]))
            codes[chosen] = indices + len(words)
            words += [f"idle for {{}} before it, mostly {text.rstrip(',')}" for text in phrases]
        before = Phrases(words, codes, gap)
        kinds.append(_marks(kind, step, bars, _place_of(bars), shades[at], before))
    bars = step.columns.at(step.columns.are([Op.OPT]))
    bars = bars.at(np.lexsort((bars.start_ns, bars.rank)))
    name, color = OP_WORDS[Op.OPT], OP_COLORS[Op.OPT]
    of_rank = (name, "rank {rank}", *_TIMES)
    kind = Kind(name, Lane.COMPUTE, [color], of_rank, op=Op.OPT.value)
    none = np.zeros(len(bars), np.int64)
    return [*kinds, _marks(kind, step, bars, {"rank": bars.rank}, none)]


def _place_of(bars: Spans) -> dict[str, Ints]:
    return {"rank": bars.rank, "stage": bars.stage, "microbatch": bars.microbatch}


def _transfers(step: Step) -> list[Marks]:
    is_transfer = step.columns.are(MOVING)
    spans = step.columns.at(is_transfer)
    stored = step.spans.get("waiting_ns")
    if stored is None or stored[is_transfer].isna().any():  # both ends of a message tell it
        stored = waiting_ns(step.spans)
    waited = stored.fillna(0).to_numpy(np.int64)[is_transfer]
    began = spans.start_ns + waited
    opens_ns: Ints | int = step.origin_ns
    if step.windows_ns is not None:
        opens_ns = step.windows_ns[0][spans.rank]
    shown_from = np.minimum(np.maximum(spans.start_ns, opens_ns), began)
    waiting = replace(spans, start_ns=shown_from, end_ns=began)
    moving = replace(spans, start_ns=began)
    kinds = []
    for op in (op for op in Op if op in MOVING):
        for both, is_waiting in ((waiting, True), (moving, False)):
            rows = np.lexsort((both.start_ns, both.rank))
            is_shown = both.are([op]) & (not is_waiting or both.end_ns > both.start_ns)
            rows = rows[is_shown[rows]]
            bars = both.at(rows)
            name, numbers = OP_WORDS[op], _place_of(bars)
            peer, which = "the other end", ["microbatch {microbatch}"]
            posted = "posted {waited_ns} before the transfer began"
            if op in COLLECTIVE_OPS:
                del numbers["microbatch"]
                peer, which = "the slowest replica", []
                posted = "came {waited_ns} before the last replica"
            heading = f"{name}, waiting for {peer}" if is_waiting else name
            kind = Kind(
                f"{name}, waiting" if is_waiting else name,
                lane_of(op),
                [tinted(OP_COLORS[op], WAITING_TINT) if is_waiting else OP_COLORS[op]],
                (heading, *which, _PLACE, *_TIMES, "{num_bytes}", posted),
                group=name,
                op=op.value,
            )
            numbers |= {"num_bytes": bars.num_bytes, "waited_ns": waited[rows]}
            kinds.append(_marks(kind, step, bars, numbers, np.zeros(len(bars), np.int64)))
    return kinds


def _marks(
    kind: Kind,
    step: Step,
    bars: Spans | Gaps,
    numbers: dict[str, Ints],
    shade: Ints,
    phrases: Phrases | None = None,
) -> Marks:
    width_ns = np.maximum(bars.end_ns - bars.start_ns, 0)
    begin_ns = bars.start_ns - step.origin_ns
    return Marks(kind, bars.rank, begin_ns, width_ns, numbers, shade, phrases)
