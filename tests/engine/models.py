"""Models that the tests make on the spot: tiny configurations in folders, and factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.model.tiny import tiny_config

WIDTH = 32


def configuration_folder(folder, architecture, *, tied=None, **changes):
    """A folder with a tiny configuration of an architecture and no weights; returns its path."""
    config = tiny_config(CONFIG_MAPPING[architecture]())
    if tied is not None:
        config.tie_word_embeddings = tied
    for name, value in changes.items():
        setattr(config, name, value)
    path = folder / architecture
    config.save_pretrained(path)
    return str(path)


class Of(nn.Module):
    """A function of the module's own parts and its input."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Positions(nn.Module):
    """Sinusoidal positions in a buffer, scaled by a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(128)[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
        self.register_buffer("table", angles.sin())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.table[: x.shape[1]]


class Block(nn.Module):
    """The decoder layer of the tutorials, made causal."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        return self.layer(x, x, tgt_mask=mask, memory_mask=mask)


def sequential() -> nn.Sequential:
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(
        nn.Embedding(256, WIDTH), Positions(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
    )


def tied_sequential() -> nn.Sequential:
    model = sequential()
    model[-1].weight = model[0].weight
    return model


class Tutorial(nn.Module):
    """The module of torch's pipelining tutorial, with a skip connection over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, WIDTH)
        self.positions = Positions()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(4)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tok_embeddings(tokens)
        h = self.positions(embedded)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h + 0.1 * embedded))


class TiedTutorial(Tutorial):
    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.tok_embeddings.weight


def thin_sequential() -> nn.Sequential:
    """A model in six pieces with almost no computation."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(256, 4), *layers, nn.Linear(4, 256))


def no_module() -> str:
    return "not a module"


def broken() -> nn.Module:
    raise RuntimeError("no weights today")


def small_llama() -> LlamaForCausalLM:
    """A small Llama whose factory changes its weights, which must be kept."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.5)
    return model


def big_sequential() -> nn.Sequential:
    """A chain with as many parameters as llama-160m."""
    layers = [nn.Linear(3600, 3600, bias=False) for _ in range(12)]
    return nn.Sequential(nn.Embedding(900, 3600), *layers, nn.Linear(3600, 900, bias=False))


class Repeated(nn.Module):
    """A linear that is applied so many times, which its structure does not tell."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
        return x


def uneven_sequential() -> nn.Sequential:
    """Equal layers, of which one takes thirty times as long."""
    layers = [Repeated(times) for times in (1, 1, 30, 1)]
    return nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))


def linear_sequential() -> nn.Sequential:
    """Layers whose bytes are known: a linear keeps its input, and its split backward both."""
    linears = [nn.Linear(64, 64) for _ in range(3)]
    return nn.Sequential(nn.Embedding(256, 64), *linears, nn.Linear(64, 256))
