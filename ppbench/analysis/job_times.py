"""The times of a whole job, all replicas of all steps, as one array that can be changed.

    ns[step, replica, column]     a column is an action of the program, in the order of its table

A message's time is at its SEND: from when both ends are ready, and the message before it is over,
to its end (see `ppbench.analysis.transfers`). A collective's is from when it has begun on all
replicas to its end, so that waiting for a slow replica is no time of the others.

Steps that follow each other are walked in a row, with their optimizers: what is late in one step
holds up the next one. Where steps stand alone, all ranks meet after each, and nothing of it is left
when the next one begins; the optimizer is no part of them.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan import kernels
from engine.plan.action import CODES, COMPUTE_OPS, JOINING_OPS, OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.collectives import NoCollectives, with_collectives
from engine.plan.messages import counterpart, edge_of
from engine.plan.period import with_end
from engine.plan.program import Program
from engine.plan.table import Table
from engine.plan.walk import walk_all
from ppbench.analysis.metrics import windows
from ppbench.analysis.running import Following

Ns = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]
"""By column, whether it is meant."""
AT_ONCE = 5_000_000
"""Times that are walked over at once, in some 200 MB."""
_UNTIMED = frozenset({Op.RESHARD, Op.NORM})
_NONE = -1
_NEVER = np.iinfo(np.int64).max


class Columns:
    """The columns hold the actions of a program, in this order.

    A message belongs to the rank that sends it.
    """

    def __init__(self, program: Program) -> None:
        table = program.table
        self.program, self.actions = program, list(itertools.chain(*program.actions))
        self._op, self.stage, self.microbatch = map(np.array, table.arrays[1:])
        self.part = self.microbatch % program.num_slices  # which slice it is
        self.rank = np.repeat(range(program.world_size), np.diff(table.offset))
        self.is_compute = self.of_ops(COMPUTE_OPS)
        # The first stage of a SEND's link.
        ends = (min(edge_of(a)) if a.op in SEND_OPS else _NONE for a in self.actions)
        self.link = np.fromiter(ends, np.int64)

    def of_ops(self, ops: Iterable[Op]) -> Chosen:
        return np.isin(self._op, [CODES[op] for op in ops])

    @property
    def kinds(self) -> Iterator[tuple[Op, npt.NDArray[np.int64]]]:
        """Each op that takes time, with its columns of one stage; an optimizer's of one rank.

        The slices of a microbatch, which differ, are apart.
        """
        of_kind: dict[tuple[Op, int, int], list[int]] = {}
        for at, action in enumerate(self.actions):
            if action.op not in RECV_OPS | _UNTIMED:
                stage = int(self.rank[at]) if action.op is Op.OPT else action.stage
                of_kind.setdefault((action.op, stage, int(self.part[at])), []).append(at)
        return ((op, np.array(at)) for (op, *_), at in of_kind.items())


@dataclass(frozen=True, eq=False)
class JobTimes:
    """Nanoseconds of everything in some steps of a job."""

    columns: Columns
    ns: Ns  # steps x replicas x columns
    firsts: Sequence[int]
    """The steps that do not follow the one before; each is the first of a row."""
    begun_ns: Ns
    ended_ns: Ns
    """By step, when its first computation or gather began, and its last action was over."""

    @property
    def measured_ns(self) -> Ns:
        """By row of steps, from its beginning to its end."""
        first = np.array(self.firsts)
        return np.asarray(np.maximum.reduceat(self.ended_ns, first) - self.begun_ns[first])

    def steps_ns(self, many: Iterable[Ns]) -> Iterator[Ns]:
        """How long each step lasts with each of some times: from the end of all before it.

        Times are as `ns`, of any number of replicas.
        """
        waiting, program = iter(many), self.columns.program
        is_met = program.table.op[-1] == kernels.NORM  # then the next step begins as a first one
        rows = list(itertools.pairwise([*([0] if is_met else self.firsts), len(self.ns)]))
        while some := list(_up_to(AT_ONCE, waiting)):
            ends = ends_of(program, (ns[first:stop] for ns in some for first, stop in rows))
            for _ in some:
                of_rows = (one.max(axis=(1, 2)) for one in itertools.islice(ends, len(rows)))
                yield np.concatenate([np.diff(one, prepend=0) for one in of_rows])


def ends_of(program: Program, rows: Iterable[Ns]) -> Iterator[Ns]:
    """When workers are done with each step of some rows: by step, replica and rank."""
    cases = ([array("q", one.tobytes()) for one in np.moveaxis(ns, 1, 0)] for ns in rows)
    for walked in walk_all((program, took) for took in cases):
        assert walked.is_over, "a program that hangs passed the proof"
        ends = np.array(walked.step_ends_ns).reshape(walked.replicas, -1, walked.steps)
        yield np.moveaxis(ends, 2, 0)


def _up_to(size: int, waiting: Iterator[Ns]) -> Iterator[Ns]:
    """Arrays until they have this size together."""
    for one in waiting:
        yield one
        size -= one.size
        if size <= 0:
            return


def times_of(
    spans: pd.DataFrame,
    lowered: Program,
    replicas: int = 1,
    following: Following | None = None,
    after_pause: Collection[int] = (),
) -> JobTimes:
    """The times of all steps that spans hold; `lowered` has its transfers and collectives.

    `spans` has the columns of `engine.plan.spans.Span`. Where their collectives are others than the
    program's, since a library places them its own way, those of the first step are taken; where
    steps or replicas differ in them, none. Without `following` each step stands alone, and steps
    that began `after_pause` do in any case. Raises KeyError with a computation of the program that
    some replica lacks in some step.
    """
    firsts, ends = list(range(spans["step"].nunique())), {"meets": True, "has_optimizer": False}
    if following is not None:
        of_ranks = windows(spans, lowered.world_size, after_pause)
        follows = of_ranks["follows"].groupby("step").all()
        firsts, ends = np.flatnonzero(~follows).tolist(), {"meets": following.meets}
    for program in (lowered, _as_seen(spans, lowered), lowered.without_collectives()):
        times, is_whole = times_in(spans, with_end(program, **ends), replicas, firsts)
        if is_whole:
            return times
    raise AssertionError("without collectives, none can be missing")


def _as_seen(spans: pd.DataFrame, lowered: Program) -> Program:
    """The program with the collectives of the first step of replica 0.

    Each stands before the first computation that starts after it.
    """
    is_first = (spans["step"] == spans["step"].min()) & (spans["replica"] == 0)
    first = spans[is_first].sort_values("start_ns", kind="stable")
    rows: list[list[Action]] = [[] for _ in range(lowered.world_size)]
    taken = {str(op): op for op in (*COMPUTE_OPS, *JOINING_OPS)}
    for row in first[first["op"].isin(taken)].itertuples():
        rows[row.rank].append(Action(int(row.stage), taken[row.op], int(row.microbatch)))
    seen = replace(lowered, actions=Table.of(rows))
    if seen.compute_only() != lowered.compute_only():
        return lowered.without_collectives()
    return with_collectives(lowered.without_collectives(), seen, NoCollectives())


def times_in(
    spans: pd.DataFrame, program: Program, replicas: int, firsts: Sequence[int]
) -> tuple[JobTimes, bool]:
    """The times of a program's columns, and whether all its collectives are in the spans, alone.

    A collective, message or optimizer without spans takes no time. Raises what `times_of` raises.
    """
    columns = Columns(program)
    numbers = {str(op): code for op, code in CODES.items() if op not in _UNTIMED}
    names = spans["op"].astype("category")
    of_names = np.array([numbers.get(str(op), _NONE) for op in names.cat.categories] or [_NONE])
    op = of_names[names.cat.codes.to_numpy()]
    steps, step = np.unique(spans["step"].to_numpy(), return_inverse=True)
    replica = spans["replica"].to_numpy()
    # The column of each span; collectives of one stage and op are taken in their order.
    is_optimizer = op == CODES[Op.OPT]  # there is one by rank
    stage = np.where(is_optimizer, spans["rank"], spans["stage"])
    number = np.where(is_optimizer, 0, spans["microbatch"])
    is_collective = np.isin(op, [CODES[op] for op in JOINING_OPS])
    joined = np.flatnonzero(is_collective)
    order = joined[np.argsort(spans["start_ns"].to_numpy()[joined], kind="stable")]
    cell = step * replicas + replica
    keys = pd.DataFrame({"cell": cell[order], "op": op[order], "stage": stage[order]})
    number[order] = keys.groupby(list(keys)).cumcount()
    seen: Counter[tuple[Op, int]] = Counter()
    num_each = number.max(initial=0) + 1
    num_places = max(program.num_stages, program.world_size)
    index = np.full((len(OPS), num_places, num_each), _NONE)
    for place, action in enumerate(columns.actions):
        at, kind, of_kind = action
        if kind in JOINING_OPS:
            of_kind = seen[kind, at]
            seen[kind, at] += 1
        elif kind is Op.OPT:
            at, of_kind = int(columns.rank[place]), 0
        if of_kind < num_each:
            index[CODES[kind], at, of_kind] = place
    is_of_one = (op != _NONE) & (stage >= 0) & (stage < num_places) & (number >= 0)
    column = np.full(len(spans), _NONE)
    column[is_of_one] = index[op[is_of_one], stage[is_of_one], number[is_of_one]]
    shape = len(steps), replicas, len(columns.actions)
    at = np.ravel_multi_index((step, replica, np.maximum(column, 0)), shape)[column != _NONE]
    starts, ends = np.zeros((2, *shape), np.int64)
    is_known = np.zeros(shape, np.bool_)
    starts.reshape(-1)[at] = spans["start_ns"].to_numpy()[column != _NONE]
    ends.reshape(-1)[at] = spans["end_ns"].to_numpy()[column != _NONE]
    is_known.reshape(-1)[at] = True
    has_others = bool((is_collective & (column == _NONE)).any())
    is_joined, is_compute = columns.of_ops(JOINING_OPS), columns.is_compute
    is_timed = is_compute | columns.of_ops([Op.OPT])
    is_whole = np.all(is_known[..., is_joined]) and not (program.has_collectives and has_others)
    is_missing = is_compute & ~np.all(is_known, axis=(0, 1))
    if is_missing.any():
        raise KeyError(columns.actions[int(is_missing.argmax())])
    ns = np.zeros_like(starts)
    ns[..., is_timed] = (ends - starts)[..., is_timed]
    begun = starts
    if replicas == 1 and program.has_collectives:  # the copies of a stage stand for the replicas
        copies = np.array(program.sums_of_copies, np.int64)
        one = np.flatnonzero(copies != _NONE)
        begun = starts.copy()
        begun[..., one] = np.maximum(starts[..., one], starts[..., copies[one]])
    ready = begun[..., is_joined].max(axis=1, keepdims=True)
    ns[..., is_joined] = ends[..., is_joined] - ready
    over: dict[tuple[int, int], Ns] = {}  # when each channel is free
    places = {action: at for at, action in enumerate(columns.actions)}
    for send in np.flatnonzero(columns.of_ops(SEND_OPS)):
        receive = places[counterpart(columns.actions[send])]
        channel = edge_of(columns.actions[send])
        both = starts[..., send], starts[..., receive], ends[..., send], ends[..., receive]
        is_early = np.maximum(both[2], both[3]) <= both[1]  # over before the receive began
        over_ns = np.where(is_early, both[2], both[3])
        began = np.maximum(np.maximum(both[0], both[1]), over.get(channel, both[0]))
        took = over_ns - np.where(is_early, both[0], began)
        ns[..., send] = np.where(is_known[..., send] & is_known[..., receive], took, 0)
        over[channel] = over_ns
    gathered = starts[..., columns.of_ops([Op.UNSHARD])].max(axis=1)  # ready on all replicas
    first = np.minimum(
        starts[..., is_compute].min(axis=(1, 2)), gathered.min(axis=1, initial=_NEVER)
    )
    last = ends[..., is_joined | is_timed].max(axis=(1, 2))
    return JobTimes(columns, np.maximum(ns, 0), firsts, first, last), bool(is_whole)
