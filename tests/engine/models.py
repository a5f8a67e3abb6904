"""Models that the tests make on the spot: tiny configurations in folders, and factories."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.model.tiny import tiny_config

WIDTH = 32


def configuration(architecture: str, **changes: object) -> PreTrainedConfig:
    """A tiny configuration of an architecture."""
    config = tiny_config(CONFIG_MAPPING[architecture]())
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def configuration_folder(folder, architecture, *, tied=None, **changes):
    """A folder with a tiny configuration of an architecture and no weights; returns its path."""
    changes |= {} if tied is None else {"tie_word_embeddings": tied}
    path = folder / architecture
    configuration(architecture, **changes).save_pretrained(path)
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


def small_llama(vocab_size: int = 64) -> LlamaForCausalLM:
    """A small Llama whose factory changes its weights, which must be kept."""
    config = LlamaConfig(
        vocab_size=vocab_size,
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


def reversing_llama() -> LlamaForCausalLM:
    """A small Llama that reads its token ids backwards, by a hook on the whole model."""
    model = small_llama(256)

    def backwards(_module: nn.Module, args: tuple[object, ...], given: dict[str, Tensor]) -> object:
        return args, {name: x.flip(1) if name == "input_ids" else x for name, x in given.items()}

    model.register_forward_pre_hook(backwards, with_kwargs=True)
    return model


def patched_llama() -> LlamaForCausalLM:
    """A small Llama that reads its token ids backwards, by a forward set on the object."""
    model = small_llama(256)
    usual = model.forward

    def forward(input_ids: Tensor, **given: object) -> object:
        return usual(input_ids=input_ids.flip(1), **given)

    vars(model)["forward"] = forward
    return model


def found(architecture: str, **changes: object) -> PreTrainedModel:
    """A tiny model of an architecture that declares no plan."""
    return AutoModelForCausalLM.from_config(configuration(architecture, **changes))


gpt2, bloom, gptj = (functools.partial(found, name) for name in ("gpt2", "bloom", "gptj"))
opt = functools.partial(found, "opt", enable_bias=False)  # a bias of keys has no gradient


class TwoLists(GPT2LMHeadModel):
    """A GPT-2 with a second list of layers, in its head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.tail = nn.ModuleList([nn.Linear(config.n_embd, config.n_embd) for _ in range(2)])

    def forward(self, **given: Any) -> Any:
        x = self.transformer(**given).last_hidden_state
        for layer in self.tail:
            x = layer(x).tanh()
        return CausalLMOutput(logits=self.lm_head(x))


class InTheMiddle(GPT2LMHeadModel):
    """A GPT-2 one of whose modules is called before the layers, and after them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.between = nn.LayerNorm(config.n_embd)

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        x = self.between(self.transformer.wte(input_ids))
        x = self.transformer(inputs_embeds=x, **given).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(self.between(x)))


class Loose(GPT2LMHeadModel):
    """A GPT-2 with a parameter that no module has."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer.scale = nn.Parameter(torch.ones(1))


def two_lists() -> TwoLists:
    return TwoLists(configuration("gpt2"))


def shortened() -> TwoLists:
    model = two_lists()
    del model.transformer.ln_f
    return model


def in_the_middle() -> InTheMiddle:
    return InTheMiddle(configuration("gpt2"))


def loose() -> Loose:
    return Loose(configuration("gpt2"))


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
