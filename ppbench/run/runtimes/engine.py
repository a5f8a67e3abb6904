"""Runs a case on our own engine: one rank's side of it."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.model.data import DataSpec
from engine.model.partition import partition_layers
from engine.model.presets import PRESETS
from engine.model.split import ModelSpec, StageModule, build_stage
from engine.plan.program import to_json
from engine.plan.simulate import peak_activations
from engine.run.memory import MemoryPeaks
from engine.run.p2p import Fabric
from engine.trainer import StepResult, Trainer, TrainerConfig
from ppbench.config.case import Case

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
"""How far a verified gradient may be from the unsplit model's, relative to its largest element."""


class VerificationError(RuntimeError):
    """Loss or gradients differ from those of the unsplit model."""


class EngineRuntime:
    """Builds the case's trainer; every rank below the case's world size makes one."""

    def __init__(self, case: Case, fabric: Fabric) -> None:
        self._case = case
        self._transport = fabric.transport if case.world_size > 1 else "none"
        self._trainer = Trainer(trainer_config(case), fabric)

    def step(self, step: int) -> StepResult:
        return self._trainer.step(step)

    def measure_memory(self, step: int) -> MemoryPeaks:
        return self._trainer.measure_memory(step)

    def close(self) -> None:
        self._trainer.close()

    @property
    def peak_held(self) -> int:
        return self._trainer.peak_held

    def run_facts(self) -> dict[str, object]:
        """Columns of `runs` that are the same on every rank."""
        program, case = self._trainer.program, self._case
        preset = PRESETS[case.model_preset]
        layers = partition_layers(
            case.model_partition, preset.num_hidden_layers, program.num_stages
        )
        return {
            "num_parameters": preset.num_parameters,
            "num_stages": program.num_stages,
            "layers_per_stage": json.dumps([len(owned) for owned in layers]),
            "transport": self._transport,
            "program": to_json(program),
        }

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

    def verify(self) -> None:
        """Compare the first step's loss and gradients with the unsplit model's.

        Holds the whole model on this rank while it runs. Raises VerificationError.
        """
        loss = self._trainer.compute_gradients(0)
        expected_loss, whole = self._unsplit_step()
        tolerance = TOLERANCE[self._case.model_dtype]
        if loss is not None and abs(loss - expected_loss) > tolerance * abs(expected_loss):
            raise VerificationError(f"loss is {loss!r}, of the unsplit model {expected_loss!r}")
        for name, parameter in self._trainer.parameters().items():
            difference = _relative_difference(parameter.grad, _gradient_of(whole, name))
            if not difference <= tolerance:
                raise VerificationError(
                    f"gradient of {name} is {difference:.1e} away from the unsplit model's; "
                    f"at most {tolerance:.0e} is rounding in {self._case.model_dtype}"
                )

    def _unsplit_step(self) -> tuple[float, StageModule]:
        spec = dataclasses.replace(self._trainer.config.model, partition="uniform")
        whole = build_stage(spec, 0, 1, self._trainer.device)
        batch = self._trainer.batch(0)
        total = 0.0
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            loss = cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
            (loss / len(batch.inputs)).backward()
            total += loss.item() / len(batch.inputs)
        return total, whole


def _gradient_of(whole: StageModule, name: str) -> Tensor | None:
    """The unsplit gradient; a tied head has that of the embeddings."""
    parameters = whole.own_parameters()
    embedding = whole.model.get_input_embeddings().weight
    if name not in parameters:
        name = next(key for key, value in parameters.items() if value is embedding)
    return parameters[name].grad


def _relative_difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return float("inf")
    scale = theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
    return float((ours - theirs).abs().max() / scale)


def trainer_config(case: Case) -> TrainerConfig:
    """The engine's configuration for a case."""
    return TrainerConfig(
        model=ModelSpec(case.model_preset, case.model_dtype, case.model_partition, case.model_seed),
        data=DataSpec(
            source=case.data_source,
            seq_len=case.seq_len,
            microbatch_size=case.train_microbatch_size,
            num_microbatches=case.num_microbatches,
            seed=case.data_seed,
        ),
        schedule=case.schedule,
        world_size=case.world_size,
        optimizer=case.train_optimizer,
        learning_rate=case.train_learning_rate,
    )
