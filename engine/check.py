"""Does every architecture train exactly? Tries each that has a plan, in two stages.

A tiny configuration of each takes steps of interleaved 1F1B in this process, and transformers' own
unsplit model takes the same (`exactness`).
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from engine.configuration import TrainerConfig
from engine.exactness import InexactError, compare
from engine.model.data import DataSpec
from engine.model.descriptions import Check
from engine.model.probe import EXACT, Tiny, tiny_of
from engine.model.spec import ModelSpec
from engine.model.stage_module import ModelError
from engine.run.clock import HostClock
from engine.run.device import CPU
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree

DATA = DataSpec("synthetic", seq_len=24, microbatch_size=2, num_microbatches=4)


def architectures() -> list[str]:
    """The model types of causal LMs that declare a plan."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)
    )


def check_architectures(names: Sequence[str]) -> Iterator[Check]:
    """Check one after the other; an exception in one is its result."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    for name in names:
        started = time.monotonic()
        try:
            check = _compare(name, tiny_of(CONFIG_MAPPING[name]()), fabric)
        except ModelError as error:
            check = Check(name, "refused", reason=str(error))
        except InexactError as error:
            check = Check(name, "wrong", reason=str(error))
        except Exception as error:
            check = Check(name, "error", reason=f"{type(error).__name__}: {error}"[:500])
        yield replace(check, seconds=round(time.monotonic() - started, 2))


def _compare(name: str, tiny: Tiny, fabric: Fabric) -> Check:
    with tempfile.TemporaryDirectory() as folder:
        tiny.config.save_pretrained(folder)
        spec = ModelSpec(folder, tiny.kind)
        config = TrainerConfig(
            spec, DATA, world_size=1, schedule="interleaved_1f1b", stages_per_rank=2
        )
        trainer = Trainer(agree(config, fabric), fabric)
        try:
            exactness = compare(trainer, config, CPU)
        finally:
            trainer.close()
    is_exact = exactness.difference <= EXACT[tiny.kind]
    size = sum(parameter.numel() for parameter in trainer.parameters().values())
    return Check(name, "exact" if is_exact else "wrong", tiny.kind, exactness.difference, size)
