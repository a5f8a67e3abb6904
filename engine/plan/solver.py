"""Finds a program for unequal stages under limits of memory: near the best, beside a lower bound.

    rules      rows filled in order of time, by several keys and flows        rows.Rows.filled_by
    families   the registry's schedules that fit                              rows.Rows.of_program
    changes    the best of these, changed around their longest path           search.anneal
    wholes     backwards made whole where that costs nothing                  rows.Rows.with_wholes

See `engine.plan.bounds` for the bound.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from engine.plan.bounds import Chain, lower_bound
from engine.plan.problem import Problem
from engine.plan.program import Program
from engine.plan.rows import Candidate, Filling, Flow, Rows
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program

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

RULED = 300_000_000
"""Actions times ranks that rules go through at least: for large problems and little effort, some
flows are left out."""

NUM_JOINS = 2_000_000
"""Actions that are gone through to make backwards whole."""


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
    best = found[0] if found[0].makespan_ns <= bound else search.improve(found)
    best = search.rows.with_wholes(best, NUM_JOINS // search.rows.size)
    return Solution(search.rows.program_of(best.row), best.makespan_ns, bound)


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


class _Search:
    """Tries rows for a problem, with a budget of actions to go through."""

    def __init__(self, problem: Problem, bound_ns: int, visits: int) -> None:
        self.problem, self.bound_ns, self.chain = problem, bound_ns, Chain(problem)
        self.flows = list(dict.fromkeys(_flows(self.chain, bound_ns)))
        m, size = problem.num_microbatches, 3 * problem.num_microbatches * len(self.chain.places)
        most = max(1, (RULED + 5 * visits) // (12 * size * problem.placement.world_size))
        self.flows = self.flows[:: -(-len(self.flows) // most)]
        self.budget, self.num_moves = visits, visits // size
        self.rows = Rows(problem, visits + 4 * len(self.flows) * size)
        part = max(0, m - problem.placement.world_size)
        self.num_wholes = sorted({0, part, m}) if any(self.rows.gains) else [0]

    def candidates(self) -> Iterator[Candidate]:
        """Rows of every family that fits, and of every rule."""
        yield from self.families()
        found: list[tuple[int, Filling]] = []
        keys = list(self.keys())
        for num_whole, flow, key in itertools.product(self.num_wholes, self.flows, keys):
            filling = Filling(key, flow, num_whole)
            candidate = self.rows.filled_by(filling)
            yield candidate
            found.append((candidate.makespan_ns, filling))
        best = sorted(found, key=itemgetter(0))[:NUM_PATIENT]
        for (_, filling), patience in itertools.product(best, PATIENCE):
            yield self.rows.filled_by(filling._replace(patience=patience))

    def keys(self) -> Iterator[array[int]]:
        """Rules of what is urgent: the lower the key of an action, the sooner it is started.

        By the longest path that is left, or by the earliest start; with I first and W last, or not.
        """
        tails, heads = self.chain.tails(), self.chain.heads()
        late = max(map(max, heads)) + tails[0][0]
        for table in ([[-tail for tail in row] for row in tails], heads):
            yield array("q", itertools.chain(*table))
            shifts = [shift for shift in (0, -late, late) for _ in range(self.chain.num_stages)]
            rows = zip(table, shifts, strict=True)
            yield array("q", [key + shift for row, shift in rows for key in row])

    def families(self) -> Iterator[Candidate]:
        """Rows of the registry's schedules that have this placement and keep within the limits."""
        placement, m = self.problem.placement, self.problem.num_microbatches
        stages_per_rank, rest = divmod(placement.num_stages, placement.world_size)
        for name, schedule in SCHEDULES.items() if rest == 0 else ():
            if schedule.place(placement.world_size, stages_per_rank) != placement:
                continue
            try:
                program = build_program(name, placement.world_size, m, stages_per_rank)
            except ShapeError:
                continue
            row = self.rows.of_program(program)
            if self.rows.fits(row):
                yield Candidate(self.rows.played(row), row)

    def improve(self, found: list[Candidate]) -> Candidate:
        """The best that the first of the candidates become by changes."""
        best, num_moves = found[0], self.num_moves // len(found)
        for seed, candidate in enumerate(found if num_moves else ()):
            part, reach = ANNEALINGS[seed]
            settings = num_moves, max(self.rows.took) // part, reach, self.bound_ns
            changed = self.rows.annealed(candidate.row, settings, seed)
            best = min(best, changed, key=itemgetter(0))
            if best.makespan_ns <= self.bound_ns:
                break
        return best
