"""Finds a program for unequal stages under limits of memory: near the best, beside a lower bound.

The best is that with the shortest step, as `problem` says.

    rules      rows filled in order of time, by several keys and flows        Rows.filled_by
               or in turns of I and F, where ranks have a stage each          Rows.alternating
    families   the registry's schedules that fit                              Rows.of_program
    changes    the best of these, changed around their longest path           loops.anneal
    wholes     backwards made whole where that costs nothing                  Rows.with_wholes

Rows are arrays of kinds, which `loops` explains. All rows of a problem have the same length: a
whole backward takes two places. See `bounds` for the bound.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import gt, itemgetter, neg, sub
from typing import NamedTuple

from engine.arrays import Arrays, filled, run
from engine.plan import kernels
from engine.plan.program import Program
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.table import Table
from ppbench.planning.solver.bounds import Chain, lower_bound
from ppbench.planning.solver.loops import (
    LATE,
    MOST_STEPS,
    alternate,
    anneal,
    list_schedule,
    refill,
    step_of,
)
from ppbench.planning.solver.problem import Problem

VISITS = 1_000_000_000
"""Actions that a search goes through with an effort of 1: a few seconds."""

ANNEALINGS = ((1, 8), (4, 8), (4, 40))
"""One search for each candidate: a move may cost at first the longest action divided by the first
number, and takes an action by at most the second number of places. Small problems gain most by the
first search, large ones by the others."""

PACES = (50, 60, 70, 80, 90, 100, 110, 120)
"""Percent of the least time per microbatch in which one is let in."""

PATIENCE = (10, 20, 35, 50, 100)
"""Percent of an action's time that a rank would rather wait for a more urgent one."""

NUM_REFINED, NUM_NEAR = 4, 12
"""Fillings whose flows are tried with more and fewer microbatches, by at most so many."""

LATE_WEIGHTS = (0, 1, 2, None)
"""W that may wait on a rank that takes turns, for each rank before it; with None, all that fit."""

RULED = 300_000_000
"""Actions times ranks that rules go through at least: for large problems and little effort, some
flows are left out."""

NUM_JOINS = 2_000_000
"""Actions that are gone through to make backwards whole."""


class Candidate(NamedTuple):
    """The rows of all ranks, one behind the other, and the time of their step."""

    step_ns: int
    row: array[int]


class Flow(NamedTuple):
    """How microbatches are let in: so many between F and I of each stage, so far apart."""

    places: tuple[int, ...]
    pace_ns: int = 0

    def near(self) -> Iterator[Flow]:
        """The same shape with more or fewer microbatches, the nearest first."""
        most = max(self.places)
        for more in (sign * far for far in range(1, NUM_NEAR + 1) for sign in (-1, 1)):
            if most + more > 0:
                each = (max(1, -(-place * (most + more) // most)) for place in self.places)
                yield self._replace(places=tuple(each))


class Filling(NamedTuple):
    """How ranks choose actions: by keys of kind and microbatch, the lower the sooner.

    A rank waits up to `patience` percent of an action for a more urgent one. The first `num_whole`
    backwards of a stage are whole, where that is quicker.
    """

    key: array[int]
    flow: Flow
    num_whole: int = 0
    patience: int = 0


class Rows:
    """The arrays of a problem; `visits` tells the loops whether compiling pays."""

    def __init__(self, problem: Problem, visits: int) -> None:
        self.problem, self.visits, placement = problem, visits, problem.placement
        self.width, self.num_stages = problem.num_microbatches, placement.num_stages
        self.num_ranks = placement.world_size
        self.size = 3 * self.width * self.num_stages
        # The shape, as `loops` calls it.
        stages = [placement.stages_of(rank) for rank in range(self.num_ranks)]
        first = list(itertools.accumulate(map(len, stages), initial=0))
        way = [*range(self.num_stages), *range(2 * self.num_stages - 1, self.num_stages - 1, -1)]
        leader = [kernels.NONE] * self.num_stages * 2 + way[: self.num_stages - 1 : -1]
        follower = [kernels.NONE] * self.num_stages * 3
        for kind, after in itertools.pairwise(way):
            leader[after], follower[kind] = kind, after
        rows = [3 * self.width * number for number in first]
        shape = placement.ranks, first, itertools.chain(*stages), rows, leader, follower
        self.shape = tuple(array("q", column) for column in shape)
        times, halves = problem.durations, replace(problem.durations, backward_ns=None)
        columns = times.forward_ns, times.input_ns, times.weight_ns, times.whole_ns
        self.took = array("q", itertools.chain(*columns))
        self.gains = list(map(gt, halves.whole_ns, times.whole_ns))  # a whole backward is quicker
        taken, left = problem.held_after_forward, problem.held_after_input
        freed = list(map(sub, left, taken))
        held = problem.limits, problem.least_limits, [*taken, *freed, *map(neg, left), *freed]
        self.memory = tuple(array("q", column) for column in held)
        self.link = problem.transfers.duration_ns, problem.transfers.overlaps
        # A rank without stages has no step of its own, but to meet others.
        lasts = [
            ns if problem.meets or own else 0
            for ns, own in zip(problem.optimizers, stages, strict=True)
        ]
        self.after = array("q", lasts) + filled(0, 2 * self.num_stages)

    # making rows

    def filled_by(self, filling: Filling) -> Candidate:
        """The rows that ranks fill in order of time."""
        row, ranks, (places, pace_ns) = filled(0, self.size), self.num_ranks, filling.flow
        count, channels = filled(0, 3 * self.num_stages), filled(0, 2 * self.num_stages)
        now, time, kind, held = (filled(0, ranks) for _ in range(4))
        is_open, position = filled(0, self.num_stages), self.shape[3][:-1]
        arrival = self._arrivals(pace_ns)
        state = count, arrival, now, time, is_open, kind, held, channels, position
        memory = *self.memory, array("q", places)
        whole = array("q", [filling.num_whole * gains for gains in self.gains])
        costs = self.took, memory, self.link
        how = filling.key, whole, filling.patience
        run(self.visits, list_schedule, self.shape, *costs, *how, state, row)
        return Candidate(self.played(row), row)

    def alternating(self, places: tuple[int, ...], late_weights: int | None) -> Candidate | None:
        """The rows of ranks with a stage each that take I and F in turns, if there are such."""
        row, ranks = filled(0, self.size), self.problem.placement.ranks
        most = [self.width if late_weights is None else rank * late_weights for rank in ranks]
        memory = *self.memory, array("q", places)
        arguments = self.shape, memory, array("q", most), row
        is_done = run(self.visits, alternate, *arguments) and self.fits(row)
        step_ns = self.played(row) if is_done else kernels.NONE
        return Candidate(step_ns, row) if step_ns >= 0 else None

    def of_program(self, program: Program) -> array[int]:
        """The rows of a program of computations; a B is split where that takes no longer."""
        table, row, num_stages = program.table, array("q"), self.num_stages
        for op, stage in zip(table.op, table.stage, strict=True):
            if op == kernels.F:
                row.append(stage)
            if op in (kernels.B, kernels.I):
                is_whole = op == kernels.B and self.gains[stage]
                row.append((3 if is_whole else 1) * num_stages + stage)
            if op in (kernels.B, kernels.W):
                row.append(2 * num_stages + stage)
        return row

    def annealed(
        self, row: array[int], settings: tuple[int, int, int, int], seed: int
    ) -> Candidate:
        """The best of the rows that changes at random lead to; `settings` as `loops.anneal`'s."""
        given, best, offset = row[:], row[:], self.shape[3]
        lengths = (range(offset[rank], offset[rank + 1]) for rank in range(self.num_ranks))
        owner = array("q", [rank for rank, places in enumerate(lengths) for _ in places])
        path, level, kept = (filled(0, self.size) for _ in range(3))
        work = path, level, owner, kept, filled(0, len(self.after))
        costs, state = (self.took, self.memory, self.link), (self._play_state(), self._turn())
        how = *settings, self.problem.meets
        arguments = self.shape, *costs, given, best, *state, work, how, array("q", [seed])
        run(self.visits, anneal, *arguments)
        return Candidate(self.played(best), best)

    def with_wholes(self, candidate: Candidate, num_tries: int) -> Candidate:
        """The same with as many backwards whole as cost nothing, the halves put side by side.

        All that are split are tried at once, then halves of what was no success.
        """
        count, split = [0] * self.num_stages, self._split_places(candidate.row)
        splits: list[tuple[int, int]] = []  # stage and number of each I that could be of one
        for at, kind in enumerate(candidate.row):
            half, here = divmod(kind, self.num_stages)
            if half in (1, 3):
                if split[at] and self.gains[here]:
                    splits.append((here, count[here]))
                count[here] += 1
        todo = deque([splits])
        while todo and todo[0] and num_tries > 0:
            some, num_tries = todo.popleft(), num_tries - 1
            row = self._joined(candidate.row, set(some))
            step = self.played(row) if self.fits(row) else kernels.NONE
            if 0 <= step <= candidate.step_ns:
                candidate = Candidate(step, row)
            elif len(some) > 1:
                todo += [some[: len(some) // 2], some[len(some) // 2 :]]
        return candidate

    # looking at rows

    def fits(self, row: array[int]) -> bool:
        """Whether no rank ever holds more than its limit."""
        level = filled(0, self.size)
        return all(
            run(self.visits, refill, self.shape, self.memory, row, level, rank, begin, end - 1)
            for rank, (begin, end) in enumerate(itertools.pairwise(self.shape[3]))
        )

    def played(self, row: array[int]) -> int:
        """The time of a step in nanoseconds, or NONE where it cannot be finished."""
        state, how = (self._play_state(), self._turn()), (self.problem.meets, MOST_STEPS, LATE)
        arguments = self.shape, self.took, self.link, row, *state, how
        return run(self.visits, step_of, *arguments)

    def program_of(self, row: array[int]) -> Program:
        """The program of some rows, its microbatches numbered; `loops` says how."""
        num_stages, offset, split = self.num_stages, array("q", [0]), self._split_places(row)
        op, stage, microbatch = array("q"), array("q"), array("q")
        for begin, end in itertools.pairwise(self.shape[3]):
            count = [0] * num_stages * 2
            waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
            for at in range(begin, end):
                half, here = divmod(row[at], num_stages)
                if half == 2 and not split[at]:
                    continue  # of a whole one
                if half == 2:
                    number = waiting[here].popleft()
                else:
                    number = count[min(half, 1) * num_stages + here]
                    count[min(half, 1) * num_stages + here] += 1
                if half in (1, 3) and split[at]:
                    waiting[here].append(number)
                codes = kernels.F, kernels.I, kernels.W, kernels.I
                op.append(codes[half] if split[at] or half == 0 else kernels.B)
                stage.append(here)
                microbatch.append(number)
            offset.append(len(op))
        table = Table(offset, op, stage, microbatch)
        return Program("solved", self.problem.placement, self.width, table)

    # their parts

    def _split_places(self, row: array[int]) -> list[bool]:
        """By place, whether it is an I or a W that is not of a whole backward."""
        num_stages = self.num_stages
        split, last = [kind >= num_stages for kind in row], set(self.shape[3])
        for at in range(1, len(row)):
            is_whole = row[at - 1] >= 3 * num_stages and row[at] == row[at - 1] - num_stages
            if is_whole and at not in last:
                split[at - 1] = split[at] = False
        return split

    def _joined(self, row: array[int], some: set[tuple[int, int]]) -> array[int]:
        """The rows with these backwards whole: the next W of their stage comes to each."""
        num_stages, split, joined = self.num_stages, self._split_places(row), array("q")
        count, ahead = [0] * num_stages, [0] * num_stages
        for at, kind in enumerate(row):
            half, here = divmod(kind, num_stages)
            if half == 2 and split[at] and ahead[here] > 0:
                ahead[here] -= 1
                continue
            is_joined = half in (1, 3) and (here, count[here]) in some
            count[here] += half in (1, 3)
            joined.append(3 * num_stages + here if is_joined else kind)
            if is_joined:
                joined.append(2 * num_stages + here)
                ahead[here] += 1
        return joined

    def _arrivals(self, pace_ns: int = 0) -> array[int]:
        arrival = filled(kernels.NONE, 2 * self.num_stages * self.width)
        arrival[: self.width] = array("q", [n * pace_ns for n in range(self.width)])
        return arrival

    def _turn(self) -> Arrays:
        """All begin after an optimizer; `loops` says what is meant."""
        return self.after[:], self.after, *(filled(0, len(self.after)) for _ in range(3))

    def _play_state(self) -> Arrays:
        arrivals, ranks = self._arrivals(), self.num_ranks
        free, blocked = filled(0, len(self.after)), filled(kernels.NONE, ranks)
        walk = self.shape[3][:-1], free, blocked, array("q", range(ranks))
        causes = filled(0, len(arrivals)), filled(0, self.size), filled(0, 1)
        sources = array("q", [self.problem.placement.ranks[0]]) * len(arrivals)
        return filled(0, 3 * self.num_stages), *walk, arrivals, *causes, sources


@dataclass(frozen=True)
class Solution:
    """A program with the time of its step, and a bound below which no program's is."""

    program: Program
    step_ns: int
    bound_ns: int


def solve(problem: Problem, effort: float = 1.0) -> Solution:
    """The best program found within the limits; the same each time.

    `effort` is proportional to the time that the search takes; with 0 it ends with the rules and
    families. Raises NoProgramError where no program keeps within the limits.
    """
    bound = lower_bound(problem)
    search = _Search(problem, bound, round(effort * VISITS))
    found = heapq.nsmallest(len(ANNEALINGS), search.candidates(), key=itemgetter(0))
    best = found[0] if found[0].step_ns <= bound else search.improve(found)
    best = search.rows.with_wholes(best, NUM_JOINS // search.rows.size)
    return Solution(search.rows.program_of(best.row), best.step_ns, bound)


def _flows(chain: Chain, bound_ns: int) -> Iterator[Flow]:
    """As many microbatches at once as there are, or fewer, or one after the other.

    Where memory is short, whoever lets in all that fits fills it with early stages. Each stage may
    have F for as long as a microbatch is away: all of that, so that the first need not wait for any
    of them, or a part.
    """
    m, trips = chain.problem.num_microbatches, chain.trips()
    busy, num_stages = chain.busy, chain.num_stages
    away = [
        max(1, min(m, (trip - busy[num_stages + s]) // max(1, busy[s])))
        for s, trip in enumerate(trips)
    ]
    num = m
    while num > 0:
        yield Flow((num,) + (m,) * (len(trips) - 1))
        yield Flow(_proportional(trips, num))
        yield Flow(tuple(min(num, most) for most in away))
        num = min(num - 1, num * 8 // 9)
    for percent in PACES:
        yield Flow((m,) * len(trips), bound_ns * percent // 100 // m)


def _proportional(trips: list[int], num: int) -> tuple[int, ...]:
    """Microbatches of each stage at once, as long as they are away, `num` of the first."""
    return tuple(max(1, -(-num * trip // max(1, trips[0]))) for trip in trips)


class _Search:
    """Tries rows for a problem, with a budget of actions to go through."""

    def __init__(self, problem: Problem, bound_ns: int, visits: int) -> None:
        self.problem, self.bound_ns, self.chain = problem, bound_ns, Chain(problem)
        self.flows = list(dict.fromkeys(_flows(self.chain, bound_ns)))
        m, size = problem.num_microbatches, 3 * problem.num_microbatches * len(self.chain.places)
        most = max(1, (RULED + 5 * visits) // (12 * size * problem.placement.world_size))
        self.flows = self.flows[:: -(-len(self.flows) // most)]
        self.num_near, self.num_alternating = min(2 * NUM_NEAR, most), 4 * most
        self.budget, self.num_moves = visits, visits // size
        self.rows = Rows(problem, visits + 4 * len(self.flows) * size)
        part = max(0, m - problem.placement.world_size)
        self.num_wholes = sorted({0, part, m}) if any(self.rows.gains) else [0]

    def candidates(self) -> Iterator[Candidate]:
        """Rows of every family that fits, and of every rule."""
        yield from self.families()
        found: list[tuple[int, Filling]] = []
        for num_whole, flow, key in itertools.product(self.num_wholes, self.flows, self.keys()):
            filling = Filling(key, flow, num_whole)
            candidate = self.rows.filled_by(filling)
            yield candidate
            found.append((candidate.step_ns, filling))
        for one in heapq.nsmallest(NUM_REFINED, found, key=itemgetter(0)):
            patient = [one]
            for patience in PATIENCE:
                filling = one[1]._replace(patience=patience)
                candidate = self.rows.filled_by(filling)
                yield candidate
                patient.append((candidate.step_ns, filling))
            _, best = min(patient, key=itemgetter(0))
            for flow in itertools.islice(best.flow.near(), self.num_near):
                yield self.rows.filled_by(best._replace(flow=flow))
        if len(set(self.problem.placement.ranks)) == self.chain.num_stages:
            yield from self.alternations()

    def alternations(self) -> Iterator[Candidate]:
        """Rows that take I and F in turns, of as many microbatches at once as there may be."""
        m, trips = self.problem.num_microbatches, self.chain.trips()
        for num in range(1, m + 1, -(-m // self.num_alternating)):
            for late_weights in LATE_WEIGHTS:
                places = _proportional(trips, num)
                if candidate := self.rows.alternating(places, late_weights):
                    yield candidate

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
            if best.step_ns <= self.bound_ns:
                break
        return best
