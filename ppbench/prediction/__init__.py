"""Predicts a step without running it: its exact length, idle time and peak activations.

    prediction = ppbench.simulate("1f1b", ranks=4, microbatches=8, cost="F=1,I=1,W=1")
    prediction.figures()["bubble_fraction"]
    prediction.frame                # every action with its start and end

Costs are the exact fractions that were typed, not the nearest floats, and a step is simulated in
ticks so short that every cost is a whole number of them: with F=1 and I=0.5 on three stages per
rank, a tick is a sixth of a second. The results are then as exact as the costs.
"""

from __future__ import annotations

import gc
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.plan.action import COMPUTE_OPS, JOINING_OPS, Action, Op
from engine.plan.check import check
from engine.plan.collective_rules import check_collectives
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy, lower
from engine.plan.period import Step, period_of, spans_in_a_row
from engine.plan.predict import Durations, WalkedStep, predict_replicas
from engine.plan.predict import predict as predict_program
from engine.plan.program import (
    TRAIN,
    Program,
    loop_placement,
    steps_can_overlap,
    two_way_placement,
    v_placement,
)
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    Shape,
    ShapeError,
    UnknownScheduleError,
    build_program,
    find_schedule,
    known_names,
    read_csv,
)
from engine.plan.spans import COLUMNS, Span
from engine.plan.walk import TransferModel
from ppbench.errors import UsageError, nearest
from ppbench.prediction.amounts import (
    FREE_TRANSFERS,
    NS_PER_S,
    Transfers,
    UnitCosts,
    number,
    read_costs,
    read_slices,
    read_transfers,
)
from ppbench.prediction.replicas import Replication, sharding_text

if TYPE_CHECKING:  # it takes as long as a small program's prediction
    import pandas as pd


@dataclass(frozen=True)
class Prediction:
    """A simulated step; its times are in ticks, and a second has `ticks_per_s` of them.

    With replicas it is the step of all of them, whose program has its transfers and collectives.
    """

    simulation: WalkedStep
    costs: UnitCosts
    ticks_per_s: int
    transfers: Transfers
    replication: Replication | None = None
    collective_s: Fraction = Fraction(0)
    """By which collectives make the step of replicas longer that are alike."""
    skew_s: Fraction = Fraction(0)
    """By which the differences of replicas do."""

    def __repr__(self) -> str:
        program, replication = self.program, self.replication
        shape = f"{program.world_size} ranks, {program.num_microbatches} microbatches"
        if replication is not None:
            shape = f"{program.world_size} ranks, {replication.replicas} replicas"
        return (
            f"Prediction({program.schedule}: {shape}; makespan {number(self.makespan_s):g} s, "
            f"bubble {self.simulation.bubble_fraction:.1%})"
        )

    @property
    def program(self) -> Program:
        return self.simulation.program

    @property
    def makespan_s(self) -> Fraction:
        return Fraction(self.simulation.makespan_ns, self.ticks_per_s)

    @property
    def peaks(self) -> list[Fraction]:
        """Peak activations of each rank, in microbatches of a rank's share."""
        share = share_of_action(self.program)
        return [peak * share for peak in peak_activations(self.program.compute_only())]

    @cached_property
    def period_s(self) -> Fraction:
        """The time of a step in a running training, in which each rank goes on when it is done."""
        return period_of(self.simulation) / self.ticks_per_s

    @property
    def frame(self) -> pd.DataFrame:
        """A row per action with its rank, start and end, in ns: the columns of measured spans."""
        return self.frame_of(self.simulation.spans())

    @property
    def frame_in_a_row(self) -> pd.DataFrame:
        """The rows of `spans_in_a_row`."""
        return self.frame_of(self.spans_in_a_row())

    def spans_in_a_row(self) -> Iterator[Span]:
        """The spans, in ticks, of steps -1 to 1 of a running training.

        They are those of step 0 alone if no other step overlaps it.
        """
        simulation = self.simulation
        if not steps_can_overlap(self.program):
            return simulation.spans()
        return spans_in_a_row(Step(self.program, simulation.took_ns), simulation.transfers)

    def frame_of(self, spans: Iterable[Span]) -> pd.DataFrame:
        """Spans in ticks as rows in the nearest whole ns."""
        import pandas as pd

        rows = pd.DataFrame(spans, columns=list(COLUMNS))
        each = self.ticks_per_s
        for column in ("start_ns", "end_ns"):
            rows[column] = [(t * NS_PER_S + each // 2) // each for t in rows[column].tolist()]
        return rows

    def figures(self) -> dict[str, object]:
        """The step's figures, those of steps in a row among them; times in seconds.

        They are over the ranks of all replicas.
        """
        compute_s = Fraction(sum(map(sum, self.simulation.compute_ns)), self.ticks_per_s)
        capacity_s = self.simulation.num_ranks * self.period_s
        of_replicas: dict[str, object] = {}
        if self.replication is not None:
            actions = itertools.chain.from_iterable(self.program.actions)
            of_replicas = {
                "exposed_collective": number(self.collective_s),
                "replica_skew": number(self.skew_s),
                "num_collectives": sum(action.op in JOINING_OPS for action in actions),
            }
        return {
            "makespan": number(self.makespan_s),
            "period": number(self.period_s),
            "bubble_of_period": float(1 - compute_s / capacity_s),
            "bubble_fraction": self.simulation.bubble_fraction,
            "bubble_idle_over_ideal": self.simulation.bubble_idle_over_ideal,
            "bubble_max_stage_span": self.simulation.bubble_max_stage_span,
            "peak_activations": [number(peak) for peak in self.peaks],
            "num_actions": self.program.num_computations,
            **of_replicas,
        }

    def shape(self) -> dict[str, object]:
        """The schedule with its numbers of ranks, replicas, microbatches and stages."""
        program, of_replicas = self.program, dict[str, object]()
        if (replication := self.replication) is not None and replication.replicas > 1:
            sharding = sharding_text(replication.policy)
            of_replicas = {"replicas": replication.replicas, "sharding": sharding}
        return {
            "schedule": program.schedule,
            "ranks": program.world_size,
            **of_replicas,
            "microbatches": program.num_microbatches // program.num_slices,
            **({"slices": program.num_slices} if program.slices else {}),
            "stages_per_rank": number(Fraction(program.num_stages, program.world_size)),
            "num_stages": program.num_stages,
            "placement": placement_word(program),
        }

    def as_dict(self, *, has_held: bool = False) -> dict[str, object]:
        """All values, as JSON has them; times in seconds.

        `has_held` adds the activations of each rank over time, which may be thousands of entries.
        Of one pipeline it has the critical path too.
        """
        given = {
            **self.shape(),
            "cost": {
                key: number(cost)
                for key, cost in zip((*"FIW", "FB"), self.costs, strict=True)
                if cost is not None
            },
            "transfer": number(self.transfers.duration_s),
            "message_bytes": self.transfers.message_bytes,
        }
        if (replication := self.replication) is not None:
            return {
                **given,
                "gather": number(replication.gather_s),
                "reduce": number(replication.reduce_s),
                "replica_factors": [number(factor) for factor in replication.factors],
                **self.figures(),
            }
        path = list(map(str, self.critical_path()))
        overlap = {"overlap": self.transfers.overlaps}
        held = {"held_activations": self.held_over_time()} if has_held else {}
        return {**given, **overlap, **self.figures(), "critical_path": path, **held}

    def critical_path(self) -> list[Action]:
        with no_garbage():
            return self.simulation.critical_path()

    def held_over_time(self) -> list[list[tuple[float, float]]]:
        """Activations of each rank over time: (since, in s; number, in the unit of `peaks`)."""
        share = share_of_action(self.program)
        return [
            [
                (number(Fraction(held.time_ns, self.ticks_per_s)), number(held.num * share))
                for held in self.simulation.in_flight(rank)
            ]
            for rank in range(self.program.world_size)
        ]


def predict(
    program: Program,
    costs: UnitCosts,
    transfers: Transfers = FREE_TRANSFERS,
    replication: Replication | None = None,
) -> Prediction:
    """Simulate a legal program. `costs` are in seconds per microbatch, for all stages of a rank.

    A program of replicas that has collectives of its own keeps them. What collectives and slow
    replicas cost follows from further steps: one in which collectives are free and replicas alike,
    at their mean costs, and one in which they are alike only. Raises UsageError where collectives
    break the policy or could hang, and for transfers that block their sender beside replicas.
    """
    share = share_of_action(program)
    stage_costs = [cost * share for cost in costs if cost is not None]
    steps = list[Replication]()
    if replication is not None:
        if not transfers.overlaps:
            raise UsageError("--no-overlap: is not simulated with replicas; leave one of them out")
        alike, nothing = replication.alike, Fraction(0)
        steps = [replace(alike, gather_s=nothing, reduce_s=nothing), alike, replication]
    times = [*stage_costs, transfers.duration_s]
    for one in steps:
        times += [one.gather_s, one.reduce_s, *(f * c for f in one.factors for c in stage_costs)]
    # The time of a slice is a whole number, too, where its share has few digits.
    fineness = 1000 * program.num_slices**2 if program.slices else 1
    ticks_per_s = math.lcm(*(time.denominator for time in times)) * fineness

    def ticks(seconds: Fraction) -> tuple[int, ...]:
        """So long for every stage."""
        return (int(seconds * ticks_per_s),) * program.num_stages

    model = TransferModel(
        latency_ns=int(transfers.duration_s * ticks_per_s),
        message_bytes=transfers.message_bytes,
        overlaps=transfers.overlaps,
    )
    if replication is None:
        durations = durations_of(*map(ticks, stage_costs))
        simulation = predict_program(program, durations, model, has_why=True)
        return Prediction(simulation, costs, ticks_per_s, transfers)
    simulated, ends = list[WalkedStep](), list[Fraction]()
    try:
        if program.has_collectives:
            # As it is written: positions in an error are those of the file.
            check_collectives(program, replication.policy)
        for one in steps:
            each = [
                durations_of(*(ticks(c * factor) for c in stage_costs)) for factor in one.factors
            ]
            moving = {Op.UNSHARD: ticks(one.gather_s), Op.REDUCE_GRAD: ticks(one.reduce_s)}
            simulated.append(predict_replicas(program, each, one.policy, moving, model))
            ends.append(Fraction(simulated[-1].makespan_ns, ticks_per_s))
    except ProgramError as error:
        raise UsageError(str(error)) from None
    added = ends[1] - ends[0], ends[2] - ends[1]
    return Prediction(simulated[-1], costs, ticks_per_s, transfers, replication, *added)


def durations_of(*given: tuple[int, ...]) -> Durations:
    """The durations of F, I, W and perhaps a pair, each by stage."""
    forward_ns, input_ns, weight_ns, *pairs = given
    return Durations(forward_ns, input_ns, weight_ns, pair_ns=pairs[0] if pairs else None)


def share_of_action(program: Program) -> Fraction:
    """The share of one computation in those of its op that a rank has for a whole microbatch."""
    return Fraction(program.world_size, program.placement.depth * program.num_slices)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Pause the cyclic collector while millions of tuples are built: none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


MOST_ACTIONS = 20_000_000
"""Most actions of a program: to generate and simulate them takes up to about 5 GB."""
_OPTIONS = {
    "world_size": "--ranks",
    "num_microbatches": "--microbatches",
    "stages_per_rank": "--stages-per-rank",
    "mode": "--mode",
    "slices.number": "--slices",
}


class ProgramRequest(NamedTuple):
    """A schedule by name or as `csv:PATH`, and its shape; None: left to the schedule or file."""

    schedule: str
    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None
    slices: tuple[float, ...] = ()  # as a program has them


def program_of(
    request: ProgramRequest,
    most_drawn: int | None = None,
    *,
    is_replicated: bool = False,
    mode: str = TRAIN,
) -> Program:
    """The program of a request; `mine.csv` is `csv:mine.csv`, and checked against all rules.

    `is_replicated` keeps the collectives that a file has; `mode` is a sweep's. Raises UsageError,
    also for more computations than can be drawn.
    """
    if request.schedule.endswith(".csv") and not request.schedule.startswith(CSV_PREFIX):
        request = request._replace(schedule=f"{CSV_PREFIX}{request.schedule}")
    try:
        if request.schedule.startswith(CSV_PREFIX):
            p, m = request.ranks, request.microbatches
            if p is None or m is None:  # completed from the file; `build_program` compares the two
                written = read_csv(Path(request.schedule.removeprefix(CSV_PREFIX)))
                p = written.world_size if p is None else p
                m = written.num_microbatches // max(1, len(request.slices)) if m is None else m
            shape = Shape(p, 1, m)
        else:
            # Raises UsageError for a missing or impossible number.
            allowed = find_schedule(request.schedule).stages_per_rank
            v = allowed.default if request.stages_per_rank is None else request.stages_per_rank
            numbers = {"--ranks": request.ranks, "--microbatches": request.microbatches}
            for option, value in {**numbers, "--stages-per-rank": v}.items():
                if value is None:
                    needs = f"{request.schedule} needs it, as in {option} 4"
                    raise UsageError(f"{option}: is missing; {needs}")
                if value < 1:
                    raise UsageError(f"{option}: must be at least 1, got {value}")
            p, m = int(request.ranks or 0), int(request.microbatches or 0)
            shape, what = Shape(p, v, m), ""
            num_each = m * max(1, len(request.slices))
            if (num_actions := 3 * p * v * num_each) > MOST_ACTIONS:
                shares = f"{p:,} ranks x {v:,} stages per rank x {num_each:,} microbatches"
                what = f"{shares} make up to {num_actions:,} actions, too many to plan"
            elif (num_places := p * p * v) > MOST_ACTIONS:
                what = f"{p:,} ranks x {p * v:,} stages = {num_places:,} are too many to plan"
            if what:
                raise UsageError(f"{what}; at most {MOST_ACTIONS:,}; use smaller numbers")
        with no_garbage():
            program = build_program(
                request.schedule,
                shape.world_size,
                shape.num_microbatches,
                request.stages_per_rank,
                is_replicated=is_replicated,
                mode=mode,
                has_pairs=True,
                slices=request.slices,
            )
            if most_drawn is not None and program.num_computations > most_drawn:
                raise UsageError(
                    f"{program.num_computations:,} actions are too many to draw; at most "
                    f"{most_drawn:,}; use fewer ranks, stages or microbatches, or ask for figures "
                    "alone: ppbench simulate"
                )
            if request.schedule.startswith(CSV_PREFIX):
                check(program)
                if program.has_transfers:
                    lower(program)
    except UnknownScheduleError:
        hint = nearest(request.schedule, known_names())
        raise UsageError(f'unknown schedule "{request.schedule}"{hint}') from None
    except ShapeError as error:
        fix = ""  # the values that would be accepted
        if error.key in ("mode", "slices.number"):
            pass
        elif request.schedule.startswith(CSV_PREFIX):
            fix = "; leave it out"
        elif error.key == "stages_per_rank":
            allowed = find_schedule(request.schedule).stages_per_rank
            fix = f"; leave it out for {allowed.default}"
        else:
            constraints = find_schedule(request.schedule).constraints_in(mode)
            p, m = request.ranks, request.microbatches
            own = [one.is_met for one in constraints if one.key == error.key]
            if own and p is not None and m is not None:
                given, shape = {"world_size": p, "num_microbatches": m}[error.key], Shape(p, 1, m)
                values = range(1, m + 2 * p + 1)
                near = ((n, shape._replace(**{error.key: n})) for n in values)
                fitting = [n for n, one in near if all(is_met(one) for is_met in own)]
                below = [n for n in fitting if n < given][-1:]
                above = [n for n in fitting if n > given][:1]
                fix = f"; expected for example {' or '.join(map(str, below + above))}"
        raise UsageError(f"{_OPTIONS[error.key]}: {error}{fix}") from None
    except (ValueError, OSError) as error:
        raise _unusable(request.schedule, error) from None
    return program


def simulate(
    schedule: str,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    *,
    cost: str = "F=1,I=1,W=1",
    latency: float | str = 0,
    bandwidth: float | str | None = None,
    message_bytes: int = 0,
    overlap: bool = True,
    mode: str = TRAIN,
    slices: str | None = None,
) -> Prediction:
    """Predict a step of a schedule, named as in a sweep file or `csv:PATH`.

    `cost` is seconds per microbatch and rank, `latency` seconds of every message, `bandwidth` bytes
    per second, by default infinite. `mode` is "train" or "evaluate". `slices` are how many a
    microbatch comes in, with attention's share of its time, as in "4,attention=0.3". Raises
    UsageError.
    """
    rate = None if bandwidth is None else str(bandwidth)
    transfers = read_transfers(str(latency), rate, message_bytes, overlaps=overlap)
    request = ProgramRequest(schedule, ranks, microbatches, stages_per_rank, read_slices(slices))
    return predict(program_of(request, mode=mode), read_costs(cost), transfers)


def with_transfers(
    program: Program, policy: Policy = Policy.EARLY, look_ahead: int = DEFAULT_LOOK_AHEAD
) -> Program:
    """The program with its own transfers, or with those of a policy.

    Raises UsageError for a program that would hang.
    """
    try:
        return lower(program, policy, look_ahead)
    except ProgramError as error:
        raise UsageError(str(error)) from None


def _unusable(name: str, error: ValueError | OSError) -> UsageError:
    """The error for a file that cannot be read, or a program that breaks a rule."""
    path = Path(name.removeprefix(CSV_PREFIX))
    is_file = path.suffix == ".csv" or name.startswith(CSV_PREFIX)
    if is_file and not path.exists():
        where = "" if path.is_absolute() else f" in the working directory, {Path.cwd()}"
        return UsageError(
            f"{path}: no such file{where}; expected a program as CSV, which this writes: "
            f"ppbench schedules export 1f1b -p 4 -m 8 -o {shlex.quote(str(path))}"
        )
    if isinstance(error, OSError):
        return UsageError(f"{path}: cannot be read: {error.strerror or error}")
    return UsageError(str(error))


def program_of_file(
    path: Path, max_held: int | None = None, slices: tuple[float, ...] = ()
) -> Program:
    """The program of a CSV file, of microbatches in these `slices`, checked against all rules.

    Raises UsageError, which marks an action that breaks a rule at its place in the file.
    """
    try:
        program = replace(read_csv(path, slices).without_collectives(), schedule=str(path))
        with no_garbage():
            check(program, max_held)
    except ProgramError as error:
        row = program.actions[error.rank]  # the rules count positions without transfers
        positions = [n for n, action in enumerate(row) if action.op in COMPUTE_OPS] + [len(row)]
        placed = ProgramError(program, error.rank, positions[error.position], error.reason)
        raise UsageError(str(placed)) from None
    except ShapeError as error:
        raise UsageError(f"{_OPTIONS[error.key]}: {error}") from None
    except (ValueError, OSError) as error:
        raise _unusable(str(path), error) from None
    return program


def placement_word(program: Program) -> str:
    """The placement of the stages on ranks: `loop`, `v`, `two ways`, or `own` for any other."""
    p, num_stages = program.world_size, program.num_stages
    words = ("loop", loop_placement), ("v", v_placement), ("two ways", two_way_placement)
    for word, place in words:
        if num_stages % p == 0 and program.placement == place(p, num_stages // p):
            return word
    return "own"
