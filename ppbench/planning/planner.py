"""Makes a plan: the best pipelines for a model, devices and memory, and how sure that is.

request, costs --Search--> candidates --intervals, bounds--> proposals
                                      --counterfactuals--> what limits the first choice
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from engine.plan.model_costs import LinkCosts
from engine.plan.predict import Durations, WalkedStep, predict
from engine.plan.sizes import exact_text, size_text
from ppbench.display.units import milliseconds
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.fitting import Candidate
from ppbench.planning.plan import (
    AUTO,
    FrontierPoint,
    Loss,
    NoPlanError,
    Plan,
    PlanRequest,
    Proposal,
)
from ppbench.planning.search import OnProgress, Search, frontier_of, preference
from ppbench.planning.solver.bounds import lower_bound
from ppbench.planning.solver.problem import Problem
from ppbench.planning.solving import least_step_of, most_room, problem_of
from ppbench.planning.space import Shape, shapes, sizes_of
from ppbench.planning.stages import (
    TIMES,
    StageTable,
    durations_of,
    optimizers_of,
    steps_ns,
    transfers_of,
)
from ppbench.planning.uncertainty import drawn_tables, interval_of

NUM_PROPOSALS = 5
LEAST_GAIN = 0.005
"""The part of a step by which more memory must shorten it to be worth a word."""
BASELINE = "1f1b"
MOST_NS, MOST_BYTES = 1e17, 2**60
"""Three years and 1 EiB: sums of more do not fit into the integers of simulation and solver."""
LEAST_NS = 4
"""What all layers take at least, so that no step takes 0 ns once each action is rounded."""


def make_plan(
    request: PlanRequest,
    costs: CostSet,
    on_progress: OnProgress = lambda _what, _done, _all: None,
    effort: float = 1.0,
) -> Plan:
    """The best pipelines for a request at these costs; the same each time.

    `effort` is proportional to what is spent on moving layers and on the solver. Raises
    NoPlanError where nothing fits, with what needs the least memory; UsageError where there is
    nothing to choose from.
    """
    check_request(request, costs)
    search = Search(request, costs, on_progress, effort)
    search.run()
    if search.best() is None:
        least = search.least_memory()
        if least is None or not search.fits(least):
            text = f"no pipeline fits into {exact_text(request.memory_bytes or 0)} per rank"
            if least is None:
                raise NoPlanError("memory", f"{text}; raise it")
            point = least.point
            raise NoPlanError(
                "memory",
                f"{text}; the least that would do is {size_text(point.memory_bytes)}, for "
                f"{least.shape.schedule} with a step of {milliseconds(least.step_ns)}; raise it, "
                "or allow more ranks",
                point,
            )
        search.found.append(least)
    search.found += list(search.elsewhere())
    by_shape: dict[Shape, Candidate] = {}
    for candidate in sorted(filter(search.fits, search.found), key=preference):
        by_shape.setdefault(candidate.shape, candidate)
    chosen = list(by_shape.values())  # the best of each shape, the best first
    link, drawn = costs.link, dict[tuple[int, int, int], list[StageTable]]()

    def proposed(candidate: Candidate) -> Proposal:
        """A candidate with its interval, bound and figures."""
        shape, step_ns = candidate.shape, candidate.step_ns
        if (key := shape.key_of_costs) not in drawn:
            drawn[key] = drawn_tables(search.table(*key).models)
        room = most_room(shape.placement, candidate.stages, request.memory_bytes)
        problem = problem_of(shape, candidate.stages, link, room, meets=request.meets)
        tokens = request.replicas * request.global_batch * request.seq_len
        return Proposal(
            candidate.configuration,
            candidate.program,
            step_ns,
            *interval_of(candidate, drawn[key], link),
            min(_bound_ns(problem, shape, candidate), step_ns),
            candidate.peak_bytes,
            1 - _computing_ns(candidate) / (shape.ranks * step_ns - sum(problem.optimizers)),
            tokens / step_ns * 1e9,
        )

    made = dict[Shape, Proposal]()
    for done, candidate in enumerate(chosen[:NUM_PROPOSALS]):
        on_progress("drawing costs from their errors", done, NUM_PROPOSALS)
        made[candidate.shape] = proposed(candidate)
    proposals = tuple(made.values())
    # The best that needs no program of its own.
    named = next((one for one in chosen if one.shape.schedule != AUTO), None)
    registered = None if named is None else made.get(named.shape) or proposed(named)
    # The best 1F1B that fits into the same memory, with layers and recomputation as good.
    is_baseline = (one for one in proposals if one.configuration.schedule == BASELINE)
    baseline = next(is_baseline, None)
    if baseline is None:
        only = replace(request, schedules=(BASELINE,), stages_per_rank=(1,))
        alone = Search(only, costs, on_progress, effort)
        alone.run()
        best = alone.best()
        baseline = None if best is None else proposed(best)
    frontier = frontier_of(search.found)
    # The least memory with which the most is gained, of up to twice that there is.
    more_memory: FrontierPoint | None = None
    if (memory := request.memory_bytes) is not None:
        enough = (1 - LEAST_GAIN) * chosen[0].step_ns
        within = [point for point in frontier if memory < point.memory_bytes <= 2 * memory]
        if better := [point for point in within if point.step_ns <= enough]:
            goal = min(point.step_ns for point in better) * (1 + LEAST_GAIN)
            more_memory = next(point for point in better if point.step_ns <= goal)
    notes = []  # what was left out for want of costs, or taken for granted
    if any(one.configuration.num_slices > 1 for one in proposals):
        notes.append(
            "A slice is taken to need its share of what a whole microbatch was measured to need; "
            "short slices may need more."
        )
    sizes = sizes_of(request, costs)
    wanted = [size for size in request.microbatch_sizes if request.global_batch % size == 0]
    if missing := ", ".join(str(size) for size in wanted if size not in sizes):
        notes.append(f"There are no costs for microbatches of {missing}: left out.")
    if request.recompute == AUTO and not any((size, True) in costs.by_setting for size in sizes):
        notes.append("There are no costs with recomputation: nothing is recomputed.")
    # The step of the first choice without each cause of loss. An order that suits unequal stages
    # need not suit equal ones, so that these may have the program of any that is placed alike.
    first, free = chosen[0], LinkCosts()
    num = len(first.stages)
    means = {name: sum(getattr(stage, name) for stage in first.stages) // num for name in TIMES}
    equal = tuple(replace(stage, **means) for stage in first.stages)
    programs = {id(first.program): first.program}
    for one in filter(search.fits, search.found):
        if one.shape[1:] == first.shape[1:]:
            programs[id(one.program)] = one.program
    cases = [(program, equal) for program in programs.values()]
    unhindered_ns, equal_ns = (
        min(steps_ns(cases, transfers_of(of_link, equal), meets=request.meets))
        for of_link in (free, link)
    )
    # An order made for unequal stages may suit equal ones worse: its own bubble is no longer.
    free_ns = _step_with(first, free)
    unhindered_ns = min(unhindered_ns, free_ns)
    # All ranks compute all the time.
    ideal_ns = _computing_ns(first) // first.shape.ranks
    ideal_ns += max(optimizers_of(equal, first.shape.placement))
    without = {
        "schedule": first.step_ns - max(0, unhindered_ns - ideal_ns),
        "imbalance": equal_ns,
        "link": free_ns,
        "memory": min(point.step_ns for point in frontier),
    }
    losses = [Loss(cause, min(first.step_ns, ns)) for cause, ns in without.items()]
    faster = replace(link, latency_ns=link.latency_ns / 2, bytes_per_s=link.bytes_per_s * 2)
    return Plan(
        request,
        costs,
        proposals,
        frontier,
        registered,
        baseline,
        tuple(sorted(losses, key=lambda loss: loss.step_ns)),
        more_memory,
        min(_step_with(candidate, faster) for candidate in chosen[:NUM_PROPOSALS]),
        tuple(notes),
    )


def simulated(plan: Plan, proposal: Proposal) -> WalkedStep:
    """The step of a proposal, action by action, without its optimizer."""
    one = proposal.configuration
    key = one.microbatch_size, one.placement.directions, one.num_slices
    table = Search(plan.request, plan.costs, lambda *_: None, 0).table(*key)
    stages = table.of_all(one.partition, one.recompute)
    return predict(proposal.program, durations_of(stages), transfers_of(plan.costs.link, stages))


def check_request(request: PlanRequest, costs: CostSet) -> None:
    """Raise NoPlanError where no pipeline has such numbers, whatever the memory."""
    known = sorted({size for size, _ in costs.by_setting})
    if not sizes_of(request, costs):
        wanted = request.microbatch_sizes or known
        divide = [size for size in wanted if request.global_batch % size == 0]
        if not divide:
            raise NoPlanError(
                "microbatch_sizes",
                f"{', '.join(map(str, wanted))}: none divides the global batch of "
                f"{request.global_batch} sequences; give a divisor of it",
            )
        where = " with recomputation" if request.recompute == "all" else ""
        raise NoPlanError(
            "microbatch_sizes",
            f"there are no costs{where} for microbatches of {', '.join(map(str, divide))}, "
            f"only for those of {', '.join(map(str, known))}; measure them, or choose among these",
        )
    if next(shapes(request, costs), None) is None:
        layers = len(next(iter(costs.by_setting.values())).layers)
        raise NoPlanError(
            "stages_per_rank",
            f"no schedule of {', '.join(request.schedules)} has a pipeline of "
            f"{' or '.join(map(str, request.ranks))} ranks with "
            f"{' or '.join(map(str, request.stages_per_rank))} stages per rank for a model of "
            f"{layers} layers and a global batch of {request.global_batch}; allow others",
        )
    for size, recompute in itertools.product(sizes_of(request, costs), (False, True)):
        if (model := costs.by_setting.get(Setting(size, recompute))) is None:
            continue
        num, parts = request.global_batch // size, model.parts
        backwards = [max(part.backward_ns, part.input_ns + part.weight_ns) for part in parts]
        busy = sum(part.forward_ns + more for part, more in zip(parts, backwards, strict=True))
        message = max(part.message_bytes for part in parts)
        moved = costs.link.latency_ns + message / costs.link.bytes_per_s * 1e9
        moved *= 1 + 10 * costs.link.error
        busy *= 1 + 10 * max(part.error for part in parts)
        steps = 2 * max(request.ranks) * max(request.stages_per_rank)
        num_bytes = sum(
            part.static_bytes
            + part.gradient_bytes
            + num * max(part.held_after_forward, part.held_after_input)
            + part.transient_bytes
            for part in parts
        )
        least = sum(layer.quickest_ns for layer in model.layers)
        for is_wrong, what in (
            (
                not num * (busy + steps * (moved + model.action_ns)) < MOST_NS,
                "a step would take years: times, their errors or the link are out of range",
            ),
            (num_bytes + steps * message > MOST_BYTES, "a step would need more than 1 EiB"),
            (least < LEAST_NS, "the layers take no whole nanosecond"),
        ):
            if is_wrong:
                raise NoPlanError("costs", f"{what} for microbatches of {size}; correct the costs")


def _computing_ns(candidate: Candidate) -> int:
    """The time that all ranks compute in a step, their optimizers left out."""
    took = durations_of(candidate.stages).by_kind(len(candidate.stages))
    counts = candidate.program.compute_only().num_of_kind
    return sum(count * ns for count, ns in zip(counts, took, strict=True))


def _bound_ns(problem: Problem, shape: Shape, candidate: Candidate) -> int:
    """A bound on the step of every program for a candidate's placement and stages.

    Of slices, none takes less than the shortest, and all of them together what they do.
    """
    slices = candidate.program.slices
    if not slices:
        return lower_bound(problem)
    shortest, given = min(slices) * len(slices), problem.durations
    least = Durations(
        *(
            tuple(int(shortest * ns) for ns in times)
            for times in (given.forward_ns, given.input_ns, given.weight_ns, given.whole_ns)
        )
    )
    busy_ns = least_step_of(shape, candidate.stages, meets=False)
    return max(lower_bound(replace(problem, durations=least)), busy_ns)


def _step_with(candidate: Candidate, link: LinkCosts) -> int:
    """The step of a candidate's program with another link."""
    cases, transfers = [(candidate.program, candidate.stages)], transfers_of(link, candidate.stages)
    return steps_ns(cases, transfers, meets=candidate.meets)[0]
