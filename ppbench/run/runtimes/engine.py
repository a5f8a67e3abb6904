"""Runs a case on our own engine."""

from __future__ import annotations

from engine.connection import Agreement
from engine.flight import NO_FLIGHT, Flight
from engine.run.p2p.fabric import Fabric
from ppbench.config.case import Case
from ppbench.run.runtimes.trained import TrainedRuntime


class EngineRuntime(TrainedRuntime):
    """The trainer with its own executor."""

    def __init__(
        self,
        case: Case,  # noqa: ARG002  # all of it is in the agreement
        agreement: Agreement,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
    ) -> None:
        super().__init__(agreement.config, fabric, flight)
