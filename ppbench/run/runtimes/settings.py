"""What a case asks of the engine's trainer, and so of every runtime that trains with it."""

from __future__ import annotations

from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.lower import Policy
from engine.plan.schedules.registry import CSV_PREFIX
from engine.run.optimizer import OptimizerSpec
from engine.trainer import TrainerConfig
from ppbench.config.case import Case


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
