"""What a program would do in time, exactly.

Costs are taken as the fractions that were written, not as the nearest floats, and a step is
simulated in ticks so short that every cost is a whole number of them: F=1, I=0.5 on three stages
per rank are ticks of a sixth of a second. What comes out is then as exact as what went in.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import pandas as pd

from engine.plan.critical_path import critical_path
from engine.plan.program import Program
from engine.plan.schedules.formulae import Times
from engine.plan.simulate import (
    Durations,
    Simulation,
    TransferModel,
    peak_activations,
    simulate,
)
from engine.plan.spans import COLUMNS
from ppbench.errors import UsageError

NS_PER_S = 10**9
LEAST_COST, MOST_COST = Decimal("1e-15"), Decimal("1e15")
_MOST_DIGITS = 40
UNIT_COSTS = Times(Fraction(1), Fraction(1), Fraction(1))


@dataclass(frozen=True)
class Transfers:
    """How long a message between two ranks takes, and whether the sender computes meanwhile."""

    duration_s: Fraction = Fraction(0)
    message_bytes: int = 0
    overlaps: bool = True


FREE_TRANSFERS = Transfers()


@dataclass(frozen=True)
class Prediction:
    """A simulated step; its times are in ticks, of which a second has `ticks_per_s`."""

    simulation: Simulation
    costs: Times
    ticks_per_s: int

    @property
    def program(self) -> Program:
        return self.simulation.program

    @property
    def makespan_s(self) -> Fraction:
        return Fraction(self.simulation.makespan_ns, self.ticks_per_s)

    @property
    def peaks(self) -> list[Fraction]:
        """By rank, the most activations held at once, in microbatches of a rank's share."""
        share = share_of_stage(self.program)
        return [peak * share for peak in peak_activations(self.program)]

    def figures(self) -> dict[str, object]:
        """The step's figures under the names that the store has for them; times in seconds."""
        return {
            "makespan": number(self.makespan_s),
            "bubble_fraction": self.simulation.bubble_fraction,
            "bubble_idle_over_ideal": self.simulation.bubble_idle_over_ideal,
            "bubble_max_stage_span": self.simulation.bubble_max_stage_span,
            "peak_activations": [number(peak) for peak in self.peaks],
            "num_actions": sum(map(len, self.program.actions)),
        }

    def critical_path(self) -> list[str]:
        with no_garbage():
            return [str(action) for action in critical_path(self.simulation)]

    def held_over_time(self) -> list[list[tuple[float, float]]]:
        """By rank, each change of what it holds: from when on (s), and how much (as `peaks`)."""
        share = share_of_stage(self.program)
        return [
            [
                (number(Fraction(held.time_ns, self.ticks_per_s)), number(held.num_held * share))
                for held in self.simulation.held_over_time(rank)
            ]
            for rank in range(self.program.world_size)
        ]

    def spans(self) -> pd.DataFrame:
        """As measured ones, in nanoseconds."""
        spans = pd.DataFrame(self.simulation.spans(), columns=list(COLUMNS))
        for column in ("start_ns", "end_ns"):
            spans[column] = [ticks * NS_PER_S / self.ticks_per_s for ticks in spans[column]]
        return spans


def predict(program: Program, costs: Times, transfers: Transfers = FREE_TRANSFERS) -> Prediction:
    """Simulate a legal program. `costs` are seconds of a microbatch on a rank: all its stages."""
    share = share_of_stage(program)
    of_stage = [cost * share for cost in costs]
    ticks_per_s = math.lcm(*(cost.denominator for cost in [*of_stage, transfers.duration_s]))
    f, i, w = ((int(cost * ticks_per_s),) * program.num_stages for cost in of_stage)
    model = TransferModel(
        latency_ns=int(transfers.duration_s * ticks_per_s),
        message_bytes=transfers.message_bytes,
        overlaps=transfers.overlaps,
    )
    return Prediction(simulate(program, Durations(f, i, w), model), costs, ticks_per_s)


def share_of_stage(program: Program) -> Fraction:
    """Of what its rank holds."""
    return Fraction(program.world_size, program.num_stages)


def number(value: Fraction) -> float:
    """As a plain number, whole where it is whole."""
    return value.numerator if value.denominator == 1 else float(value)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Not to look for garbage among millions of new tuples, none of which can be any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_costs(text: str) -> Times:
    """`F=1,I=0.5,W=0.5` as seconds. Raises UsageError where it is anything else."""
    given: dict[str, Fraction] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise _bad_cost(f'"{part.strip()}" is no KEY=SECONDS')
        if key not in ("F", "I", "W"):
            raise _bad_cost(f'unknown key "{key}"')
        if key in given:
            raise _bad_cost(f"{key} is given twice")
        given[key] = read_quantity(f"--cost: {key}", value, "seconds")
    for key in ("F", "I", "W"):
        if key not in given:
            raise _bad_cost(f"{key} is missing")
    if not any(given.values()):
        raise _bad_cost("all are 0, so that nothing takes time")
    return Times(given["F"], given["I"], given["W"])


def _bad_cost(problem: str) -> UsageError:
    return UsageError(
        f"--cost: {problem}; expected seconds per microbatch and rank of F, I and W, such as "
        "F=1,I=1,W=1 (a full backward B takes I + W)"
    )


def read_transfers(
    latency: str, bandwidth: str | None, message_bytes: int, *, overlaps: bool
) -> Transfers:
    """The transfer model of a command line. Raises UsageError."""
    duration = read_quantity("--latency", latency, "seconds")
    if message_bytes < 0:
        raise UsageError(f"--message-bytes: {message_bytes} is negative; expected 0 or more")
    if bandwidth is not None:
        if not message_bytes:
            print(
                "warning: --bandwidth has no effect on messages of 0 bytes; add --message-bytes N",
                file=sys.stderr,
            )
        bytes_per_s = read_quantity("--bandwidth", bandwidth, "bytes per second")
        if not bytes_per_s:
            raise UsageError("--bandwidth: 0 bytes per second move nothing; expected more than 0")
        duration += message_bytes / bytes_per_s
    return Transfers(duration, message_bytes, overlaps)


def read_quantity(where: str, text: str, unit: str) -> Fraction:
    """A decimal number of `unit`, exactly; raises UsageError beginning with `where`."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    is_sane = value.is_finite() and len(value.as_tuple().digits) <= _MOST_DIGITS
    if is_sane and (value == 0 or LEAST_COST <= value <= MOST_COST):
        return Fraction(value)
    raise UsageError(
        f'{where}: "{text}" is no number of {unit}; expected 0, or from {LEAST_COST:e} to '
        f"{MOST_COST:e}, such as 0.02"
    )
