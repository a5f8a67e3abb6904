"""A small configuration of any transformers architecture: widths shrunk, the graph's shape kept.

Used to try out whether an architecture can be cut (`probe`), in milliseconds and without a
download. Attributes are recognised by the names that transformers' configurations share; nothing
here knows an architecture.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import PreTrainedConfig

NUM_LAYERS = 4
VOCAB_SIZE = 256

_WIDTHS = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dim_ff": 96,
    "dff": 96,
    "expert_ffn_hidden_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 8,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_d_state": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_NEEDED = (
    *("head_dim", "num_key_value_heads"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
"""Widths that some defaults leave open although the model cannot be built without them."""


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A shrunk copy: about 4 layers of width 64, no dropout or router noise.

    Raises whatever the configuration's own validation raises on the shrunk values.
    """
    attributes = config.to_dict()
    defaults = type(config)().to_dict()
    derived = ("transformers_version", "architectures", "model_type", "_name_or_path", "dtype")
    own = {  # what it sets otherwise than its class; tables are left to the class
        name: value
        for name, value in attributes.items()
        if isinstance(value, bool | int | float | str)
        and name not in derived
        and value != defaults.get(name)
    }
    # Whatever is random in training would differ between the split and the unsplit model.
    quiet = {
        name: 0.0
        for name, value in attributes.items()
        if value
        and isinstance(value, int | float)
        and any(word in name for word in ("dropout", "jitter", "pdrop"))
    }
    token_ids = {
        name: value % VOCAB_SIZE
        for name, value in attributes.items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    widths: dict[str, object] = {}
    for name, width in _WIDTHS.items():
        with contextlib.suppress(Exception):  # some vary by layer and refuse: left alone
            value = getattr(config, name, None)
            if isinstance(getattr(type(config), name, None), property):
                continue  # it follows from others
            is_open = value is None and name in _NEEDED and name in attributes
            if is_open or (isinstance(value, int) and value > 1):  # one alone has its own graph
                widths[name] = width
    if "qk_rope_head_dim" in widths:  # latent attention: rotary part's width, a key per head
        latent = {"head_dim": _WIDTHS["qk_rope_head_dim"], "num_key_value_heads": 4}
        widths |= {name: width for name, width in latent.items() if name in widths}
    num_layers = attributes.get("num_hidden_layers", attributes.get("num_layers"))
    layer_lists: dict[str, object] = {}  # a value per layer becomes one of each kind in turn
    for name, values in attributes.items():
        if isinstance(values, list) and len(values) == num_layers:
            kinds = [value for index, value in enumerate(values) if value not in values[:index]]
            layer_lists[name] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    parts = ((name, getattr(config, name, None)) for name in config.sub_configs)
    nested = {name: tiny_config(part) for name, part in parts if isinstance(part, PreTrainedConfig)}
    changes = {**widths, **layer_lists, **quiet, **token_ids, **nested}
    kind: Any = type(config)
    small: PreTrainedConfig = kind(**{**own, **changes})
    return small
