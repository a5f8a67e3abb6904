"""First choices of plans on emulated ranks, over the best that was measured.

    python -m benchmarks.worlds [--worlds 10] [--rivals 8]

A world has 2 to 4 ranks, 5 to 8 layers, of which some may be heavier, an embedding, a head, and
links with a latency. The plan is given each time with an error of 1 %, as if it had been measured.
Of all registered schedules with all partitions, those whose simulated steps are shortest with the
true times are run, the first choice among them, on ranks that sleep for the true times. How often
the interval of the plan holds what was measured is among the figures.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from engine.plan.model_costs import NOTHING, LayerCosts, LinkCosts, ModelCosts
from engine.plan.schedules.registry import CSV_PREFIX, SCHEDULES, ShapeError, build_program
from ppbench.config.case import EMULATED, Case, Measure
from ppbench.config.programs import digest_of
from ppbench.config.sweep import Sweep
from ppbench.files import write_file
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.handover import program_text
from ppbench.planning.plan import AUTO, Configuration, PlanRequest
from ppbench.planning.planner import make_plan
from ppbench.planning.stages import steps_ns, transfers_of
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.store import Store

ERROR = 0.01
NUM_MICROBATCHES = 8
MEASURED = Measure(warmup_steps=1, max_warmup_steps=2, steps=6)


class Costs(NamedTuple):
    """The costs of a model with microbatches of one sequence, and of a link."""

    model: ModelCosts
    link: LinkCosts


class Rival(NamedTuple):
    """A pipeline: a registered schedule or a program's file, and the layers of its stages."""

    schedule: str
    stages_per_rank: int
    layers: tuple[int, ...]


class Found(NamedTuple):
    """What came of a world."""

    regret: float  # the first choice's measured step over the shortest
    error: float  # of the step that was predicted
    is_held: bool  # whether the interval holds the step that was measured


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--worlds", type=int, default=10)
    options.add_argument("--rivals", type=int, default=8)
    settings, surroundings = options.parse_args(), read_surroundings()
    found = []
    for seed in range(settings.worlds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_found(seed, settings.rivals, Path(folder)))
        print(f"  world {seed}: {found[-1]}", flush=True)
    over = tuple(one.regret for one in found)
    name = "first choice over the best measured: the largest"
    ratios = [
        Ratio("first choice over the best measured", over),
        Ratio(name, (max(over),), goal=Goal(at_most=1.03)),
    ]
    held = sum(one.is_held for one in found) / len(found)
    figures = [
        Figure("measured step over the predicted one", tuple(one.error for one in found)),
        Figure("share of intervals that hold the measured step", (held,)),
    ]
    write("worlds", settings, surroundings, ratios, figures)


def _found(seed: int, num_rivals: int, folder: Path) -> Found:
    """Plan for a world, run the first choice and the best of all others, and compare."""
    drawn = random.Random(seed)
    ranks, truth = drawn.choice([2, 3, 4]), _truth(drawn)
    request = PlanRequest((ranks,), None, NUM_MICROBATCHES, 128, microbatch_sizes=(1,), meets=False)
    measured = _measured(truth, drawn)
    by_setting = {Setting(1, recompute=False): measured.model}
    costs = CostSet("drawn", "float32", 128, "sgd", "emulated", "drawn", by_setting, truth.link)
    planned = make_plan(replace(request, recompute="none"), costs).first
    first = _rival_of(planned.configuration)
    if planned.configuration.schedule == AUTO:
        file = folder / "auto.csv"
        write_file(file, [program_text(planned.program)])
        first = first._replace(schedule=f"{CSV_PREFIX}{file}")
    rivals = list(dict.fromkeys([first, *_best_simulated(ranks, truth, num_rivals)]))
    steps = _run(rivals, ranks, truth, folder)
    low, high = planned.step_low_ns, planned.step_high_ns
    return Found(steps[0] / min(steps), steps[0] / planned.step_ns, low <= steps[0] <= high)


def _truth(drawn: random.Random) -> Costs:
    """True costs; a whole backward takes as long as its halves, as on emulated ranks."""
    forward = drawn.uniform(4e6, 8e6)
    one = _layer(forward, forward * drawn.uniform(0.6, 1.5), forward * drawn.uniform(0.4, 1.2))
    layers = [one] * drawn.randint(5, 8)
    for at in range(drawn.choice([0, 0, 1, 2])):
        layers[2 * at + 1] = _scaled(one, drawn.uniform(1.2, 2))
    before, after = _scaled(one, drawn.uniform(0.05, 0.4)), _scaled(one, drawn.uniform(0.3, 2))
    link = LinkCosts(drawn.choice([0, drawn.uniform(0, forward / 2)]))
    return Costs(ModelCosts(before, tuple(layers), after), link)


def _layer(forward: float, given: float, weight: float, error: float = 0.0) -> LayerCosts:
    return replace(
        NOTHING,
        forward_ns=forward,
        backward_ns=given + weight,
        input_ns=given,
        weight_ns=weight,
        error=error,
    )


def _scaled(layer: LayerCosts, factor: float) -> LayerCosts:
    return _layer(factor * layer.forward_ns, factor * layer.input_ns, factor * layer.weight_ns)


def _measured(truth: Costs, drawn: random.Random) -> Costs:
    """The costs with an error for each time of each kind of layer."""
    known: dict[LayerCosts, LayerCosts] = {}
    for layer in (truth.model.before, *truth.model.layers, truth.model.after):
        if layer not in known:
            forward, given, weight = (1 + ERROR * drawn.gauss(0, 1) for _ in range(3))
            known[layer] = _layer(
                layer.forward_ns * forward, layer.input_ns * given, layer.weight_ns * weight, ERROR
            )
    model = truth.model
    layers = tuple(known[layer] for layer in model.layers)
    return Costs(ModelCosts(known[model.before], layers, known[model.after]), truth.link)


def _rival_of(one: Configuration) -> Rival:
    return Rival(one.schedule, one.stages_per_rank, one.layers)


def _best_simulated(ranks: int, truth: Costs, num: int) -> list[Rival]:
    """Registered schedules with the partitions of the shortest simulated steps."""
    found: dict[Rival, int] = {}
    for name, stages_per_rank in itertools.product(SCHEDULES, (1, 2)):
        try:
            program = build_program(name, ranks, NUM_MICROBATCHES, stages_per_rank)
        except ShapeError:
            continue
        for layers in _partitions(len(truth.model.layers), program.num_stages):
            stages = truth.model.of_stages(_ranges(layers))
            transfers = transfers_of(truth.link, stages)
            (step_ns,) = steps_ns([(program, stages)], transfers, meets=False)
            found[Rival(name, stages_per_rank, layers)] = step_ns
    return sorted(found, key=found.__getitem__)[:num]


def _partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All counts of layers by stage; only the first and the last stage may have none."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        counts = tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))
        if all(counts[1:-1]):
            yield counts


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(itertools.accumulate(counts))
    return [range(end - num, end) for num, end in zip(counts, ends, strict=True)]


def _run(rivals: Sequence[Rival], ranks: int, truth: Costs, folder: Path) -> list[float]:
    """The median step of each, in ns, on emulated ranks."""
    cases = [_case(rival, ranks, truth) for rival in rivals]
    sweep = Sweep(
        "worlds", "", tuple((case, MEASURED) for case in cases), ("schedule", "emulated_F_ms")
    )
    runs = run_sweep(sweep, Store(folder / "results"), Choice()).frame
    steps = dict(zip(runs["case_id"], runs["step_ns"], strict=True))
    return [float(steps[case.case_id]) for case in cases]


def _case(rival: Rival, ranks: int, truth: Costs) -> Case:
    stages = truth.model.of_stages(_ranges(rival.layers))
    is_file = rival.schedule.startswith(CSV_PREFIX)
    link_ms = truth.link.latency_ns / 1e6
    return Case(
        schedule=rival.schedule,
        program_digest=digest_of(Path(rival.schedule.removeprefix(CSV_PREFIX))) if is_file else "",
        device=EMULATED,
        world_size=ranks,
        stages_per_rank=rival.stages_per_rank,
        num_microbatches=NUM_MICROBATCHES,
        emulated_F_ms=tuple(stage.forward_ns / 1e6 for stage in stages),
        emulated_I_ms=tuple(stage.input_ns / 1e6 for stage in stages),
        emulated_W_ms=tuple(stage.weight_ns / 1e6 for stage in stages),
        emulated_link_ms=(link_ms,) if link_ms else (),
    )


if __name__ == "__main__":
    main()
