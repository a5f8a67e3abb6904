"""Computations per second of the simulator, torch's two beside it, and how its time grows.

    python -m benchmarks.simulate [--actions 50000] [--rounds 8] [--largest 10000000]

The plans are of 2, 8 and 64 ranks, of 8 where no other is named, and everybody gets them as objects
in memory. torch (2.9 and later, torch.distributed.pipelining) has two simulators:

- `_simulate_comms_compute`, its dry run, plays a plan with its sends and receives in steps of
  equal length, says in which step each action runs, and stops at a hang. Before it, torch must put
  the transfers in place (`_add_send_recv`): both are timed, the dry run alone and the two together.
  Ours is given the same computations and knows what is sent: `simulate` gives each computation its
  beginning and end in nanoseconds, by its stage's cost and by when each message arrives. Sends and
  receives count as actions on both sides.
- `add_schedule_op_spacing`, of its visualizer, gives times to computations, of which each op has
  its length, and knows no messages. Both are given computations alone, of one unit of time each,
  and must come to the same length. What it prints goes to the null device.

Growth: `simulate` alone on plans of 10⁴ computations and ten times more, up to `--largest` (10⁷
take gigabytes). Were time proportional to the plan, the exponent that is fitted would be 1;
with n log n it would be 1.08 over these three decades. The goal allows 1.05, or 1.4 times the time
per action at 10⁷ of that at 10⁴, since the larger plans leave the processor's caches.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.pipelining._schedule_visualizer import add_schedule_op_spacing
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _simulate_comms_compute,
)

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Turns, timed_in_turns
from engine.plan.lower import Policy, lower
from engine.plan.program import Program
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate, uniform

TRANSFERS = TransferModel(latency_ns=1000)
SMALLEST = 10_000
OVER = "actions/s, ours over torch's"
Found = tuple[list[Ratio], list[Figure]]


class Shape(NamedTuple):
    """Of a plan."""

    schedule: str
    num_ranks: int
    stages_per_rank: int

    def __str__(self) -> str:
        return f"{self.schedule} on {self.num_ranks} ranks"

    def program(self, num_actions: int, *, with_transfers: bool = False) -> Program:
        """With about so many; a multiple of the ranks in microbatches."""
        of_one = build_program(self.schedule, self.num_ranks, self.num_ranks, self.stages_per_rank)
        counted = lower(of_one, Policy.JUST_IN_TIME) if with_transfers else of_one
        groups = max(1, round(num_actions / sum(map(len, counted.actions))))
        num_microbatches = groups * self.num_ranks
        return build_program(self.schedule, self.num_ranks, num_microbatches, self.stages_per_rank)


USUAL = Shape("interleaved_zb", 8, 2)
SHAPES = (Shape("zb_h1", 2, 1), USUAL, Shape("1f1b", 64, 1))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--actions", type=int, default=50_000, help="of the comparison with torch")
    options.add_argument(
        "--largest", type=int, default=10_000_000, help="computations, a power of 10"
    )
    options.add_argument("--rounds", type=int, default=8)
    settings, surroundings = options.parse_args(), read_surroundings()
    parts = [
        *(_against_dry_run(shape, settings.actions, settings.rounds) for shape in SHAPES),
        _against_spacing(settings.actions, settings.rounds),
        _growth(settings.largest, settings.rounds),
    ]
    ratios = [ratio for found, _ in parts for ratio in found]
    write("simulate", settings, surroundings, ratios, [one for _, found in parts for one in found])


# against torch


def _against_dry_run(shape: Shape, num_asked: int, num_rounds: int) -> Found:
    program = shape.program(num_asked, with_transfers=True)
    lowered, ranks = lower(program, Policy.JUST_IN_TIME), program.placement.ranks
    rows, computations = _torchs_rows(lowered), _torchs_rows(program)
    dry_run, planned, ours = (
        f"{shape}: {who}" for who in ("torch's dry run", "torch's transfers and dry run", "ours")
    )
    arms = {
        dry_run: lambda: _dry_run(dict(enumerate(rows)), ranks),
        planned: lambda: _planned_by_torch(computations, ranks),
        ours: lambda: simulate(program, uniform(program.placement, 3000, 3000, 3000), TRANSFERS),
    }
    turns = timed_in_turns(arms, num_rounds)
    goal = Goal(at_least=20)
    ratios = [
        turns.ratio(f"{shape}: {OVER} dry run", dry_run, ours, goal),
        turns.ratio(f"{shape}: {OVER} transfers and dry run", planned, ours, goal),
    ]
    return ratios, _rates(turns, lowered)


def _against_spacing(num_asked: int, num_rounds: int) -> Found:
    program = USUAL.program(num_asked)
    rows = _torchs_rows(program)
    unit = uniform(program.placement, *[USUAL.stages_per_rank] * 3)
    theirs, ours = "torch's spacing", "ours without messages"
    assert max(map(len, _spaced(rows))) == simulate(program, unit).makespan_ns
    arms = {theirs: lambda: _spaced(rows), ours: lambda: simulate(program, unit)}
    turns = timed_in_turns(arms, num_rounds)
    ratio = turns.ratio(f"{OVER} spacing, computations alone", theirs, ours, Goal(at_least=20))
    return [ratio], _rates(turns, program)


def _dry_run(rows: dict[int, Any], ranks: tuple[int, ...]) -> dict[int, list[_Action | None]]:
    played: dict[int, list[_Action | None]]
    played = _simulate_comms_compute(rows, lambda stage: ranks[stage], len(ranks))
    return played


def _planned_by_torch(
    computations: list[list[_Action | None]], ranks: tuple[int, ...]
) -> dict[int, list[_Action | None]]:
    """As its runtime prepares a schedule that it was given without transfers."""
    rows = {rank: [one for one in row if one] for rank, row in enumerate(computations)}
    return _dry_run(_add_send_recv(rows, lambda stage: ranks[stage], len(ranks)), ranks)


def _spaced(rows: list[list[_Action | None]]) -> list[list[_Action | None]]:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return add_schedule_op_spacing(rows)


def _torchs_rows(program: Program) -> list[list[_Action | None]]:
    return [[_Action.from_str(str(action)) for action in row] for row in program.actions]


def _rates(turns: Turns, program: Program) -> list[Figure]:
    num_actions = sum(map(len, program.actions))
    return [
        Figure(
            f"{arm}, {num_actions:,} actions", tuple(num_actions / s for s in taken), "actions/s"
        )
        for arm, taken in turns.values.items()
    ]


# growth


def _growth(largest: int, num_rounds: int) -> Found:
    sizes = [
        10**power for power in range(round(math.log10(SMALLEST)), round(math.log10(largest)) + 1)
    ]
    programs = {f"10^{round(math.log10(size))}": USUAL.program(size) for size in sizes}
    gc.collect()
    gc.freeze()  # the plans are not the simulator's: no collection is to look through them
    turns = timed_in_turns(
        {name: _simulating(program) for name, program in programs.items()}, num_rounds
    )
    counts = {name: sum(map(len, program.actions)) for name, program in programs.items()}
    each = Turns({name: [s / counts[name] * 1e6 for s in turns.values[name]] for name in counts})
    names = list(counts)
    ratios = [
        each.ratio(f"time per action, {name} computations over {names[0]}", name, names[0])
        for name in names[1:]
    ]
    rounds = zip(*turns.values.values(), strict=True)
    exponents = tuple(_exponent(list(counts.values()), list(seconds)) for seconds in rounds)
    exponent = Ratio(
        f"exponent of growth, {names[0]} to {names[-1]}", exponents, goal=Goal(at_most=1.05)
    )
    figures = [
        Figure(f"ours, {counts[name]:,} computations", tuple(values), "µs per action")
        for name, values in each.values.items()
    ]
    return [*ratios, exponent], figures


def _simulating(program: Program) -> Callable[[], object]:
    durations = uniform(program.placement, 3000, 3000, 3000)
    return lambda: simulate(program, durations, TRANSFERS)


def _exponent(counts: list[int], seconds: list[float]) -> float:
    """Of the power law that fits best: the slope in logarithms."""
    logs = [list(map(math.log, values)) for values in (counts, seconds)]
    return statistics.linear_regression(*logs).slope


if __name__ == "__main__":
    main()
