"""What other amounts of memory allow: the best step for each, and the least memory of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from ppbench.planning.fitting import Candidate, Layout, simulated
from ppbench.planning.partitions import climb_all
from ppbench.planning.plan import AUTO, FrontierPoint
from ppbench.planning.search import FIRST_EFFORT, NUM_FIRST, Search, preference
from ppbench.planning.solving import solved
from ppbench.planning.space import shapes

LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 1.75, 2.0)
"""Parts of the memory for which the best step is looked for besides."""
SOLVED_LEVELS = (0.6, 0.8, 1.25, 2.0)
"""Those of which the solver has a program made."""


def point_of(candidate: Candidate) -> FrontierPoint:
    """A candidate as a point of the frontier."""
    return FrontierPoint(candidate.most_bytes, candidate.step_ns, candidate.configuration)


def frontier_of(candidates: Iterable[Candidate]) -> tuple[FrontierPoint, ...]:
    """The candidates that are quicker than all that need less memory, by memory."""
    points: list[FrontierPoint] = []
    for candidate in sorted(candidates, key=lambda one: (one.most_bytes, *preference(one))):
        if not points or candidate.step_ns < points[-1].step_ns:
            points.append(point_of(candidate))
    return tuple(points)


def candidates_elsewhere(search: Search) -> Iterator[Candidate]:
    """Candidates for less memory and for more: the same layers, other recomputation."""
    best = search.best()
    memory = search.request.memory_bytes or (best.most_bytes if best else None)
    if memory is None:
        return
    wanted = []
    for climb in search.climbs:
        partition = (
            climb.best.layout.partition if climb.best else search.partitions(climb.fit.shape)[0]
        )
        limits = [*(round(level * memory) for level in LEVELS), None]
        laid = [climb.fit.layout(partition, limit) for limit in limits]
        layouts = dict.fromkeys(layout for layout, short in laid if short.most == 0)
        wanted.append((climb.fit, list(layouts)))
    for candidates in simulated(wanted):
        yield from candidates
    # then the best layout of the solver with less memory and with more
    own = [one for one in search.found if one.shape.schedule == AUTO and search.fits(one)]
    best = min(own, key=preference, default=None)
    if best is None or search.num_solutions([best.shape]) < NUM_FIRST:
        return  # there is none, or it takes too long
    table = search.table(best.shape.microbatch_size)
    for level in SOLVED_LEVELS:
        search.say("solving for other memories", SOLVED_LEVELS.index(level), len(SOLVED_LEVELS))
        layout = best.layout
        if level > 1:  # nothing need be recomputed for want of memory
            layout = Layout(layout.partition, (min(table.models),) * len(layout.recompute))
        found = solved(
            best.shape,
            layout,
            table,
            search.costs.link,
            round(level * memory),
            FIRST_EFFORT * search.effort,
            meets=search.request.meets,
        )
        if found is not None:
            yield found


def least_of(search: Search) -> Candidate | None:
    """The candidate that needs the least memory; of equal ones the quickest."""
    known = shapes(search.request, search.costs)
    climbs = [climb for shape in known for climb in search.climbs_of(shape, 0)]
    climb_all(climbs, 0)
    layouts = [(climb.fit, [climb.fit.layout(climb.lightest, 0)[0]]) for climb in climbs]
    candidates = itertools.chain.from_iterable(simulated(layouts))
    return min(candidates, key=lambda one: (one.most_bytes, *preference(one)), default=None)
