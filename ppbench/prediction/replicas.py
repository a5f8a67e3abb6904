"""Predicts a step of several replicas of a pipeline, joined at their collectives.

What collectives and slow replicas cost follows from further steps: one in which collectives are
free and replicas alike, at their mean costs, and one in which they are alike only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from engine.plan.action import COLLECTIVE_OPS, JOINING_OPS, Op
from engine.plan.collective_rules import check_collectives
from engine.plan.collectives import (
    POLICIES,
    CollectivePolicy,
    NoCollectives,
    add_collectives,
    leaves_whole_sums,
    ring_ns,
    with_collectives,
)
from engine.plan.predict import Durations, TimedStep, TransferModel, predict_replicas
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.schedules.formulae import Times
from engine.plan.schedules.registry import read_csv
from ppbench.errors import UsageError, nearest
from ppbench.prediction import (
    FREE_TRANSFERS,
    NS_PER_S,
    PredictedStep,
    Transfers,
    number,
    read_amounts,
    read_quantity,
    share_of_stage,
)

MOST_REPLICAS = 1024
_TIMES = {"gather": "seconds", "reduce": "seconds"}
_OF_LINK = {"bytes": "bytes", "bandwidth": "bytes per second", "latency": "seconds"}
"""These keys describe collectives, in these units."""


@dataclass(frozen=True)
class Replication:
    """Replicas of a pipeline: what they share, what their collectives take, how slow each is."""

    policy: CollectivePolicy
    factors: tuple[Fraction, ...]  # of the computations of each replica
    gather_s: Fraction = Fraction(0)  # that an UNSHARD of a stage moves bytes
    reduce_s: Fraction = Fraction(0)  # and a REDUCE_GRAD

    @property
    def replicas(self) -> int:
        return len(self.factors)


@dataclass(frozen=True)
class JoinedPrediction(PredictedStep):
    """A simulated step of all replicas; its program has its transfers and collectives."""

    simulation: TimedStep
    replication: Replication
    collective_s: Fraction  # by which collectives make the step longer, of replicas alike
    skew_s: Fraction  # by which their differences do

    def __repr__(self) -> str:
        return (
            f"JoinedPrediction({self.program.schedule}, {self.replication.replicas} replicas: "
            f"makespan {number(self.makespan_s):g} s, bubble {self.simulation.bubble_fraction:.1%})"
        )

    def figures(self) -> dict[str, object]:
        """The step's figures, over the ranks of all replicas; times in seconds."""
        return {
            **super().figures(),
            "exposed_collective": number(self.collective_s),
            "replica_skew": number(self.skew_s),
            "num_collectives": sum(
                a.op in JOINING_OPS for row in self.program.actions for a in row
            ),
        }

    def shape(self) -> dict[str, object]:
        """The schedule with its numbers of ranks, replicas, microbatches and stages."""
        return {
            "schedule": self.program.schedule,
            "ranks": self.program.world_size,
            "replicas": self.replication.replicas,
            "sharding": sharding_text(self.replication.policy),
            **super().shape(),
        }

    def as_dict(self) -> dict[str, object]:
        """All values, as JSON has them; times in seconds."""
        return {
            **self.given(),
            "gather": number(self.replication.gather_s),
            "reduce": number(self.replication.reduce_s),
            "replica_factors": [number(factor) for factor in self.replication.factors],
            **self.figures(),
        }


def predict_joined(
    program: Program, costs: Times, replication: Replication, transfers: Transfers = FREE_TRANSFERS
) -> JoinedPrediction:
    """Simulate replicas of a legal program; `costs` are those of `predict`.

    A program with collectives of its own keeps them. Raises UsageError where these break the policy
    or could hang, and for transfers that block their sender.
    """
    if not transfers.overlaps:
        raise UsageError("--no-overlap: is not simulated with replicas; leave one of them out")
    share, factors = share_of_stage(program), replication.factors
    mean = sum(factors, Fraction(0)) / len(factors)
    alike = dataclasses.replace(replication, factors=(mean,) * len(factors))
    free = dataclasses.replace(alike, gather_s=Fraction(0), reduce_s=Fraction(0))
    of_stages = [cost * share * f for cost in costs for f in (*factors, mean)]
    others = transfers.duration_s, replication.gather_s, replication.reduce_s
    ticks_per_s = math.lcm(*(time.denominator for time in (*of_stages, *others)))

    def simulated(one: Replication) -> TimedStep:
        def ticks(seconds: Fraction) -> int:
            return int(seconds * ticks_per_s)

        every = program.num_stages
        durations = [
            Durations(*((ticks(cost * share * factor),) * every for cost in costs))
            for factor in one.factors
        ]
        collectives = {
            Op.UNSHARD: (ticks(one.gather_s),) * every,
            Op.REDUCE_GRAD: (ticks(one.reduce_s),) * every,
        }
        model = TransferModel(
            latency_ns=ticks(transfers.duration_s), message_bytes=transfers.message_bytes
        )
        return predict_replicas(program, durations, one.policy, collectives, model)

    try:
        if program.has_collectives:
            # As it is written: positions in an error are those of the file.
            check_collectives(program, replication.policy)
        steps = [simulated(one) for one in (free, alike, replication)]
    except ProgramError as error:
        raise UsageError(str(error)) from None
    ends = [Fraction(step.makespan_ns, ticks_per_s) for step in steps]
    added = ends[1] - ends[0], ends[2] - ends[1]
    return JoinedPrediction(steps[-1], costs, ticks_per_s, transfers, replication, *added)


def collectives_of_file(path: Path, sharding: str | None) -> int:
    """Count the collectives of a legal program file, which are checked if there is a policy.

    Raises UsageError where they break the policy or could hang, or there are none to check.
    """
    program = dataclasses.replace(read_csv(path), schedule=str(path))
    if sharding is not None:
        policy = read_sharding(sharding)
        if not program.has_collectives:
            raise UsageError(f"--sharding: {path} has no collectives; leave the option out")
        try:
            check_collectives(program, policy)
        except ProgramError as error:
            raise UsageError(str(error)) from None
    return sum(action.op in COLLECTIVE_OPS for row in program.actions for action in row)


def with_sharding(program: Program, written: Program, sharding: str | None) -> Program:
    """A program with the collectives of a policy, else with those that were written.

    Raises UsageError for a policy that there is not.
    """
    if sharding is not None:
        return add_collectives(program, read_sharding(sharding))
    return with_collectives(program, written, NoCollectives())


def read_replication(
    replicas: int,
    sharding: str | None,
    collectives: str | None,
    factors: str | None,
) -> Replication | None:
    """The replicas of a command line; None where there is one. Raises UsageError."""
    given = {"--sharding": sharding, "--collectives": collectives, "--replica-factors": factors}
    if not 1 <= replicas <= MOST_REPLICAS:
        raise UsageError(f"--replicas: {replicas} is not from 1 to {MOST_REPLICAS:,}")
    if replicas == 1:
        for option, text in given.items():
            if text is not None:
                raise UsageError(f"{option}: is for several replicas; add --replicas N")
        return None
    policy, each = read_sharding(sharding or "ddp"), (Fraction(1),) * replicas
    if factors is not None:
        parts = factors.split(",")
        if len(parts) != replicas:
            raise UsageError(
                f"--replica-factors: {len(parts)} for {replicas} replicas; expected one for each, "
                "such as 1,1.2"
            )
        each = tuple(read_quantity("--replica-factors", part, "times as long") for part in parts)
        if not all(each):
            raise UsageError("--replica-factors: one is 0; expected more than 0")
    times = read_amounts(
        "--collectives",
        collectives or "gather=0,reduce=0",
        {**_TIMES, **_OF_LINK},
        "the seconds of a stage's UNSHARD and REDUCE_GRAD, such as gather=0.5,reduce=1, or its "
        "bytes and the link: bytes=N, bandwidth=B and latency=S",
    )
    if _OF_LINK.keys() & times.keys():
        if _TIMES.keys() & times.keys():
            raise UsageError("--collectives: gives both times and a link; expected one of them")
        if not (times.get("bytes") and times.get("bandwidth")):
            raise UsageError(
                "--collectives: of a link, bytes=N and bandwidth=B are needed, both more than 0"
            )
        latency_ns = round(times.get("latency", Fraction(0)) * NS_PER_S)
        ring = int(times["bytes"]), replicas, float(times["bandwidth"]), latency_ns
        sums = {"gather": False, "reduce": leaves_whole_sums(policy)}
        times = {
            key: Fraction(ring_ns(*ring, is_summed_whole=is_whole), NS_PER_S)
            for key, is_whole in sums.items()
        }
    nothing = Fraction(0)
    return Replication(policy, each, times.get("gather", nothing), times.get("reduce", nothing))


def read_sharding(text: str) -> CollectivePolicy:
    """Parse `zero3` or `zero3,residency=2,look_ahead=1`. Raises UsageError."""
    name, *settings = (part.strip() for part in text.split(","))
    if name not in POLICIES:
        raise UsageError(f'--sharding: unknown policy "{name}"{nearest(name, POLICIES)}')
    fields = {field.name: field.type for field in dataclasses.fields(POLICIES[name])}
    given: dict[str, int | bool] = {}
    for setting in settings:
        key, _, value = (word.strip() for word in setting.partition("="))
        if key not in fields:
            has = ", ".join(fields) or "none"
            raise UsageError(f'--sharding: {name} has no setting "{key}"; its settings: {has}')
        is_flag = fields[key] == "bool"
        if not (value in ("true", "false") if is_flag else value.isdecimal()):
            expected = "true or false" if is_flag else "a whole number"
            raise UsageError(f'--sharding: {key}: "{value}" is not {expected}')
        given[key] = value == "true" if is_flag else int(value)
    make: Callable[..., CollectivePolicy] = POLICIES[name]
    try:
        return make(**given)
    except ValueError as error:
        raise UsageError(f"--sharding: {error}") from None


def sharding_text(policy: CollectivePolicy) -> str:
    """The policy as `read_sharding` reads it."""
    name = next(name for name, kind in POLICIES.items() if kind is type(policy))
    settings = dataclasses.asdict(policy).items()
    return ",".join([name, *(f"{key}={str(value).lower()}" for key, value in settings)])
