"""Replicas of a pipeline as a command line has them, and the collectives of a program file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from engine.plan.action import COLLECTIVE_OPS
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
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, read_csv
from ppbench.errors import UsageError, nearest
from ppbench.prediction.amounts import NS_PER_S, read_amounts, read_quantity

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

    @property
    def alike(self) -> Replication:
        """The same with replicas that all take the mean."""
        mean = sum(self.factors, Fraction(0)) / len(self.factors)
        return dataclasses.replace(self, factors=(mean,) * len(self.factors))


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


def may_be_two_way(schedule: str) -> bool:
    """Whether a schedule puts stages on two ranks; a file's may."""
    known = SCHEDULES.get(schedule)
    return schedule.endswith(".csv") or (known is not None and known.is_two_way)


def read_replication(
    replicas: int,
    sharding: str | None,
    collectives: str | None,
    factors: str | None,
    *,
    is_two_way: bool = False,
) -> Replication | None:
    """The replicas of a command line; None where there is one. Raises UsageError.

    One whose stages are on two ranks, if `is_two_way`, has collectives too: their REDUCE_GRADs.
    """
    given = {"--sharding": sharding, "--collectives": collectives, "--replica-factors": factors}
    if not 1 <= replicas <= MOST_REPLICAS:
        raise UsageError(f"--replicas: {replicas} is not from 1 to {MOST_REPLICAS:,}")
    if replicas == 1:
        for option, text in given.items():
            if text is not None and not (is_two_way and option == "--collectives"):
                raise UsageError(f"{option}: is for several replicas; add --replicas N")
        if collectives is None:
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
        num_ends = 2 if replicas == 1 else replicas
        ring = int(times["bytes"]), num_ends, float(times["bandwidth"]), latency_ns
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
