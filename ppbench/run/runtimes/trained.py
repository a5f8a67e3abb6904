"""Runtimes that train with the engine's trainer, and the parts shared by other executors.

EngineRuntime     the trainer, with its own executor or another one
Stopwatch         marks, spans and the flight record of an executor that is not the engine's
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch

from engine.connection import Agreement
from engine.flight import NO_FLIGHT, Flight, Phase
from engine.model.descriptions import FlopFacts
from engine.model.flops import flop_facts
from engine.plan.action import COMPUTE_OPS, Action
from engine.run import device as devices
from engine.run.p2p.fabric import Fabric
from engine.run.peak import measured_peak_flops
from engine.run.recording import Recording
from engine.run.runner import Arguments, Result, Runner
from engine.trainer import Build, Share, Stages, Trainer
from ppbench.analysis.mfu import Peak, datasheet_peak
from ppbench.config.case import Case
from ppbench.run.runtimes.runtime import facts_of_rank, facts_of_run, id_of


class EngineRuntime(Trainer):
    """One rank's part of a case: the trainer, with its own runner of microbatches or another."""

    def __init__(
        self,
        case: Case,  # noqa: ARG002  # all of it is in the agreement
        agreement: Agreement,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
        build: Build | None = None,
        share: Share | None = None,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(agreement, fabric, flight, build, share, stages)

    def peak(self) -> tuple[str, Peak] | None:
        if not self.modules:
            return None
        device, config = self.device, self.config
        if devices.is_accelerator(device):  # which its process may see as the only one
            name = id_of(device)
        else:  # its ranks share the cores, each having some of them
            name = f"{platform.node()} {device} rank {self.rank}"
        dtype = "bfloat16" if config.autocast == "bfloat16" else config.model.dtype
        return name, peak_of(device, dtype, config.num_processes, torch.get_num_threads())

    def flop_facts(self) -> FlopFacts | None:
        return flop_facts(self.model) if self.modules else None

    def run_facts(self) -> dict[str, object]:
        return facts_of_run(self.agreement, self.device, self.fabric.transport)

    def rank_facts(self) -> dict[str, object]:
        num_parameters = sum(p.numel() for p in self.parameters().values())
        device, modules = str(self.device) if self.modules else "emulated", self.modules.values()
        return facts_of_rank(device, self.program, self.rank, modules, num_parameters)


class Stopwatch(Runner):
    """Times and notes the computations of a runner that is not the engine's.

    The flight record notes computations only: when the rank begins to wait for the input of one,
    and when it works on it. The runner itself decides where transfers are issued.
    """

    def __init__(self, trainer: Trainer, flight: Flight) -> None:
        """Follow the computations of this rank's row of the lowered program."""
        super().__init__(trainer.rank, trainer.replica, trainer.fabric.clock, flight)
        row = trainer.agreement.lowered.actions[trainer.rank]
        self._computations = [n for n, action in enumerate(row) if action.op in COMPUTE_OPS]
        self._ahead = iter(self._computations)

    def begin(self, step: int, recording: Recording) -> None:
        super().begin(step, recording)
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
        result = super().perform(action, work, *arguments)
        if action.op in COMPUTE_OPS:
            self.come_to_next()
        return result


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
