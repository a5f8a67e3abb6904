"""The first choice of a plan over every configuration of a grid, really trained on two CPU ranks.

    python -m benchmarks.planning [--models llama-8m llama-160m] [--part 1]

The costs of a model's layers are measured first, and a plan is made from them: which schedule,
microbatch size and layers of each stage. Then every schedule of the registry with every microbatch
size and its layers spread evenly, and what else the plan proposes, train on the same ranks, step by
step in turns. All of them at once would need too much memory, so that they come in groups, and the
first choice is in each. The best few of all train again, for longer: the regret is the step of the
first choice over that of the best of those, in which luck in the first turns has no part.

The solver's program (auto) is compared with the best registered schedule in the same way. What a
split backward gains over 1f1b is compared with what the simulation says, from the same costs and
for the same microbatches and layers.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.pipelines import WORLD_SIZE, Arm, Regime, measure
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Turns
from engine.model.partition import partition_layers
from engine.plan.schedules.registry import CSV_PREFIX, SCHEDULES, build_program
from ppbench.files import write_file
from ppbench.planning.cost_set import Setting
from ppbench.planning.handover import program_text
from ppbench.planning.plan import AUTO, Plan, Proposal
from ppbench.planning.stages import steps_ns, transfers_of
from ppbench.recommendation.question import plan

NUM_FINALISTS = 4
BASE = ("1f1b", "zb_h1", "zb_h2")
"""Schedules of one placement; the backward of all but the first is split."""


@dataclass(frozen=True)
class World:
    """A model with its batch, how many trainers have room at once, and how long they train."""

    model: str
    seq_len: int
    batch: int  # sequences of a step
    microbatch_sizes: tuple[int, ...]
    group: int
    num_rounds: int
    num_finals: int

    @property
    def regime(self) -> Regime:
        return Regime(self.model, self.model, self.seq_len, self.batch, num_warmup=2)


WORLDS = {
    "llama-8m": World("llama-8m", 128, 8, (1, 2), group=10, num_rounds=8, num_finals=40),
    "llama-160m": World("llama-160m", 64, 8, (1, 2), group=5, num_rounds=2, num_finals=10),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=WORLDS, default=list(WORLDS))
    options.add_argument("--part", type=float, default=1, help="share of the usual rounds")
    settings, surroundings = options.parse_args(), read_surroundings()
    ratios: list[Ratio] = []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in settings.models:
            trial = Trial(WORLDS[name], Path(folder))
            trial.run(settings.part)
            ratios += trial.ratios()
            figures += trial.figures()
    write("planning", settings, surroundings, ratios, figures)


class Trial:
    """A plan, and the turns of what it is compared with."""

    def __init__(self, world: World, folder: Path) -> None:
        """Measure the costs of the model's layers, and plan."""
        self.world = world
        self.plan = _planned(world, folder)
        self.first = _arm_of(self.plan.first, folder)
        baseline = [self.plan.baseline] if self.plan.baseline is not None else []
        proposed = [_arm_of(one, folder) for one in [*self.plan.proposals, *baseline]]
        evenly = [self._even(name, size) for name in SCHEDULES for size in world.microbatch_sizes]
        self.others = [arm for arm in dict.fromkeys([*evenly, *proposed]) if arm != self.first]
        self.relative: dict[Arm, float] = {}
        self.finalists: list[Arm] = []
        self.finals = self.split = Turns({})

    def run(self, part: float) -> None:
        """Train all in turns, then the best few for longer; print a line for each."""
        num_rounds = max(1, round(part * self.world.num_rounds))
        num_finals = max(1, round(part * self.world.num_finals))
        print(f"  {self.world.model}: {self.plan.sentences[0]}", flush=True)
        size = self.world.group - 1
        for start in range(0, len(self.others), size):
            group = self.others[start : start + size]
            turns = measure(self.world.regime, [self.first, *group], num_rounds)
            for arm in group:
                ratio = turns.ratio("", str(arm), str(self.first))
                self.relative[arm] = ratio.median
                print(f"    {arm}: {ratio.median:.3f} of the first choice's step", flush=True)
        ranked = [self.first, *sorted(self.others, key=self.relative.__getitem__)]
        chosen = ranked[: 1 + NUM_FINALISTS]
        for is_auto in (True, False):
            chosen += [arm for arm in ranked if _is_auto(arm) is is_auto][:1]
        self.finalists = list(dict.fromkeys(chosen))
        self.finals = measure(self.world.regime, self.finalists, num_finals)
        self.split = measure(self.world.regime, [self._split(name) for name in BASE], num_finals)

    def ratios(self) -> Iterator[Ratio]:
        """The regret, `auto` over the best schedule, and what split backwards gain."""
        model, steps = self.world.model, self.finals
        rivals = [name for name in steps.values if name != str(self.first)]
        over = [steps.ratio(name, str(self.first), name) for name in rivals]
        worst = max(over, key=lambda ratio: ratio.median)
        count = len(self.others) + 1
        name = f"{model}: first choice over the best other of {count} ({worst.name})"
        yield Ratio(name, worst.values, goal=Goal(at_most=1.02))
        ranked = sorted(self.finalists, key=lambda arm: statistics.median(steps.values[str(arm)]))
        autos = [arm for arm in ranked if _is_auto(arm)]
        best = next(arm for arm in ranked if not _is_auto(arm))
        for auto in autos[:1]:
            name = f"{model}: auto over the best schedule ({best})"
            yield steps.ratio(name, str(auto), str(best), Goal(at_most=1))
        whole, *split = map(self._split, BASE)
        for arm in split:
            said = self._simulated_ns(whole) / self._simulated_ns(arm)
            gained = self.split.ratio("", str(whole), str(arm)).values
            name = f"{model}: gain of {arm.schedule} over {whole.schedule}, over the simulated one"
            values = tuple(gain / said for gain in gained)
            yield Ratio(name, values, goal=Goal(at_least=0.97, at_most=1.03))

    def figures(self) -> Iterator[Figure]:
        """Every configuration's step over the first choice's, as it was in the first turns."""
        for arm, ratio in sorted(self.relative.items(), key=lambda item: item[1]):
            yield Figure(f"{self.world.model}: {arm} over the first choice", (ratio,))
        yield from self.finals.figures()
        yield from self.split.figures()

    def _split(self, schedule: str) -> Arm:
        """A schedule with the largest microbatches, so that it has most to split."""
        return self._even(schedule, self.world.microbatch_sizes[-1])

    def _even(self, schedule: str, microbatch_size: int) -> Arm:
        """A schedule with layers spread evenly."""
        program = build_program(schedule, WORLD_SIZE, self.world.batch // microbatch_size)
        layers = partition_layers("uniform", self._num_layers, program.num_stages)
        return Arm("engine", schedule, microbatch_size, tuple(map(len, layers)))

    @property
    def _num_layers(self) -> int:
        return sum(self.plan.first.configuration.layers)

    def _simulated_ns(self, arm: Arm) -> int:
        """The step of an even spread as the plan's costs have it, the optimizer included."""
        program = build_program(arm.schedule, WORLD_SIZE, self.world.batch // arm.microbatch_size)
        costs = self.plan.costs.by_setting[Setting(arm.microbatch_size, recompute=False)]
        partition = partition_layers(arm.layers, self._num_layers, program.num_stages)
        stages = costs.of_stages(partition)
        transfers = transfers_of(self.plan.costs.link, stages)
        return steps_ns([(program, stages)], transfers, meets=self.plan.request.meets)[0]


def _is_auto(arm: Arm) -> bool:
    """Whether an arm runs a program of the solver."""
    return arm.schedule.startswith(CSV_PREFIX)


def _planned(world: World, folder: Path) -> Plan:
    """The plan for a world, with costs that are measured now."""
    lines = [
        f'name = "{world.model}"',
        f"seq_len = {world.seq_len}",
        f'model.preset = "{world.model}"',
        "[plan]",
        f"ranks = {WORLD_SIZE}",
        f"global_batch = {world.batch}",
        f"microbatch_sizes = {list(world.microbatch_sizes)}",
        'recompute = "none"',
    ]
    file = folder / f"{world.model}.toml"
    write_file(file, ["\n".join(lines) + "\n"])
    return plan(file, results=folder / "results")


def _arm_of(proposal: Proposal, folder: Path) -> Arm:
    """What trains a proposal; a program of the solver is written to a file."""
    one, schedule = proposal.configuration, proposal.configuration.schedule
    if schedule == AUTO:
        layers = "-".join(map(str, one.layers))
        file = folder / f"auto-{one.num_microbatches}-{layers}.csv"
        write_file(file, [program_text(proposal.program)])
        schedule = f"{CSV_PREFIX}{file}"
    return Arm("engine", schedule, one.microbatch_size, one.layers)


if __name__ == "__main__":
    main()
