"""The stages of this rank only: a causal LM built on the meta device, cut, then materialised.

The cut keeps the model's own forward. What a stage does not own is replaced by an identity, the
layer list keeps its length, and the base model is called with `inputs_embeds`; so masks, rotary
positions and per-layer attributes are computed by the model's own code on every stage, and the
parameters keep the names that they have in the unsplit model.

    token ids -> [embeddings, layers a..b] -> hidden -> [layers c..d] -> hidden
              -> [layers e..f, norm, head] -> logits
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.model.partition import partition_layers
from engine.model.presets import PRESETS

CAUSAL = "engine_causal"
"""transformers' SDPA attention under a name for which it builds no mask.

Without a mask SDPA is causal by itself. Building one looks at the positions' values, which on CUDA
would make the host wait for the device in each forward.
"""
AttentionInterface.register(CAUSAL, sdpa_attention_forward)

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """What is trained: a preset, its dtype, how its layers are cut, the seed of its weights."""

    preset: str = "llama-8m"
    dtype: str = "float32"
    partition: str | tuple[int, ...] = "uniform"
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class _Absent(nn.Module):
    """Stands where another stage's module would: passes its first argument through.

    Takes over the attributes that the model reads from a layer (such as `attention_type`).
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, int | float | str | bool) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return hidden_states


class StageModule(nn.Module):
    """One stage of a causal LM.

    The first stage takes token ids `[batch, seq]`, the others hidden states
    `[batch, seq, hidden]`; the last returns logits `[batch, seq, vocab]`, the others hidden states.
    """

    def __init__(
        self, model: PreTrainedModel, layers: range, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.is_first, self.is_last = is_first, is_last
        self.is_empty = not (layers or is_first or is_last)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_empty:
            return x
        base = self.model.base_model
        output = base(**{"input_ids" if self.is_first else "inputs_embeds": x}, use_cache=False)
        hidden: Tensor = output[0]
        return self.model.get_output_embeddings()(hidden) if self.is_last else hidden

    @property
    def hidden_size(self) -> int:
        size: int = self.model.config.hidden_size
        return size

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.vocab_size
        return size

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the name they have in the unsplit model; a tied head under its own name."""
        return dict(self.model.named_parameters()) if not self.is_empty else {}

    def tied_parameter(self) -> nn.Parameter | None:
        """The weight that the first and the last stage share, if the model ties them."""
        if not self.model.config.tie_word_embeddings or self.is_first == self.is_last:
            return None
        owner = (
            self.model.get_input_embeddings if self.is_first else self.model.get_output_embeddings
        )
        weight = owner().weight
        assert isinstance(weight, nn.Parameter)
        return weight


def model_config(spec: ModelSpec) -> LlamaConfig:
    preset = PRESETS[spec.preset]
    return LlamaConfig(
        vocab_size=preset.vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=preset.num_attention_heads,
        num_key_value_heads=preset.num_key_value_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.max_position_embeddings,
        rms_norm_eps=preset.rms_norm_eps,
        tie_word_embeddings=preset.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": preset.rope_theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def build_stage(spec: ModelSpec, stage: int, num_stages: int, device: torch.device) -> StageModule:
    """Stage `stage` of `num_stages`, its parameters on `device` and nothing else's anywhere.

    Weights depend on the parameter's name and `spec.seed` alone. Raises PartitionError when the
    partition does not fit.
    """
    config = model_config(spec)
    layers = partition_layers(spec.partition, config.num_hidden_layers, num_stages)[stage]
    is_first, is_last = stage == 0, stage == num_stages - 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=spec.torch_dtype, attn_implementation=CAUSAL
        )
    _drop_layers(model, layers)
    if not is_last:
        model.base_model.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
    needs_embedding = is_first or (is_last and config.tie_word_embeddings)
    if not needs_embedding:
        model.set_input_embeddings(nn.Identity())
    _materialise(model, spec.seed, device)
    if is_last and config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        if not is_first:
            model.set_input_embeddings(nn.Identity())
    model.train()
    return StageModule(model, layers, is_first, is_last)


def _drop_layers(model: PreTrainedModel, owned: range) -> None:
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for index, layer in enumerate(layers):
        if index not in owned:
            layers[index] = _Absent(layer)


def _materialise(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Allocate and initialise what is left of the model, one module at a time.

    The model's own `_init_weights` sets each module's parameters and buffers, on the CPU (so that
    all devices get the same numbers), under a random state derived from the module's name.
    """
    for name, module in _modules_with_tensors(model):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for tensor in _own_floats(module).values():
                tensor.fill_(torch.nan)
            torch.manual_seed(_seed_of(name, seed))
            model._init_weights(module)
        _check_initialised(name, module)
        module.to(device)


def _modules_with_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if tensors:
            yield name, module


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _own_floats(module: nn.Module) -> dict[str, Tensor]:
    tensors = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _check_initialised(name: str, module: nn.Module) -> None:
    for tensor_name, tensor in _own_floats(module).items():
        if bool(torch.isnan(tensor).any()):
            raise RuntimeError(f"{name}.{tensor_name}: the model's _init_weights left it unset")
