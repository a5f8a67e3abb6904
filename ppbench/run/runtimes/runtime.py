"""What the worker asks of whatever runs a case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from engine.configuration import TrainerConfig, model_of, partition_of, shares_of
from engine.connection import Agreement
from engine.flight import Flight
from engine.model.answers import FlopFacts
from engine.model.stage_module import StageModule
from engine.plan.program import Program
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.run.watch import SPANS, Watch
from engine.trainer import StepResult
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case


class RefusalError(ValueError):
    """The runtime cannot run the case; its run is `invalid`. Says what to change."""


class Runtime(Protocol):
    """One rank's part of a case. All ranks make the same calls with the same numbers."""

    @property
    def lowered(self) -> Program:
        """What all ranks run in a step, with its transfers; asked after the last step."""

    @property
    def peak_held(self) -> int:
        """The most microbatches that this rank has held at once, over its stages."""

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """This rank's stages by number, which hold what it trains; what verification reads."""

    def step(self, step: int, watch: Watch = SPANS) -> StepResult:
        """One step of training; returns when this rank's part of it is over.

        `watch` says what it records: spans, and ranges for a profiler that the caller has started.
        """

    def measure_memory(self, step: int) -> MemoryUse | None:
        """One more step, under memory accounting; None where there is nothing to account for."""

    def peak(self) -> tuple[str, Peak] | None:
        """This rank's device by name, and what it could compute; None where nothing is computed.

        The ranks measure it at the same time, where it is not known.
        """

    def flop_facts(self) -> FlopFacts | None:
        """What a token costs; asked of rank 0. None where nothing is computed."""

    def close(self) -> None:
        """Give back what it holds; it is not used again."""

    def run_facts(self) -> dict[str, object]:
        """Columns of `runs` that are the same on every rank; asked of rank 0."""

    def rank_facts(self) -> dict[str, object]:
        """Columns of `ranks` that are known without running."""


@runtime_checkable
class Inspected(Protocol):
    """A runtime whose gradients and weights can be looked at; of others the loss alone tells."""

    def find_not_finite(self, *, has_weights: bool = False) -> str | None:
        """What of this rank was not finite in the last step, in words; None if all was.

        Asked between steps, on each rank by itself; with `has_weights` after the last one.
        """


class Factory(Protocol):
    """Makes this rank's part of a case; a class is one, by its constructor.

    Every rank below the case's world size calls it. They have been connected: `fabric.group_of` has
    a communicator of theirs. Raises RefusalError for what the runtime cannot run.
    """

    def __call__(
        self, case: Case, agreement: Agreement, fabric: Fabric, flight: Flight, /
    ) -> Runtime:
        """The runtime, built and ready to step."""


def facts_of_split(
    config: TrainerConfig, program: Program, device: torch.device
) -> dict[str, object]:
    """Columns of `runs` that tell how the model is cut and what program its stages run."""
    model = model_of(config, device)
    partition = partition_of(config, model, program.num_stages)
    sizes = model.costs.of_stages(partition)
    shares = [round(share, 6) for share in shares_of(config, model, partition)]
    return {
        "num_parameters": model.num_parameters,
        "num_stages": program.num_stages,
        "layers_per_stage": json.dumps([len(owned) for owned in partition]),
        "parameters_per_stage": json.dumps([int(size) for size in sizes]),
        "stage_shares": json.dumps(shares),
    }
