"""Actions per second of the simulator over those of torch's two, and how its time grows.

    python -m benchmarks.simulate [--actions 50000] [--many 1000000] [--rounds 8]
                                  [--largest 10000000]

The plans have 2, 8 and 64 ranks (8 unless stated otherwise), and every simulator gets them as
objects in memory. torch (2.9 and later, torch.distributed.pipelining) has two simulators:

- `_simulate_comms_compute`, its dry run, plays a plan with its sends and receives in steps of
  equal length, returns the step in which each action runs, and stops at a hang. Before it, torch
  must insert the transfers (`_add_send_recv`); the dry run is timed alone, and the two together.
  Ours gets the same computations and derives the messages: `simulate` computes the start and end of
  each computation in nanoseconds, from its stage's cost and the arrival of each message. Sends and
  receives count as actions on both sides.
- `add_schedule_op_spacing`, of its visualizer, gives times to computations, each op with its own
  length, and ignores messages. Both simulators get computations only, of one unit of time each,
  and must agree on the length of the plan. Its output goes to the null device.

So many actions are walked by Python. One plan of `--many` actions is walked by machine code, and
compared with the dry run alone. Every simulation of ours proves anew that its plan is legal.

For growth, machine code simulates plans of 10⁵ computations and ten times more, up to `--largest`.
If time were proportional to the size of the plan, the fitted exponent would be 1; with n log n it
would be 1.07 over these two decades. The goal allows 1.05, which means 1.26 times as much time per
action at 10⁷ as at 10⁵, because larger plans do not fit into the processor's caches.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
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
from engine import arrays
from engine.plan.lower import Policy, lower
from engine.plan.predict import predict, uniform
from engine.plan.program import Program
from engine.plan.schedules.registry import build_program
from engine.plan.table import Table
from engine.plan.walk import TransferModel

TRANSFERS = TransferModel(latency_ns=1000)
SMALLEST = 100_000
OVER = "actions/s, ours over torch's"
Result = tuple[list[Ratio], list[Figure]]


class Shape(NamedTuple):
    """The shape of a plan."""

    schedule: str
    num_ranks: int
    stages_per_rank: int

    def __str__(self) -> str:
        return f"{self.schedule} on {self.num_ranks} ranks"

    def program(self, num_actions: int, *, with_transfers: bool = False) -> Program:
        """A program of about so many actions; its microbatches are a multiple of its ranks."""
        smallest = build_program(
            self.schedule, self.num_ranks, self.num_ranks, self.stages_per_rank
        )
        counted = lower(smallest, Policy.JUST_IN_TIME) if with_transfers else smallest
        groups = max(1, round(num_actions / sum(map(len, counted.actions))))
        num_microbatches = groups * self.num_ranks
        return build_program(self.schedule, self.num_ranks, num_microbatches, self.stages_per_rank)


USUAL = Shape("interleaved_zb", 8, 2)
SHAPES = (Shape("zb_h1", 2, 1), USUAL, Shape("1f1b", 64, 1))


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--actions", type=int, default=50_000, help="actions of a plan compared with torch"
    )
    options.add_argument(
        "--largest", type=int, default=10_000_000, help="computations, a power of 10"
    )
    options.add_argument(
        "--many", type=int, default=1_000_000, help="actions of a plan that is compared compiled"
    )
    options.add_argument("--rounds", type=int, default=8)
    settings, surroundings = options.parse_args(), read_surroundings()
    parts = [
        *(_against_dry_run(shape, settings.actions, settings.rounds) for shape in SHAPES),
        _against_spacing(settings.actions, settings.rounds),
        _compiled_against_dry_run(settings.many, settings.rounds),
        _growth(settings.largest, settings.rounds),
    ]
    ratios = [ratio for part, _ in parts for ratio in part]
    write(
        "simulate", settings, surroundings, ratios, [figure for _, part in parts for figure in part]
    )


# against torch


def _against_dry_run(shape: Shape, num_asked: int, num_rounds: int) -> Result:
    program = shape.program(num_asked, with_transfers=True)
    lowered, ranks = lower(program, Policy.JUST_IN_TIME), program.placement.ranks
    rows, computations = _torchs_rows(lowered), _torchs_rows(program)
    dry_run, planned, ours = (
        f"{shape}: {who}" for who in ("torch's dry run", "torch's transfers and dry run", "ours")
    )
    arms = {
        dry_run: lambda: _dry_run(dict(enumerate(rows)), ranks),
        planned: lambda: _planned_by_torch(computations, ranks),
        ours: _simulating(program),
    }
    turns = timed_in_turns(arms, num_rounds)
    goal = Goal(at_least=20)
    ratios = [
        turns.ratio(f"{shape}: {OVER} dry run", dry_run, ours, goal),
        turns.ratio(f"{shape}: {OVER} transfers and dry run", planned, ours, goal),
    ]
    return ratios, _rates(turns, lowered)


def _compiled_against_dry_run(num_asked: int, num_rounds: int) -> Result:
    program = USUAL.program(num_asked, with_transfers=True)
    lowered, ranks = lower(program, Policy.JUST_IN_TIME), program.placement.ranks
    rows = _torchs_rows(lowered)
    gc.collect()
    gc.freeze()  # torch's actions are no simulator's garbage
    theirs, ours = "torch's dry run of many", "ours of many"
    arms = {theirs: lambda: _dry_run(dict(enumerate(rows)), ranks), ours: _simulating(program)}
    turns = timed_in_turns(arms, num_rounds)
    name = f"{USUAL}, {lowered.table.num_actions:,} actions: {OVER} dry run"
    return [turns.ratio(name, theirs, ours, Goal(at_least=300))], _rates(turns, lowered)


def _against_spacing(num_asked: int, num_rounds: int) -> Result:
    program = USUAL.program(num_asked)
    rows = _torchs_rows(program)
    unit = uniform(program.placement, *[USUAL.stages_per_rank] * 3)
    theirs, ours = "torch's spacing", "ours without messages"
    assert max(map(len, _spaced(rows))) == predict(program, unit).makespan_ns
    arms = {theirs: lambda: _spaced(rows), ours: lambda: predict(_unproved(program), unit)}
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
    """Torch's preparation of a schedule without transfers, and its dry run."""
    rows = {rank: [action for action in row if action] for rank, row in enumerate(computations)}
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


def _growth(largest: int, num_rounds: int) -> Result:
    sizes = [
        10**power for power in range(round(math.log10(SMALLEST)), round(math.log10(largest)) + 1)
    ]
    programs = {f"10^{round(math.log10(size))}": USUAL.program(size) for size in sizes}
    arrays.PAYS_FROM = 0
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
    return lambda: predict(_unproved(program), durations, TRANSFERS)


def _unproved(program: Program) -> Program:
    """Return the same program before any proof about it."""
    return replace(program, actions=Table(*program.table.arrays))


def _exponent(counts: list[int], seconds: list[float]) -> float:
    """The exponent of the power law that fits best: the slope in logarithms."""
    logs = [list(map(math.log, values)) for values in (counts, seconds)]
    return statistics.linear_regression(*logs).slope


if __name__ == "__main__":
    main()
