"""The engine's pipeline with stages that only take time."""

from __future__ import annotations

import json
from collections.abc import Mapping

from engine.connection import Agreement
from engine.emulated import EmulatedTrainer
from engine.flight import NO_FLIGHT, Flight
from engine.model.descriptions import FlopFacts
from engine.model.stage_module import StageModule
from engine.plan.program import Program
from engine.plan.rules import peak_activations
from engine.run.emulation import Emulation
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import StepResult
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case
from ppbench.config.programs import collective_ns_of, durations_of, link_ns_of
from ppbench.run.runtimes.runtime import facts_of_run


class EmulatedRuntime:
    """The case's emulated pipeline; every process of the case makes one."""

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
        self._trainer = EmulatedTrainer(agreement, emulation, fabric, flight)

    @property
    def lowered(self) -> Program:
        return self._trainer.program

    @property
    def peak_held(self) -> int:
        return self._trainer.peak_held

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """Empty: nothing is computed."""
        return {}

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        return self._trainer.step(step, recording)

    def steps(self, numbers: range) -> list[StepResult]:
        return [self.step(number) for number in numbers]

    def measure_memory(self, step: int) -> MemoryUse | None:  # noqa: ARG002  # as a runtime does
        """Return None: emulated stages hold nothing."""
        return None

    def peak(self) -> tuple[str, Peak] | None:
        return None

    def flop_facts(self) -> FlopFacts | None:
        return None

    def close(self) -> None:
        self._trainer.close()

    def run_facts(self) -> dict[str, object]:
        trainer = self._trainer
        return facts_of_run(trainer.config, trainer.program, self._device, trainer.transport)

    def rank_facts(self) -> dict[str, object]:
        trainer = self._trainer
        return {
            "device": "emulated",
            "stages": json.dumps(sorted(trainer.stages)),
            "num_layers": 0,
            "num_parameters": 0,
            "planned_peak_held_microbatches": peak_activations(trainer.program)[trainer.rank],
        }
