"""Named model configurations: real shapes, random weights, nothing to download.

Plain numbers, so that a sweep can be validated and a table of sizes printed without torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A Llama-family causal LM. Field names are those of transformers' `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, gated MLP, two norms."""
        queries = 2 * self.hidden_size * self.num_attention_heads * self.head_dim
        keys_values = 2 * self.hidden_size * self.num_key_value_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        return queries + keys_values + mlp + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head is counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.layer_parameters + self.hidden_size


PRESETS: dict[str, Preset] = {
    # Byte-level and small enough that a step takes milliseconds on one CPU core: for tests,
    # and for the demo.
    "llama-tiny": Preset(256, 64, 192, 4, 4, 4, 1024, 16),
    "llama-tiny-tied": Preset(256, 64, 192, 4, 4, 2, 1024, 16, tie_word_embeddings=True),
    "llama-8m": Preset(256, 256, 960, 8, 4, 4, 2048, 64),
    # GPT-2-small-sized Llama with the Llama 2 vocabulary.
    "llama-160m": Preset(32_000, 768, 3072, 12, 12, 12, 2048, 64),
    # Shapes published with SmolLM-360M, Llama 3.2 1B and Llama 3.1 8B; rotary scaling left out.
    "smollm-360m": Preset(49_152, 960, 2560, 32, 15, 5, 2048, 64, tie_word_embeddings=True),
    "llama-1b": Preset(
        128_256, 2048, 8192, 16, 32, 8, 131_072, 64, rope_theta=500_000.0, tie_word_embeddings=True
    ),
    "llama-8b": Preset(128_256, 4096, 14_336, 32, 32, 8, 131_072, 128, rope_theta=500_000.0),
}


def sizes_table() -> str:
    """Every preset with its size, as a markdown table."""
    header = (
        "| preset | parameters | layers | hidden | heads | kv heads | MLP | vocabulary | tied |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---|\n"
    )
    return header + "".join(
        f"| `{name}` | {p.num_parameters / 1e6:,.1f} M | {p.num_hidden_layers} | {p.hidden_size} "
        f"| {p.num_attention_heads} | {p.num_key_value_heads} | {p.intermediate_size} "
        f"| {p.vocab_size:,} | {'yes' if p.tie_word_embeddings else 'no'} |\n"
        for name, p in PRESETS.items()
    )
