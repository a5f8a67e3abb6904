"""What the tests run on each rank, and the oracle: transformers' own unsplit model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedModel

from engine.model.data import Data, DataSpec
from engine.model.split import ModelSpec, model_config
from engine.run.p2p import Fabric
from engine.trainer import Trainer, TrainerConfig, connect

NUM_STEPS = 3
SEQ_LEN = 16


@dataclass
class Outcome:
    """What a rank, or the oracle, ends up with."""

    loss: float | None
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    trained: dict[str, Tensor]
    peak_held: int = 0


def config(
    schedule: str,
    world_size: int,
    num_microbatches: int,
    *,
    preset: str = "llama-tiny",
    partition: str | tuple[int, ...] = "uniform",
    microbatch_size: int = 1,
    optimizer: str = "adamw",
    seq_len: int = SEQ_LEN,
) -> TrainerConfig:
    return TrainerConfig(
        model=ModelSpec(preset, "float64", partition),
        data=DataSpec(
            seq_len=seq_len, num_microbatches=num_microbatches, microbatch_size=microbatch_size
        ),
        schedule=schedule,
        world_size=world_size,
        optimizer=optimizer,
        learning_rate=1e-3,
    )


def train(fabric: Fabric, is_member: bool, settings: TrainerConfig) -> Outcome | None:
    """Gradients of step 0, then three steps of training."""
    connect(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    initial = {name: p.detach().clone() for name, p in trainer.parameters().items()}
    loss = trainer.compute_gradients(0)
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in trainer.parameters().items()
    }
    for step in range(NUM_STEPS):
        trainer.step(step)
    trained = {name: p.detach().clone() for name, p in trainer.parameters().items()}
    trainer.close()
    return Outcome(loss, initial, gradients, trained, trainer.peak_held)


def train_unsplit(settings: TrainerConfig, initial: dict[str, Tensor]) -> Outcome:
    """The same with transformers' model and torch's optimizer, nothing of ours but the batches."""
    model = LlamaForCausalLM(model_config(settings.model)).to(torch.float64)
    missing, unexpected = model.load_state_dict(initial, strict=False)
    assert not unexpected
    assert not set(missing) - {"lm_head.weight"}
    data = Data(settings.data, model.config.vocab_size)
    loss = _accumulate(model, data, 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = optimizers[settings.optimizer](model.parameters(), lr=settings.learning_rate)
    for step in range(NUM_STEPS):
        _accumulate(model, data, step)
        optimizer.step()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Outcome(loss, initial, gradients, trained)


def _accumulate(model: PreTrainedModel, data: Data, step: int) -> float:
    model.zero_grad()
    batch = data.step(step)
    total = 0.0
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        logits = model(input_ids=inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batch.inputs)
        loss.backward()
        total += loss.item()
    return total


def merged(parts: list[dict[str, Tensor]], *, tied: bool) -> dict[str, Tensor]:
    """One dictionary for all ranks. A tied head must equal the embeddings it is tied to."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in whole, f"{name} is on two ranks"
            whole[name] = value
    if tied and "lm_head.weight" in whole:
        head = whole.pop("lm_head.weight")
        assert torch.equal(head, whole["model.embed_tokens.weight"])
    return whole


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
