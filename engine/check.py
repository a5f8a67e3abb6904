"""Does every architecture train exactly? Tries each that has a plan, in two stages.

A tiny configuration of each is trained for one step of interleaved 1F1B in this process, and its
loss and gradients are compared with transformers' own unsplit model.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from engine.configuration import TrainerConfig
from engine.model.data import DataSpec
from engine.model.descriptions import Check
from engine.model.probe import TOLERANCE, Tiny, largest_difference, tiny_of
from engine.model.spec import ModelSpec
from engine.model.stage_module import ModelError
from engine.run.clock import HostClock
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer

_SEQ_LEN = 24
DATA = DataSpec("synthetic", seq_len=_SEQ_LEN, microbatch_size=2, num_microbatches=4)


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
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    for name in names:
        started = time.monotonic()
        try:
            check = _compare(name, tiny_of(CONFIG_MAPPING[name]()), fabric)
        except ModelError as error:
            check = Check(name, "refused", reason=str(error))
        except Exception as error:
            check = Check(name, "error", reason=f"{type(error).__name__}: {error}"[:500])
        else:
            check = replace(check, seconds=round(time.monotonic() - started, 2))
        yield check


def _compare(name: str, tiny: Tiny, fabric: Fabric) -> Check:
    dtype = str(tiny.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        tiny.config.save_pretrained(folder)
        model = ModelSpec(folder, dtype)
        config = TrainerConfig(
            model, DATA, world_size=1, schedule="interleaved_1f1b", stages_per_rank=2
        )
        trainer = Trainer(config, fabric)
    try:
        loss = trainer.compute_gradients(0)
        state = {n: t.detach() for m in trainer.modules.values() for n, t in m.own_state().items()}
        tied = {name: weight.name for weight in trainer.shared_weights for _, name in weight.owners}
        gradients = {tied.get(name, name): p.grad for name, p in trainer.parameters().items()}
        whole, batch, expected = tiny.unsplit(state), trainer.batch(0), 0.0
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            logits = whole(input_ids=inputs, use_cache=False).logits
            unsplit = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            torch.autograd.backward(unsplit / batch.num_tokens)
            expected += unsplit.item() / batch.num_tokens
    finally:
        trainer.close()
    assert loss is not None  # its last stage is here
    worst, where = largest_difference(gradients, whole)
    of_loss = abs(loss - expected) / abs(expected)
    is_exact = max(worst, of_loss) <= TOLERANCE[tiny.dtype]
    reason = "" if is_exact else f"worst: {where or 'loss'}"
    return Check(
        name,
        "exact" if is_exact else "wrong",
        dtype,
        worst,
        of_loss,
        sum(p.numel() for p in whole.parameters()),
        reason=reason,
    )
