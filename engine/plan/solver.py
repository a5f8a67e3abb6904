"""Finds a program for unequal stages under limits of memory: near the best, beside a lower bound.

Rows are filled in order of time by several rules, the families of the registry that fit are rows as
well, and the best of all are improved by moving actions of the longest path. See
`engine.plan.search` for the loops and `engine.plan.bounds` for the bound.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter, neg, sub
from typing import NamedTuple

from engine.arrays import filled, run
from engine.plan import kernels
from engine.plan.bounds import Chain, lower_bound
from engine.plan.problem import Problem
from engine.plan.program import Program
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.search import anneal, list_schedule, play_rows, refill
from engine.plan.table import Table

VISITS = 1_000_000_000
"""Actions that a search goes through with an effort of 1: a few seconds."""

ANNEALINGS = ((1, 8), (4, 8), (4, 40))
"""One search for each candidate: a move may cost at first the longest action divided by the first
number, and takes an action by at most the second number of places. Small problems gain most by the
first search, large ones by the others."""

NUM_PATIENT = 4
"""Candidates that are filled again with patience."""

PACES = (50, 60, 70, 80, 90, 100, 110, 120)
"""Percent of the least time per microbatch in which one is let in."""

PATIENCE = (50, 100)
"""Percent of an action's time that a rank would rather wait for a more urgent one."""


@dataclass(frozen=True)
class Solution:
    """A program with its makespan, and a bound below which no program's is."""

    program: Program
    makespan_ns: int
    bound_ns: int


def solve(problem: Problem, effort: float = 1.0) -> Solution:
    """The best program found within the limits; the same each time.

    `effort` is proportional to the time that the search takes; with 0 it ends with the rules and
    families. Raises NoProgramError where no program keeps within the limits.
    """
    bound = lower_bound(problem)
    search = _Search(problem, bound, round(effort * VISITS))
    found = heapq.nsmallest(len(ANNEALINGS), search.candidates(), key=itemgetter(0))
    makespan, row = found[0]
    if makespan > bound:
        makespan, row = search.improve(found, bound)
    return Solution(search.program_of(row), makespan, bound)


class Flow(NamedTuple):
    """How microbatches are let in: so many between F and I of each stage, so far apart."""

    places: tuple[int, ...]
    pace_ns: int = 0


def _flows(chain: Chain, bound_ns: int) -> Iterator[Flow]:
    """As many microbatches at once as there are, or fewer, or one after the other.

    Where memory is short, whoever lets in all that fits fills it with early stages.
    """
    m, trips = chain.problem.num_microbatches, chain.trips()
    num = m
    while num > 0:
        yield Flow((num,) + (m,) * (len(trips) - 1))
        yield Flow(tuple(max(1, -(-num * trip // max(1, trips[0]))) for trip in trips))
        num = min(num - 1, num * 8 // 9)
    for percent in PACES:
        yield Flow((m,) * len(trips), bound_ns * percent // 100 // m)


Candidate = tuple[int, "array[int]"]
"""A makespan and the rows that have it, as `engine.plan.search` writes them."""


class _Search:
    """The arrays of a problem, and what is made of them; a budget of actions to go through."""

    def __init__(self, problem: Problem, bound_ns: int, visits: int) -> None:
        self.problem, self.chain = problem, Chain(problem)
        self.flows = list(dict.fromkeys(_flows(self.chain, bound_ns)))
        placement, m = problem.placement, problem.num_microbatches
        self.width, self.num_stages, self.num_ranks = m, placement.num_stages, placement.world_size
        stages = [placement.stages_of(rank) for rank in range(self.num_ranks)]
        first = list(itertools.accumulate(map(len, stages), initial=0))
        way = [*range(self.num_stages), *range(2 * self.num_stages - 1, self.num_stages - 1, -1)]
        leader = [kernels.NONE] * self.num_stages * 2 + way[: self.num_stages - 1 : -1]
        follower = [kernels.NONE] * self.num_stages * 3
        for kind, after in itertools.pairwise(way):
            leader[after], follower[kind] = kind, after
        rows = [3 * m * n for n in first]
        columns = placement.ranks, first, itertools.chain(*stages), rows, leader, follower
        self.shape = tuple(array("q", column) for column in columns)
        times = problem.durations
        self.took = array("q", [*times.forward_ns, *times.input_ns, *times.weight_ns])
        taken, left = problem.held_after_forward, problem.held_after_input
        change = [*taken, *map(sub, left, taken), *map(neg, left)]
        held = problem.limits, problem.least_limits, change
        self.memory = tuple(array("q", column) for column in held)
        self.transfers = problem.transfers.duration_ns, problem.transfers.overlaps
        self.size = 3 * m * self.num_stages
        self.num_moves = visits // self.size
        self.visits = visits + len(self.flows) * self.size

    def candidates(self) -> Iterator[Candidate]:
        """Rows of every rule and of every family that fits."""
        yield from self.families()
        found: list[tuple[int, array[int], Flow]] = []
        keys = list(self.keys())
        for flow in self.flows:
            for key in keys:
                makespan, row = self.filled_by(key, 0, flow)
                yield makespan, row
                found.append((makespan, key, flow))
        for _, key, flow in sorted(found, key=itemgetter(0))[:NUM_PATIENT]:
            for patience in PATIENCE:
                yield self.filled_by(key, patience, flow)

    def filled_by(self, key: array[int], patience: int, flow: Flow) -> Candidate:
        """The rows that a rank fills by keys of its actions, by kind and microbatch."""
        row, ranks = filled(0, self.size), self.num_ranks
        count, channels = filled(0, 3 * self.num_stages), filled(0, 2 * self.num_stages)
        now, time, kind, held = (filled(0, ranks) for _ in range(4))
        is_open, position = filled(0, self.num_stages), self.shape[3][:-1]
        arrival = self.arrivals(flow.pace_ns)
        state = count, arrival, now, time, is_open, kind, held, channels, position
        memory = *self.memory, array("q", flow.places)
        arguments = self.took, memory, *self.transfers, key, patience, state, row
        makespan = run(self.visits, list_schedule, self.shape, *arguments)
        return self.played(row) if flow.pace_ns else makespan, row  # nothing need wait for its turn

    def arrivals(self, pace_ns: int = 0) -> array[int]:
        arrival = filled(kernels.NONE, 2 * self.num_stages * self.width)
        arrival[: self.width] = array("q", [n * pace_ns for n in range(self.width)])
        return arrival

    def keys(self) -> Iterator[array[int]]:
        """Rules of what is urgent: the lower the key of an action, the sooner it is started.

        By the longest path that is left, or by the earliest start; with I first and W last, or not.
        """
        tails, heads = self.chain.tails(), self.chain.heads()
        late = max(map(max, heads)) + tails[0][0]
        for table in ([[-tail for tail in row] for row in tails], heads):
            yield array("q", itertools.chain(*table))
            shifts = [shift for shift in (0, -late, late) for _ in range(self.num_stages)]
            rows = zip(table, shifts, strict=True)
            yield array("q", [key + shift for row, shift in rows for key in row])

    def families(self) -> Iterator[Candidate]:
        """Rows of the registry's schedules that have this placement and keep within the limits."""
        stages_per_rank, rest = divmod(self.num_stages, self.num_ranks)
        for name, schedule in SCHEDULES.items() if rest == 0 else ():
            if schedule.place(self.num_ranks, stages_per_rank) != self.problem.placement:
                continue
            try:
                program = build_program(name, self.num_ranks, self.width, stages_per_rank)
            except ShapeError:
                continue
            row = self.row_of(program)
            if self.fits(row):
                yield self.played(row), row

    def row_of(self, program: Program) -> array[int]:
        """The rows of a program of computations, its backwards split."""
        table, row = program.table, array("q")
        for op, stage in zip(table.op, table.stage, strict=True):
            if op == kernels.F:
                row.append(stage)
            if op in (kernels.B, kernels.I):
                row.append(self.num_stages + stage)
            if op in (kernels.B, kernels.W):
                row.append(2 * self.num_stages + stage)
        return row

    def fits(self, row: array[int]) -> bool:
        """Whether no rank ever holds more than its limit."""
        level = filled(0, self.size)
        return all(
            run(self.visits, refill, self.shape, self.memory, row, level, rank, begin, end - 1)
            for rank, (begin, end) in enumerate(itertools.pairwise(self.shape[3]))
        )

    def play_state(self) -> tuple[array[int], ...]:
        arrivals, ranks, channels = self.arrivals(), self.num_ranks, 2 * self.num_stages
        now, blocked = filled(0, ranks), filled(kernels.NONE, ranks)
        walk = self.shape[3][:-1], now, blocked, array("q", range(ranks)), filled(0, channels)
        causes = filled(0, len(arrivals)), filled(0, self.size), filled(0, 1)
        return filled(0, 3 * self.num_stages), *walk, arrivals, *causes

    def played(self, row: array[int]) -> int:
        arguments = self.shape, self.took, *self.transfers, row, self.play_state()
        return run(self.visits, play_rows, *arguments)

    def improve(self, found: list[Candidate], enough: int) -> Candidate:
        """The best that the first of the candidates become by moving actions."""
        best, num_moves = found[0], self.num_moves // len(found)
        for seed, (_, row) in enumerate(found if num_moves else ()):
            part, reach = ANNEALINGS[seed]
            settings = num_moves, max(self.took) // part, reach, enough
            best = min(best, self.annealed(row, settings, seed), key=itemgetter(0))
            if best[0] <= enough:
                break
        return best

    def annealed(
        self, row: array[int], settings: tuple[int, int, int, int], seed: int
    ) -> Candidate:
        """The best of the rows that actions moved at random lead to."""
        given, best, offset = row[:], row[:], self.shape[3]
        lengths = (range(offset[rank], offset[rank + 1]) for rank in range(self.num_ranks))
        owner = array("q", [rank for rank, places in enumerate(lengths) for _ in places])
        work = filled(0, self.size), filled(0, self.size), owner
        costs = self.took, self.memory, *self.transfers
        arguments = self.shape, *costs, given, best, self.play_state(), work, settings
        return run(self.visits, anneal, *arguments, array("q", [seed])), best

    def program_of(self, row: array[int]) -> Program:
        ops, count = (kernels.F, kernels.I, kernels.W), filled(0, 3 * self.num_stages)
        op, stage, microbatch = array("b"), array("i"), array("i")
        for kind in row:
            op.append(ops[kind // self.num_stages])
            stage.append(kind % self.num_stages)
            microbatch.append(count[kind])
            count[kind] += 1
        table = Table(self.shape[3][:], op, stage, microbatch)
        return Program("solved", self.problem.placement, self.width, table)
