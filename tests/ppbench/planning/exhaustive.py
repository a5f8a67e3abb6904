"""The best pipeline by brute force: every schedule, partition and recomputation, simulated.

Written apart from the planner: memory is counted action by action, and what recomputes is any set
of stages that fits and of which no part fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from engine.plan.action import Op
from engine.plan.lower import lower
from engine.plan.period import Step, periods
from engine.plan.predict import Durations
from engine.plan.program import Program
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.walk import TransferModel, of_kinds

AT_ONCE = 4000


def true_step_ns(program, stages, link, meets):
    """The step of a program in a running training, with the costs of its stages."""
    (step,) = _steps([(program, stages)], link, meets)
    return step


def _steps(cases, link, meets):
    """The steps of some cases, all of which have the same messages."""
    message = max((stage.message_bytes for stage in cases[0][1][:-1]), default=0)
    steps = []
    for program, stages in cases:
        optimizer = [0] * program.world_size
        for rank, stage in zip(program.placement.ranks, stages, strict=True):
            optimizer[rank] += stage.optimizer_ns
        took = of_kinds(program, durations(stages).by_kind(len(stages)))
        steps.append(Step(program, [took], optimizer, meets))
    transfers = TransferModel(round(link.latency_ns), link.bytes_per_s, message)
    return list(map(math.ceil, periods(steps, transfers)))


def durations(stages):
    times = [(s.forward_ns, s.input_ns, s.weight_ns, s.backward_ns) for s in stages]
    return Durations(*zip(*times, strict=True))


def peak_bytes(program: Program, stages, rank: int, tell=lambda *_: None) -> int:
    """The most bytes of a rank whose messages are mapped memory: every tensor by its name.

    `tell` gets each action and the bytes on its way.
    """
    row, placement = lower(program).actions[rank], program.placement
    last, firsts = program.num_stages - 1, placement.copies_of(0)
    live = {"static": sum(stages[s].static_bytes for s in program.placement.stages_of(rank))}
    coming = {}  # by stage and way, the microbatches in the order of their messages
    for action in row:
        if action.op in (Op.RECV_F, Op.RECV_B):
            coming.setdefault((action.stage, action.op), []).append(action.microbatch)

    def take(stage, op, microbatch, kind, num_bytes):
        waiting = coming.get((stage, op), [])
        while microbatch in waiting:
            live[kind, stage, waiting.pop(0)] = num_bytes

    peak = 0
    for stage, op, m in row:
        if op in (Op.RECV_F, Op.RECV_B):
            continue
        one, levels = stages[stage], []

        def note(more=0, levels=levels):
            levels.append(sum(live.values()) + more)

        layers = list(enumerate(one.layers))
        if op is Op.F:
            take(stage, Op.RECV_F, m, "input", one.input_bytes)
        elif op in (Op.B, Op.I):
            take(stage, Op.RECV_B, m, "given", one.message_bytes)
        note()
        if op is Op.F:
            own = live.pop(("input", stage, m), 0)
            for at, layer in layers:
                live["held", stage, m, at] = layer.held_after_forward
                note(layer.transient_bytes)
            if not placement.is_last(stage):
                live["output", stage, m] = one.message_bytes
            assert own == (0 if stage in firsts else one.input_bytes)
        elif op in (Op.B, Op.I):
            counted = live.get(("given", stage, m), 0)  # among what the last layer has
            for at, layer in reversed(layers):
                if op is Op.B and ("gradient", stage, at) not in live:
                    note(layer.first_transient_bytes - counted)
                    live["gradient", stage, at] = layer.gradient_bytes
                else:
                    note(layer.transient_bytes - counted)
                counted *= op is Op.I  # a half keeps it for the other, among what it leaves
                live["held", stage, m, at] = layer.held_after_input if op is Op.I else 0
            if stage not in firsts:
                live["returned", stage, m] = one.input_bytes
        elif op is Op.W:
            for at, layer in reversed(layers):
                is_first = ("gradient", stage, at) not in live  # what is added up is then kept
                note(max(layer.weight_transient_bytes, is_first * layer.gradient_bytes))
                live["gradient", stage, at] = layer.gradient_bytes
                live["held", stage, m, at] = 0
        note()
        if op in (Op.B, Op.I):
            live.pop(("given", stage, m), 0)
        elif op is Op.SEND_F:
            del live["output", stage, m]
        elif op is Op.SEND_B:
            del live["returned", stage, m]
        # What goes to a stage of this rank is its own.
        for there, kind, name in ((stage + 1, "output", "input"), (stage - 1, "returned", "given")):
            is_here = 0 <= there <= last and program.placement.ranks[there] == rank
            if is_here and (kind, stage, m) in live:
                live[name, there, m] = live.pop((kind, stage, m))
        note()
        peak = max(peak, *levels)
        tell((stage, op, m), levels)
    return peak


def partitions(num_layers: int, num_stages: int) -> Iterator[list[range]]:
    """All contiguous partitions; only the first and the last stage may have no layer."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        bounds = [0, *cuts, num_layers]
        parts = [range(a, b) for a, b in itertools.pairwise(bounds)]
        if all(parts[1:-1]):
            yield parts


def programs(request):
    """Every program of the request's schedules, with its microbatch size."""
    for ranks, size, name, stages_per_rank in itertools.product(
        request.ranks, request.microbatch_sizes, request.schedules, request.stages_per_rank
    ):
        if name in SCHEDULES and request.global_batch % size == 0:
            try:
                program = build_program(name, ranks, request.global_batch // size, stages_per_rank)
            except ShapeError:
                continue
            yield program, size


def stages_of(program, model, partition, link):
    """The costs of all stages; both copies of one are trained, and their gradients summed."""
    stages = model.of_stages(partition)
    if program.placement.directions == 1:
        return stages
    summed = [
        replace(
            stage,
            optimizer_ns=round(
                sum(
                    layer.optimizer_ns + round(layer.gradient_bytes / link.bytes_per_s * 1e9)
                    for layer in stage.layers
                )
            ),
        )
        for stage in stages
    ]
    return summed * 2


def fitting(program, models, partition, memory, link):
    """The costs of stages for each least choice of what recomputes for a partition to fit."""
    num = program.num_stages
    by_mode = [stages_of(program, models[mode], partition, link) for mode in (False, True)]
    found: list[set[int]] = []
    peaks: dict[tuple, int] = {}
    for number in range(num + 1):
        for chosen in map(set, itertools.combinations(range(num), number)):
            if any(less <= chosen for less in found):
                continue
            stages = [by_mode[stage in chosen][stage] for stage in range(num)]
            if memory is None or all(
                _peak(program, stages, rank, peaks) <= memory for rank in range(program.world_size)
            ):
                found.append(chosen)
                yield stages


def _peak(program, stages, rank, peaks):
    own = tuple(stages[s] for s in program.placement.stages_of(rank))
    if (rank, own) not in peaks:
        peaks[rank, own] = peak_bytes(program, stages, rank)
    return peaks[rank, own]


def least_ns(program, stages) -> float:
    """No step is shorter than the work of a rank."""
    num = program.num_microbatches / program.placement.directions
    busy = [0.0] * program.world_size
    for rank, stage in zip(program.placement.ranks, stages, strict=True):
        backward = min(stage.backward_ns, stage.input_ns + stage.weight_ns)
        busy[rank] += num * (stage.forward_ns + backward)
    return max(busy)


def best_step_ns(request, costs) -> int | None:
    """The shortest step of all, None where nothing fits."""
    best = None
    for program, size in programs(request):
        models = {mode: costs.by_setting[size, mode] for mode in (False, True)}
        tasks = []
        link = costs.link
        for partition in partitions(len(models[False].layers), program.placement.depth):
            quickest = stages_of(program, models[False], partition, link)
            if best is None or least_ns(program, quickest) < best:
                fits = fitting(program, models, partition, request.memory_bytes, link)
                tasks += [(least_ns(program, stages), stages) for stages in fits]
        tasks.sort(key=lambda task: task[0])
        for start in range(0, len(tasks), AT_ONCE):
            some = [
                (program, stages)
                for least, stages in tasks[start : start + AT_ONCE]
                if best is None or least < best
            ]
            steps = _steps(some, link, request.meets) if some else []
            best = min([*steps, *([best] if best is not None else [])])
    return best
