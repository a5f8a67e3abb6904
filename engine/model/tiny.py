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

_NAMES = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings",
    96: "intermediate_size ffn_hidden_size ffn_dim decoder_ffn_dim dim_ff dff",
    64: "hidden_size",
    32: """
        expert_ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size
    """,
    16: """
        head_dim swa_head_dim global_head_dim mamba_d_state q_lora_rank o_lora_rank
        kv_lora_rank v_head_dim index_topk index_head_dim linear_key_head_dim
        linear_value_head_dim
    """,
    8: """
        hidden_size_per_layer_input num_heads rotary_dim sliding_window sliding_window_size
        attention_chunk_size mamba_chunk_size chunk_size qk_nope_head_dim qk_rope_head_dim
    """,
    4: """
        num_attention_heads encoder_attention_heads decoder_attention_heads
        swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
        index_n_heads linear_num_value_heads
    """,
    2: """
        num_key_value_heads swa_num_key_value_heads zero_expert_num num_experts_per_tok
        moe_topk moe_k linear_num_key_heads
    """,
    1: "n_shared_experts n_group topk_group",
}
"""By width, the names of what is given it."""
_WIDTHS = {name: width for width, names in _NAMES.items() for name in names.split()}
_WIDTHS |= dict.fromkeys(("num_hidden_layers", "num_layers"), NUM_LAYERS)
_NEEDED = (
    *("head_dim", "num_key_value_heads"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
"""Widths that some defaults leave open although the model cannot be built without them."""
_ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the largest position of a forward."""
_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
_CHANGE = 16
"""The position at which these change in a tiny model: some slices end before it, some after."""


def random_settings(config: PreTrainedConfig) -> dict[str, float]:
    """The settings by which training may draw random numbers, where they are not 0."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if value
        and isinstance(value, int | float)
        and any(word in name for word in ("dropout", "jitter", "layerdrop", "pdrop"))
    }


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
    quiet = dict.fromkeys(random_settings(config), 0.0)
    token_ids = {
        name: value % VOCAB_SIZE
        for name, value in attributes.items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    widths: dict[str, int] = {}
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
    ropes: dict[str, object] = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = getattr(config, name, None)
        if isinstance(table, dict) and any(kind in str(table) for kind in _ROPE_BY_LENGTH):
            share = getattr(config, "partial_rotary_factor", None) or 1.0
            ropes[name] = _tiny_rope(table, widths.get("head_dim", _WIDTHS["head_dim"]), share)
            ropes |= {known: _CHANGE for known in _POSITIONS if known in attributes}
    num_layers = attributes.get("num_hidden_layers", attributes.get("num_layers"))
    layer_lists: dict[str, object] = {}  # a value per layer becomes one of each kind in turn
    for name, values in attributes.items():
        if isinstance(values, list) and len(values) == num_layers:
            kinds = [value for index, value in enumerate(values) if value not in values[:index]]
            layer_lists[name] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    parts = ((name, getattr(config, name, None)) for name in config.sub_configs)
    nested = {name: tiny_config(part) for name, part in parts if isinstance(part, PreTrainedConfig)}
    changes = {**widths, **ropes, **layer_lists, **quiet, **token_ids, **nested}
    kind: Any = type(config)
    small: PreTrainedConfig = kind(**{**own, **changes})
    return small


def _tiny_rope(table: dict[str, Any], width: int, share: float) -> dict[str, object]:
    """A table of rotary positions, perhaps by kind of layer, for a `share` of heads of `width`."""
    share, small = table.get("partial_rotary_factor", share), dict[str, object]()
    for name, value in table.items():
        small[name] = _CHANGE if name in _POSITIONS else value
        if isinstance(value, dict):
            small[name] = _tiny_rope(value, width, share)
        elif isinstance(value, list) and name.endswith("_factor"):
            half = int(width * share) // 2
            small[name] = [value[index % len(value)] for index in range(half)]
    return small
