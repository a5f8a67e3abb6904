"""Runtimes that train with the engine's trainer, and the parts shared by other executors.

EngineRuntime     the trainer, with its own executor or another one
Stopwatch         marks, spans and the flight record of an executor that is not the engine's
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from typing import TypeVar, TypeVarTuple

import torch
from torch.profiler import record_function

from engine.connection import Agreement
from engine.flight import NO_FLIGHT, Flight, Phase
from engine.model.descriptions import FlopFacts
from engine.model.flops import flop_facts
from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.run import device as devices
from engine.run.clock import Clock
from engine.run.p2p.fabric import Fabric
from engine.run.peak import measured_peak_flops
from engine.run.recording import Recording
from engine.run.timed_step import TimedAction, TimedStep
from engine.trainer import Build, Share, Trainer
from ppbench.analysis.mfu import Peak, datasheet_peak
from ppbench.config.case import Case
from ppbench.run.runtimes.runtime import facts_of_rank, facts_of_run, id_of

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class EngineRuntime(Trainer):
    """One rank's part of a case: the trainer, with its own executor of microbatches or another."""

    def __init__(
        self,
        case: Case,  # noqa: ARG002  # all of it is in the agreement
        agreement: Agreement,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
        build: Build | None = None,
        share: Share | None = None,
    ) -> None:
        super().__init__(agreement, fabric, flight, build, share)

    def peak(self) -> tuple[str, Peak]:
        device, config = self.device, self.config
        if devices.is_accelerator(device):  # which its process may see as the only one
            name = id_of(device)
        else:  # its ranks share the cores, each having some of them
            name = f"{platform.node()} {device} rank {self.rank}"
        dtype = "bfloat16" if config.autocast == "bfloat16" else config.model.dtype
        return name, peak_of(device, dtype, config.num_processes, torch.get_num_threads())

    def flop_facts(self) -> FlopFacts:
        return flop_facts(self.model)

    def run_facts(self) -> dict[str, object]:
        return facts_of_run(self.agreement, self.device, self.fabric.transport)

    def rank_facts(self) -> dict[str, object]:
        num_parameters = sum(p.numel() for p in self.parameters().values())
        return facts_of_rank(
            str(self.device), self.program, self.rank, self.modules.values(), num_parameters
        )


class Stopwatch:
    """Runs a rank's work as actions, each with a span where spans are recorded.

    The flight record notes computations only: when the rank begins to wait for the input of one,
    and when it works on it. The runner itself decides where transfers are issued.
    """

    def __init__(self, trainer: Trainer, flight: Flight) -> None:
        """Follow the computations of this rank's row of the lowered program."""
        row = trainer.agreement.lowered.actions[trainer.rank]
        self.clock, self.recording = trainer.fabric.clock, Recording.spans
        self._rank, self._replica, self._record = trainer.rank, trainer.replica, flight
        self._flight: Flight = NO_FLIGHT
        self._computations = [n for n, action in enumerate(row) if action.op in COMPUTE_OPS]
        self._ahead = iter(self._computations)
        self._timed: list[TimedAction] = []

    def enter(self, phase: Phase) -> None:
        self._record.enter(phase)

    def begin(self, step: int, recording: Recording) -> None:
        """Begin a step. With spans, the caller begins the clock."""
        self.recording = recording
        self._timed = []
        self._flight = self._record if recording.has_flight else NO_FLIGHT
        self._flight.begin_step(step)
        self._ahead = iter(self._computations)
        self.come_to_next()

    def come_to_next(self) -> None:
        """Note that the rank has come to the next computation of its row, or to its end."""
        index = next(self._ahead, None)
        if index is None:
            self._flight.enter(Phase.DRAINS)
        else:
            self._flight.come_to(index)

    def work(self) -> None:
        """Note that the computation to which the rank has come has its input."""
        self._flight.work()

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do an action's work, with a span or a range where they are recorded."""
        self.work()
        start = self.clock.mark() if self.recording.has_spans else 0
        if self.recording.has_ranges:
            with record_function(action.op.value if action.op is Op.OPT else str(action)):
                result = work(*arguments)
        else:
            result = work(*arguments)
        if self.recording.has_spans:
            self._timed.append((action, start, self.clock.mark(), 0))
        if action.op in COMPUTE_OPS:
            self.come_to_next()
        return result

    @contextlib.contextmanager
    def timed_by(self, clock: Clock) -> Iterator[None]:
        """Take the marks from another clock within the context."""
        usual, self.clock = self.clock, clock
        try:
            yield
        finally:
            self.clock = usual

    def end_step(self, step: int) -> TimedStep:
        """Hand over what was timed since the step began. Does not wait for the device."""
        self.enter(Phase.DRAINS)
        timed, self._timed = self._timed, []
        return TimedStep(step, self._rank, self._replica, timed)


@functools.cache
def peak_of(device: torch.device, dtype: str, _num_ranks: int, _num_threads: int) -> Peak:
    """Return the peak speed of products in `dtype`: float32, float64 or bfloat16.

    All ranks of a launch call it at the same time. It is taken from the device's datasheet, or else
    measured once in a launch for each number of ranks and threads.
    """
    if devices.is_accelerator(device):
        known = datasheet_peak(devices.name_of(device), dtype)
        if known is not None:
            return known
    return Peak(measured_peak_flops(device, getattr(torch, dtype)), f"measured matmul {dtype}")
