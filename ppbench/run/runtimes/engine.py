"""Runs a case on our own engine: one rank's side of it."""

from __future__ import annotations

import json
import platform

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.configuration import model_of
from engine.flight import NO_FLIGHT, Flight
from engine.model.answers import FlopFacts
from engine.model.data import IGNORED, DataSpec
from engine.model.flops import flop_facts
from engine.model.spec import ModelSpec
from engine.model.stage_module import StageModule
from engine.plan.lower import Policy
from engine.plan.schedules.registry import CSV_PREFIX
from engine.plan.simulate import peak_activations
from engine.run.memory import MemoryUse
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p import Fabric
from engine.run.watch import SPANS, Watch
from engine.trainer import StepResult, Trainer, TrainerConfig
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case
from ppbench.run.runtimes.peak import peak_of
from ppbench.run.runtimes.runtime import facts_of_split

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
"""How far a verified gradient may be from the unsplit model's, relative to its largest element."""


class VerificationError(RuntimeError):
    """Loss or gradients differ from those of the unsplit model."""


class EngineRuntime:
    """Builds the case's trainer; every rank below the case's world size makes one."""

    def __init__(self, config: TrainerConfig, fabric: Fabric, flight: Flight = NO_FLIGHT) -> None:
        """`config` is what `connect` returned."""
        self._transport = fabric.transport if config.world_size > 1 else "none"
        self._trainer = Trainer(config, fabric, flight)

    def step(self, step: int, watch: Watch = SPANS) -> StepResult:
        return self._trainer.step(step, watch)

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

    def verify(self) -> None:
        """Compare the first step's loss and gradients with the unsplit model's.

        Holds the whole model on this rank while it runs. Raises VerificationError.
        """
        trainer = self._trainer
        loss = trainer.compute_gradients(0)
        expected_loss, whole = self._unsplit_step()
        spec = trainer.config.model
        kind = "bfloat16" if trainer.config.autocast == "bfloat16" else spec.dtype
        tolerance = TOLERANCE[kind]
        if loss is not None and abs(loss - expected_loss) > tolerance * abs(expected_loss):
            raise VerificationError(f"loss is {loss!r}, of the unsplit model {expected_loss!r}")
        unsplit = {name: w.name for w in trainer.shared_weights for _, name in w.owners}
        theirs = whole.own_parameters()
        for name, parameter in trainer.parameters().items():
            expected = theirs[unsplit.get(name, name)].grad
            difference = _relative_difference(parameter.grad, expected)
            if not difference <= tolerance:
                raise VerificationError(
                    f"gradient of {name} is {difference:.1e} away from the unsplit model's; "
                    f"at most {tolerance:.0e} is rounding in {kind}"
                )

    def _unsplit_step(self) -> tuple[float, StageModule]:
        """In one stage, without schedule, messages, autocast or recomputation."""
        trainer = self._trainer
        model = model_of(trainer.config, trainer.device)
        whole = model.build_stage([range(model.num_layers)], 0, trainer.device)
        batch, total = trainer.batch(0), 0.0
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            (logits,) = whole(inputs)
            if logits.dtype == torch.bfloat16:
                logits = logits.float()
            loss = cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
            )
            torch.autograd.backward(loss / batch.num_tokens)
            total += loss.item() / batch.num_tokens
        return total, whole


def _relative_difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    scale = theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
    return float((ours - theirs).abs().max() / scale)


def trainer_config(case: Case) -> TrainerConfig:
    """The engine's configuration for a case."""
    return TrainerConfig(
        model=ModelSpec(
            case.model_preset,
            case.model_dtype,
            case.model_partition,
            case.model_seed,
            weights=case.model_weights,
            trust_remote_code=case.model_trust_remote_code,
            split=case.model_split,
            split_points=case.model_split_points,
        ),
        data=_data_spec(case),
        schedule=case.schedule,
        world_size=case.world_size,
        stages_per_rank=None if case.schedule.startswith(CSV_PREFIX) else case.stages_per_rank,
        policy=Policy(case.transfer_policy),
        look_ahead=case.transfer_look_ahead,
        optimizer=OptimizerSpec(
            case.train_optimizer,
            case.train_learning_rate,
            case.train_weight_decay,
            case.train_momentum,
            case.train_lr_schedule,
            case.train_lr_warmup_steps,
            case.train_lr_decay_steps,
            case.train_clip_norm,
        ),
        autocast=case.train_autocast,
        recompute=case.train_recompute,
        compile=case.train_compile,
    )


def _data_spec(case: Case) -> DataSpec:
    return DataSpec(
        source=case.data_source,
        seq_len=case.seq_len,
        microbatch_size=case.train_microbatch_size,
        num_microbatches=case.num_microbatches,
        seed=case.data_seed,
        tokenizer=case.data_tokenizer,
        text_column=case.data_text_column,
        max_seq_len=case.data_max_seq_len,
        shuffle=case.data_shuffle,
        num_workers=case.data_num_workers,
    )
