"""The engine's pipeline with stages that only take time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.connection import Agreement
from engine.emulated import EmulatedTrainer
from engine.flight import NO_FLIGHT, Flight
from engine.model.descriptions import FlopFacts
from engine.model.stage_module import StageModule
from engine.plan.program import Program
from engine.run.emulation import Emulation
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.trainer import StepResult
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case
from ppbench.config.programs import collective_ns_of, durations_of, link_ns_of
from ppbench.run.runtimes.runtime import facts_of_rank, facts_of_run


class EmulatedRuntime(EmulatedTrainer):
    """The case's emulated pipeline; every process of the case makes one. Nothing is computed."""

    modules: Mapping[int, StageModule] = MappingProxyType({})

    def __init__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight = NO_FLIGHT
    ) -> None:
        self._device = fabric.device
        emulation = Emulation(
            durations_of(case),
            case.emulated_jitter,
            case.emulated_seed,
            link_ns_of(case),
            *collective_ns_of(case),
            case.emulated_replica_factors,
        )
        super().__init__(agreement, emulation, fabric, flight)

    @property
    def lowered(self) -> Program:
        return self.program

    def steps(self, numbers: range) -> list[StepResult]:
        return [self.step(number) for number in numbers]

    def measure_memory(self, step: int) -> MemoryUse | None:  # noqa: ARG002  # as a runtime does
        return None

    def peak(self) -> tuple[str, Peak] | None:
        return None

    def flop_facts(self) -> FlopFacts | None:
        return None

    def run_facts(self) -> dict[str, object]:
        return facts_of_run(self.agreement, self._device, self.transport)

    def rank_facts(self) -> dict[str, object]:
        return facts_of_rank("emulated", self.program, self.rank)
