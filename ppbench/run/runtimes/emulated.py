"""The engine's pipeline with stages that only take time."""

from __future__ import annotations

from itertools import chain

from engine.connection import Agreement
from engine.emulated import EmulatedStages
from engine.flight import NO_FLIGHT, Flight
from engine.plan.predict import took_by
from engine.run.emulation import Emulation
from engine.run.p2p.fabric import DelayError, Fabric
from ppbench.config.case import Case
from ppbench.config.programs import collective_ns_of, durations_of, link_ns_of
from ppbench.run.runtimes.runtime import RefusalError
from ppbench.run.runtimes.trained import EngineRuntime


class EmulatedRuntime(EngineRuntime):
    """The case's emulated pipeline; every process of the case makes one. Nothing is computed."""

    def __init__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight = NO_FLIGHT
    ) -> None:
        durations, program = durations_of(case), agreement.lowered.compute_only()
        emulation = Emulation(
            durations,
            case.emulated_jitter,
            case.emulated_seed,
            link_ns_of(case),
            *collective_ns_of(case),
            case.emulated_replica_factors,
            dict(zip(chain(*program.actions), took_by(program, durations), strict=True)),
        )
        stages = EmulatedStages(agreement, emulation)
        try:
            super().__init__(case, agreement, fabric, flight, stages=stages)
        except DelayError as error:
            raise RefusalError(str(error)) from error
