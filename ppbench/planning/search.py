"""Searches the space of a plan: families first, then the solver on what promises most.

    shapes --bounds--> those that may be best --moves of layers--> candidates
    the best of them --solver--> candidates with programs of their own

What is spent is counted in actions that are simulated, not in time, so that a plan is the same on
every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.plan.model_costs import ModelCosts
from engine.plan.program import Placement
from engine.plan.schedules.registry import build_program
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.fitting import Candidate, Fit, Layout, simulated
from ppbench.planning.layout import MOST_CUTS, Partition, solve_partition
from ppbench.planning.partitions import Climb, around, climb_all
from ppbench.planning.plan import AUTO, FrontierPoint, PlanRequest
from ppbench.planning.replicas import with_copies
from ppbench.planning.solving import least_step_of, one_by_one, solved
from ppbench.planning.space import Shape, least_layers, least_step_ns, model_of, shapes
from ppbench.planning.stages import StageTable, in_slices, never_quicker

OnProgress = Callable[[str, int, int], None]
"""Gets what is being done, how many of its parts are done, and how many there are."""

CLIMBED_ACTIONS = 200_000_000
"""Actions that are simulated while layers are moved."""
PROMISING = 1.3
"""Layers are moved on shapes whose first step is at most so many times the best."""
NUM_FIRST, FIRST_EFFORT = 6, 0.004
"""Layouts that the solver tries first, and with which effort."""
NUM_ROUNDS = 3
"""Rounds of moving layers of the solver's best, each judged by as many solutions again."""
LAST_EFFORT = 0.2
"""The effort for the best in the end."""
SOLVED_SIZE = 6_000_000
"""Actions times ranks of the programs that the solver is asked for in a round."""
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 1.75, 2.0)
"""Parts of the memory for which the best step is looked for besides."""
SOLVED_LEVELS = (0.6, 0.8, 1.25, 2.0)
"""Those of which the solver has a program made."""


class Task(NamedTuple):
    """A layout for the solver, by the least step that it may have."""

    bound_ns: int
    layout: Layout
    shape: Shape


class Search:
    """All candidates found for a request, those that do not fit included."""

    def __init__(
        self, request: PlanRequest, costs: CostSet, on_progress: OnProgress, effort: float
    ) -> None:
        """Take what is asked, the costs, who is told how far the search is, and its effort."""
        self.request, self.costs, self.say = request, costs, on_progress
        self.effort = effort
        self.found: list[Candidate] = []
        self.climbs: list[Climb] = []
        self._tables: dict[tuple[int, int, int], StageTable] = {}
        self._fits: dict[Shape, Fit] = {}
        self._partitions: dict[tuple[Placement, int], list[Partition]] = {}

    def run(self) -> None:
        """Fill `found` with candidates of families, and of the solver where it is asked for."""
        known = sorted(shapes(self.request, self.costs), key=self.bound_ns)
        families = [shape for shape in known if shape.schedule != AUTO]
        for done, shape in enumerate(families):  # each that may be better, its ranks levelled
            best = self.best()
            if best is not None and self.bound_ns(shape) >= best.step_ns:
                break  # the bounds of all others are larger still
            self.say("simulating schedules", done, len(families))
            climbs = self.climbs_of(shape, self.request.memory_bytes)
            self._keep(climb.best for climb in climbs)
            self.climbs += climbs
        self.say("moving layers between stages", 0, 1)
        best_ns = min((one.best.step_ns for one in self.climbs if one.best), default=0)
        promising = [
            one for one in self.climbs if one.best and one.best.step_ns <= PROMISING * best_ns
        ]
        climb_all(promising, round(CLIMBED_ACTIONS * self.effort))
        self._keep(climb.best for climb in self.climbs)
        self._solve([shape for shape in known if shape.schedule == AUTO])

    def best(self) -> Candidate | None:
        """The best that fits; of equal ones a family, and that which needs less memory."""
        return min(filter(self.fits, self.found), key=preference, default=None)

    def fits(self, candidate: Candidate) -> bool:
        """Whether every rank has the memory, whatever messages wait."""
        memory = self.request.memory_bytes
        return memory is None or candidate.most_bytes <= memory

    def bound_ns(self, shape: Shape) -> float:
        """A bound on the step of a shape."""
        return least_step_ns(shape, self.model(shape))

    def model(self, shape: Shape) -> ModelCosts:
        """The costs of a shape's microbatches, without recomputation unless all layers do."""
        return model_of(self.request, self.costs, shape.microbatch_size)

    def least(self, shape: Shape) -> list[int]:
        """The fewest layers of each part."""
        return least_layers(self.model(shape), shape.placement.depth)

    def table(self, size: int, directions: int = 1, num_slices: int = 1) -> StageTable:
        """The costs of stages for a microbatch size; those of copies sum their gradients.

        They are of one slice where microbatches come in several.
        """
        key = size, directions, num_slices
        if key not in self._tables:
            wanted = {AUTO: (False, True), "none": (False,), "all": (True,)}
            known = self.costs.by_setting
            settings = {on: Setting(size, on) for on in wanted[self.request.recompute]}
            models = {
                on: in_slices(with_copies(self.costs, known[setting], directions), num_slices)
                for on, setting in settings.items()
                if setting in known
            }
            self._tables[key] = StageTable(never_quicker(models))
        return self._tables[key]

    def fit(self, shape: Shape) -> Fit:
        """A shape with its program, made once; for the solver, that which needs least memory."""
        if shape not in self._fits:
            num_microbatches = shape.num_microbatches
            if shape.schedule == AUTO:
                program = one_by_one(shape.placement, num_microbatches)
            else:
                given = shape.schedule, shape.ranks, num_microbatches, shape.stages_per_rank
                slices = self.request.slices if shape.num_slices > 1 else ()
                program = build_program(*given, slices=slices)
            table, request = self.table(*shape.key_of_costs), self.request
            how = table, self.costs, request.recompute
            self._fits[shape] = Fit(shape, program, *how, meets=request.meets)
        return self._fits[shape]

    def partitions(self, shape: Shape) -> list[Partition]:
        """The partition with the lightest heaviest rank, and one with more even stages."""
        key = shape.placement, shape.microbatch_size
        if key not in self._partitions:
            given, least = (self.model(shape), shape.placement), self.least(shape)
            both = [solve_partition(*given, least=least, most_cuts=most) for most in (MOST_CUTS, 0)]
            self._partitions[key] = list(dict.fromkeys(both))
        return self._partitions[key]

    def climbs_of(self, shape: Shape, memory_bytes: int | None) -> list[Climb]:
        """Climbs within some memory that have done their first rounds, one from each partition."""
        fit, least = self.fit(shape), self.least(shape)
        climbs = [Climb(fit, least, memory_bytes, start) for start in self.partitions(shape)]
        climb_all(climbs, 0)
        return climbs

    def _keep(self, candidates: Iterable[Candidate | None]) -> None:
        self.found += [candidate for candidate in candidates if candidate is not None]

    def _solve(self, wanted: list[Shape]) -> None:
        """Let the solver try what promises most, and what moves of its layers lead to."""
        tasks = [task for shape in wanted for task in self._tasks(shape, self._layouts(shape))]
        memory = self.request.memory_bytes
        if not tasks and self.best() is None:  # layers that are level do not fit
            climbs = [climb for shape in wanted for climb in self.climbs_of(shape, memory)]
            layouts = [(climb.fit.shape, climb.best.layout) for climb in climbs if climb.best]
            tasks = [task for shape, layout in layouts for task in self._tasks(shape, [layout])]
        best: Candidate | None = None
        for _ in range(NUM_ROUNDS if self.num_solutions(wanted) == NUM_FIRST else 1):
            solutions = [*self._solutions(tasks, FIRST_EFFORT), *([best] if best else [])]
            found = min(solutions, key=preference, default=None)
            if found is None or found is best:
                break
            best = found
            partition, kept = best.layout
            near = around(partition, self.least(best.shape))
            tasks = self._tasks(best.shape, (Layout(partition, kept) for partition in near))
        if best is not None:
            self._keep([best])
            if self.num_solutions([best.shape]) == NUM_FIRST:
                task = Task(0, best.layout, best.shape)
                self._keep(self._solutions([task], LAST_EFFORT))

    def num_solutions(self, wanted: Sequence[Shape]) -> int:
        """How many programs of such shapes the solver is asked for at once."""
        sizes = (
            3 * shape.num_microbatches * shape.placement.num_stages * shape.ranks
            for shape in wanted
        )
        return max(1, min(NUM_FIRST, round(SOLVED_SIZE * self.effort) // max(sizes, default=1)))

    def _layouts(self, shape: Shape) -> Iterator[Layout]:
        """Layouts worth a solution: ranks levelled or as for a family, recomputing or not."""
        known = [
            candidate.layout
            for candidate in sorted(filter(self.fits, self.found), key=preference)
            if candidate.shape.placement == shape.placement
            and candidate.shape.microbatch_size == shape.microbatch_size
        ][:2]
        partitions = dict.fromkeys([*self.partitions(shape), *(one.partition for one in known)])
        num, kinds = shape.placement.num_stages, self.table(shape.microbatch_size).models
        patterns = [(on,) * num for on in kinds]
        patterns += [one.recompute for one in known]
        for partition, recompute in itertools.product(partitions, dict.fromkeys(patterns)):
            yield Layout(partition, recompute)

    def _tasks(self, shape: Shape, layouts: Iterable[Layout]) -> list[Task]:
        """The layouts that fit and that may be better than the best that is known."""
        memory, best = self.request.memory_bytes, self.best()
        tasks = []
        for layout in layouts:
            stages = self.table(shape.microbatch_size).of_all(*layout)
            bound = least_step_of(shape, stages, meets=self.request.meets)
            is_worth_it = best is None or bound < best.step_ns
            if is_worth_it and (memory is None or max(self.fit(shape).peaks(layout)) <= memory):
                tasks.append(Task(bound, layout, shape))
        return tasks

    def _solutions(self, tasks: Sequence[Task], effort: float) -> list[Candidate]:
        """The solutions of the tasks with the least bounds."""
        most = self.num_solutions([task.shape for task in tasks])
        chosen = sorted(tasks, key=lambda task: task.bound_ns)[:most]
        found = []
        for done, (_, layout, shape) in enumerate(chosen):
            self.say("solving for a program", done, len(chosen))
            memory, effort_of_one = self.request.memory_bytes, effort * self.effort
            if one := solved(self.fit(shape), layout, memory, effort_of_one):
                found.append(one)
        return found

    # other amounts of memory

    def elsewhere(self) -> Iterator[Candidate]:
        """Candidates for less memory and for more: the same layers, other recomputation."""
        best = self.best()
        memory = self.request.memory_bytes or (best.most_bytes if best else None)
        if memory is None:
            return
        wanted = []
        for climb in self.climbs:
            partition = (
                climb.best.layout.partition if climb.best else self.partitions(climb.fit.shape)[0]
            )
            limits = [*(round(level * memory) for level in LEVELS), None]
            laid = [climb.fit.layout(partition, limit) for limit in limits]
            layouts = dict.fromkeys(layout for layout, short in laid if not any(short))
            wanted.append((climb.fit, list(layouts)))
        yield from itertools.chain.from_iterable(simulated(wanted))
        # then the best layout of the solver with less memory and with more
        own = [one for one in self.found if one.shape.schedule == AUTO and self.fits(one)]
        best = min(own, key=preference, default=None)
        if best is None or self.num_solutions([best.shape]) < NUM_FIRST:
            return  # there is none, or it takes too long
        for done, level in enumerate(SOLVED_LEVELS):
            self.say("solving for other memories", done, len(SOLVED_LEVELS))
            layout = best.layout
            if level > 1:  # nothing need be recomputed for want of memory
                least = min(self.table(best.shape.microbatch_size).models)
                layout = layout._replace(recompute=(least,) * len(layout.recompute))
            given = layout, round(level * memory), FIRST_EFFORT * self.effort
            if one := solved(self.fit(best.shape), *given):
                yield one

    def least_memory(self) -> Candidate | None:
        """The candidate that needs the least memory; of equal ones the quickest."""
        known = shapes(self.request, self.costs)
        climbs = [climb for shape in known for climb in self.climbs_of(shape, 0)]
        climb_all(climbs, 0)
        layouts = [(climb.fit, [climb.fit.layout(climb.lightest, 0)[0]]) for climb in climbs]
        candidates = itertools.chain.from_iterable(simulated(layouts))
        return min(candidates, key=lambda one: (one.most_bytes, *preference(one)), default=None)


def preference(candidate: Candidate) -> tuple[int, bool, int]:
    """What is better is less: the step, then a schedule with a name, then less memory."""
    is_auto = candidate.shape.schedule == AUTO
    return candidate.step_ns, is_auto, candidate.most_bytes


def frontier_of(candidates: Iterable[Candidate]) -> tuple[FrontierPoint, ...]:
    """The candidates that are quicker than all that need less memory, by memory."""
    points: list[FrontierPoint] = []
    for candidate in sorted(candidates, key=lambda one: (one.most_bytes, *preference(one))):
        if not points or candidate.step_ns < points[-1].step_ns:
            points.append(candidate.point)
    return tuple(points)
