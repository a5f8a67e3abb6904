"""Does every architecture train exactly? Tries each that has a plan, in a real two-rank pipeline.

    torchrun --nproc-per-node 2 -m engine.check OUTFILE [ARCHITECTURE ...]

A tiny configuration of each is trained for one step of 1F1B and its loss and gradients compared
with transformers' own unsplit model. Rank 0 appends JSON lines to OUTFILE: first `planned` for each
architecture, then `started` and the result of one after the other, so that a launch that dies tells
how far it came.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
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
from engine.trainer import Trainer, connect

NUM_RANKS = 2
_SEQ_LEN = 24
DATA = DataSpec("synthetic", seq_len=_SEQ_LEN, microbatch_size=2, num_microbatches=4)
PATIENCE = timedelta(minutes=5)


def architectures() -> list[str]:
    """The model types of causal LMs that declare a plan."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)
    )


def check_architecture(name: str, fabric: Fabric) -> Check:
    """Collective; the result on rank 0 counts."""
    started = time.monotonic()
    try:
        result = _compare(name, tiny_of(CONFIG_MAPPING[name]()), fabric)
    except ModelError as error:  # on both ranks alike: nothing has begun
        return Check(name, "refused", reason=str(error))
    seconds = round(time.monotonic() - started, 2)
    return Check(**{**asdict(result), "seconds": seconds})


def _compare(name: str, tiny: Tiny, fabric: Fabric) -> Check:
    dtype = str(tiny.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        tiny.config.save_pretrained(folder)
        model = ModelSpec(folder, dtype)
        config = connect(TrainerConfig(model, DATA, world_size=NUM_RANKS), fabric)
        trainer = Trainer(config, fabric)
    try:
        loss = trainer.compute_gradients(0)
        state, gradients = _gathered(trainer)
        expected, whole = _unsplit(trainer, tiny, state)
    finally:
        trainer.close()
    losses: list[float | None] = trainer.gather(loss)
    ours = next(loss for loss in losses if loss is not None)
    worst, where = largest_difference(gradients, whole)
    of_loss = abs(ours - expected) / abs(expected)
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


def _gathered(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Every rank's state and gradients, by name in the unsplit model."""
    own_state = {n: t.detach() for m in trainer.modules.values() for n, t in m.own_state().items()}
    own = {name: p.grad for name, p in trainer.parameters().items()}
    tied = {name: weight.name for weight in trainer.shared_weights for _, name in weight.owners}
    state: dict[str, Tensor] = {}
    gradients: dict[str, Tensor | None] = {}
    for theirs, of_them in trainer.gather((own_state, own)):
        state |= theirs
        gradients |= {tied.get(name, name): gradient for name, gradient in of_them.items()}
    return state, gradients


def _unsplit(
    trainer: Trainer, tiny: Tiny, state: dict[str, Tensor]
) -> tuple[float, PreTrainedModel]:
    """Loss and gradients of transformers' own model on the same batch."""
    whole, batch, total = tiny.unsplit(state), trainer.batch(0), 0.0
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        logits = whole(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.autograd.backward(loss / batch.num_tokens)
        total += loss.item() / batch.num_tokens
    return total, whole


def _check_all(out: Path, names: list[str], fabric: Fabric) -> None:
    for name in names:
        _append(out, {"architecture": name, "status": "planned"})
    for name in names:
        _append(out, {"architecture": name, "status": "started"})
        try:
            result = check_architecture(name, fabric)
        except Exception as error:
            result = Check(name, "error", reason=f"{type(error).__name__}: {error}"[:500])
        _append(out, asdict(result))


def _append(out: Path, line: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: list[str]) -> None:
    out, names = Path(arguments[0]), arguments[1:]
    known = architectures()
    if unknown := [name for name in names if name not in known]:
        message = f'no architecture "{unknown[0]}" with a plan; there are {", ".join(known)}'
        sys.exit(_refuse(message))
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    _check_all(out, names or known, fabric)
    dist.barrier()
    dist.destroy_process_group()


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main(sys.argv[1:])
