"""What all runtimes share that train with the engine's trainer: facts, modules, memory."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping

from engine.configuration import model_of
from engine.flight import Flight
from engine.model.answers import FlopFacts
from engine.model.flops import flop_facts
from engine.model.stage_module import StageModule
from engine.plan.program import Program
from engine.plan.simulate import peak_activations
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.run.watch import SPANS, Watch
from engine.trainer import Build, StepResult, Trainer, TrainerConfig
from ppbench.analysis.mfu import Peak
from ppbench.run.runtimes.peak import peak_of
from ppbench.run.runtimes.runtime import facts_of_split


class TrainedRuntime:
    """One rank's side of a case: a trainer with whatever runs its microbatches."""

    def __init__(
        self, config: TrainerConfig, fabric: Fabric, flight: Flight, build: Build | None = None
    ) -> None:
        """`config` is what `connect` returned; for `build` see `engine.trainer.Trainer`."""
        self._transport = fabric.transport if config.world_size > 1 else "none"
        self._trainer = Trainer(config, fabric, flight, build)

    @property
    def lowered(self) -> Program:
        return self._trainer.runner.lowered

    def step(self, step: int, watch: Watch = SPANS) -> StepResult:
        return self._trainer.step(step, watch)

    def find_not_finite(self, *, has_weights: bool = False) -> str | None:
        """What of this rank was not finite in the last step; see `Trainer.find_not_finite`."""
        return self._trainer.find_not_finite(has_weights=has_weights)

    def measure_memory(self, step: int) -> MemoryUse:
        return self._trainer.measure_memory(step)

    def peak(self) -> tuple[str, Peak]:
        device, config = self._trainer.device, self._trainer.config
        name = f"{platform.node()} {device}"
        if device.type == "cpu":  # its ranks share the cores, each having some of them
            name = f"{name} rank {self._trainer.rank}"
        dtype = "bfloat16" if config.autocast == "bfloat16" else config.model.dtype
        return name, peak_of(device, dtype, config.world_size)

    def flop_facts(self) -> FlopFacts:
        return flop_facts(model_of(self._trainer.config, self._trainer.device))

    def close(self) -> None:
        self._trainer.close()

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """This rank's stages by number."""
        return self._trainer.modules

    @property
    def peak_held(self) -> int:
        return self._trainer.peak_held

    def run_facts(self) -> dict[str, object]:
        """Columns of `runs` that are the same on every rank."""
        trainer = self._trainer
        split = facts_of_split(trainer.config, trainer.program, trainer.device)
        return {**split, "transport": self._transport}

    def rank_facts(self) -> dict[str, object]:
        """Columns of `ranks` that are known without running."""
        trainer = self._trainer
        return {
            "device": str(trainer.device),
            "stages": json.dumps(sorted(trainer.modules)),
            "num_layers": sum(len(module.layers) for module in trainer.modules.values()),
            "num_parameters": sum(p.numel() for p in trainer.parameters().values()),
            "planned_peak_held_microbatches": peak_activations(trainer.program)[trainer.rank],
        }
