"""Models that are easily trained wrong: each does something that a cut could lose in silence.

Factories without arguments, as a user would write them. `test_exact` has those that are exact
wherever they are cut, `test_refused` the others.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from models import Of
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 8
VOCABULARY = 256


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *middle, nn.Linear(WIDTH, VOCABULARY))


def mixer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def chained(children: Callable[[], list[nn.Module]]) -> Callable[[], nn.Sequential]:
    """The factory of a chain of the children that are made anew for each."""
    return lambda: chain(*children())


class Apply(nn.Module):
    """A function of what a child is given, without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def twice() -> nn.Sequential:
    shared = mixer()
    return chain(shared, nn.Tanh(), mixer(), shared)


def thrice() -> nn.Sequential:
    shared = nn.Sequential(mixer(), nn.Tanh())
    return chain(shared, mixer(), shared, nn.GELU(), shared)


def twice_with_statistics() -> nn.Sequential:
    norm = Normed()
    return chain(norm, mixer(), norm)


class Normed(nn.Module):
    """BatchNorm over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Backwards(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def subclassed() -> nn.Sequential:
    return Backwards(*chain(mixer()))


class Named(nn.Sequential):
    """Adds nothing to how it is run."""


def subclassed_in_name() -> nn.Sequential:
    return Named(*chain(mixer(), nn.Tanh()))


def hooked_container() -> nn.Sequential:
    model = chain(mixer(), mixer())
    model.register_forward_hook(lambda _m, _x, y: y * 1.5)
    return model


def hooked() -> nn.Sequential:
    """Hooks of every kind, on children and weights, each of which changes what is computed."""
    model = chain(mixer(), nn.Tanh(), mixer(), mixer())
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    model[5].weight.register_hook(lambda gradient: gradient * 2)

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    model[1].weight.register_post_accumulate_grad_hook(halve)
    model[1].register_forward_hook(lambda _m, _x, y: y * 1.5)
    model[3].register_forward_pre_hook(lambda _m, x: (x[0] + 0.1,))
    model[3].register_full_backward_hook(lambda _m, of_x, _y: (of_x[0] * 0.5,))
    model[4].register_full_backward_pre_hook(lambda _m, of_y: (of_y[0] * 3,))
    return model


def hooked_shared_weight() -> nn.Sequential:
    model = twice()
    model[1].weight.register_hook(lambda gradient: gradient.clamp(-1e-5, 1e-5))
    return model


def tied_over_three() -> nn.Sequential:
    model = chain(nn.Linear(WIDTH, VOCABULARY), nn.Tanh(), nn.Linear(VOCABULARY, WIDTH, bias=False))
    model[1].weight = model[0].weight
    model[4].weight = model[0].weight
    return model


def a_slice() -> nn.Sequential:
    model = chain(mixer(), mixer())
    model[2].weight = nn.Parameter(model[0].weight[:WIDTH])
    return model


def normed() -> nn.Sequential:
    """Each kind of norm of weights, as a parametrization and as the hook that it was before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(mixer()), nn.utils.spectral_norm(mixer())
    new = parametrizations.weight_norm(mixer()), parametrizations.spectral_norm(mixer())
    return chain(*new, nn.Tanh(), *old, mixer())


def adder() -> Of:
    """Writes to its input without saying so."""
    shift = nn.Parameter(torch.full((WIDTH,), 0.3))
    return Of(lambda own, x: x.add_(own.shift).mul_(1.5), shift=shift)


def in_place() -> nn.Sequential:
    """One of the writers has a view of a stage's input, or of what a layer has made."""
    behind_a_view = nn.Identity(), nn.Flatten(2), adder()
    return chain(adder(), mixer(), nn.ReLU(inplace=True), mixer(), *behind_a_view, mixer())


def in_place_on_ids() -> nn.Sequential:
    reverse = Apply(lambda ids: ids.neg_().add_(VOCABULARY - 1))
    return nn.Sequential(reverse, *chain(mixer(), mixer()))


dropped = chained(lambda: [nn.Dropout(0.2), mixer(), nn.Dropout(0.3), mixer(), nn.Dropout(0.1)])


class Averaging(nn.Module):
    """Keeps an average of what it has seen, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.average.clone()
        with torch.no_grad():
            self.average.lerp_(x.mean((0, 1)), 0.1)
            self.count += 1
            self.last = x.mean((0, 1))
        return y


statistics = chained(lambda: [Normed(), Averaging(), mixer(), Normed(), nn.Tanh(), Averaging()])


def fork(x: Tensor) -> dict[str, object]:
    return {"skip": x, "pair": (x * 2, None, [x.mean(-1, keepdim=True)]), "place": x.argmax(-1)}


def mix_pair(own: Of, values: dict[str, Any]) -> dict[str, Any]:
    double, nothing, (mean,) = values["pair"]
    assert nothing is None
    return {**values, "pair": (own.mixer(double) + mean, nothing, [mean])}


def join(values: dict[str, Any]) -> Tensor:
    double, _, (mean,) = values["pair"]
    return values["skip"] + double * mean + values["place"][..., None] / WIDTH


def structured() -> nn.Sequential:
    inside = (Of(mix_pair, mixer=mixer()) for _ in range(2))
    return chain(mixer(), Apply(fork), *inside, Apply(join), mixer())


def unpack(x: tuple[Tensor]) -> Tensor:
    assert isinstance(x, tuple)
    return x[0] * 2


tuple_of_one = chained(lambda: [mixer(), Apply(lambda x: (x,)), Apply(unpack)])


def both() -> Apply:
    return Apply(lambda x: (x, x))


def write_one(x: tuple[Tensor, ...]) -> Tensor:
    x[0].mul_(3)
    return sum(x[1:], x[0])


one_tensor_as_two = chained(lambda: [mixer(), mixer(), both(), Apply(write_one)])


one_object_as_two = chained(lambda: [mixer(), both(), Apply(write_one), mixer(), mixer(), mixer()])
"""Cut where it is one value."""


def writes_under_a_view() -> nn.Sequential:
    with_view = Apply(lambda x: (x, x.flip(-1).view_as(x), x.view_as(x)))
    return chain(mixer(), with_view, Apply(write_one), mixer())


def several_outputs() -> nn.Sequential:
    return nn.Sequential(*chain(mixer()), both())


sends_a_number = chained(lambda: [Apply(lambda x: (x, x.shape[1])), Apply(lambda x: x[0] / x[1])])


sends_complex = chained(
    lambda: [Apply(torch.fft.rfft), Apply(lambda x: torch.fft.irfft(x, n=WIDTH))]
)


class Rotary(nn.Module):
    """A complex table, and whole numbers, as buffers."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(64)[:, None] / torch.arange(1, WIDTH // 2 + 1)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("order", torch.arange(WIDTH).flip(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * self.table[: x.shape[1]]).flatten(-2)
        return turned[..., self.order]


stopped = chained(lambda: [mixer(), mixer(), Apply(Tensor.detach), mixer(), mixer()])
"""No layer before the one that detaches is trained."""


def stopped_before_a_frozen_end() -> nn.Sequential:
    model = chain(mixer(), Apply(Tensor.detach))
    model[3].requires_grad_(False)
    return model


def frozen_front() -> nn.Sequential:
    """No value that leaves the first four children wants a gradient."""
    model = chain(mixer(), nn.Tanh(), mixer(), mixer(), mixer())
    model[:4].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def run_pair(own: Of, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two branches, of which the first is trained by its own weight only."""
    first, second = x if isinstance(x, tuple) else (x, x)
    return own.first(first), own.second(second)


def pair() -> Of:
    return Of(run_pair, first=mixer(), second=mixer())


def one_branch_stopped() -> nn.Sequential:
    stop_one = Apply(lambda x: (x[0].detach(), x[1]))
    return chain(pair(), pair(), stop_one, pair(), Apply(lambda x: x[0] + x[1]))


def one_number_unused() -> nn.Sequential:
    """The number requires a gradient."""
    with_score = Of(
        lambda own, x: (own.mixer(x), (x.mean() * own.score).reshape(1)),
        score=nn.Parameter(torch.tensor(0.5)),
        mixer=mixer(),
    )
    pass_on = [Apply(lambda x: (x[0].tanh(), x[1])) for _ in range(2)]
    return chain(with_score, *pass_on, first(), mixer())


def quantised() -> nn.Sequential:
    """Whole numbers are passed on."""
    quantise = Apply(lambda x: x.argmax(-1))
    return chain(mixer(), quantise, nn.Identity(), nn.Embedding(WIDTH, WIDTH), mixer())


class Turn(nn.Module):
    """Its weight is complex."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.linspace(0, 2, WIDTH // 2)
        self.turns = nn.Parameter(torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns).flatten(-2)


def complex_weights_and_buffers() -> nn.Sequential:
    turn = Turn()
    return chain(turn, Rotary(), mixer(), nn.Tanh(), turn, Rotary())


def with_spare() -> Of:
    return Of(
        lambda own, x: x * own.scale + own.nothing.sum(),
        scale=nn.Parameter(torch.tensor(1.5)),
        spare=nn.Parameter(torch.ones(WIDTH)),
        nothing=nn.Parameter(torch.empty(0, WIDTH)),
    )


def chosen() -> Of:
    """Uses one of its layers for a microbatch, by its length, and a third one for none."""
    layers = nn.ModuleList(mixer() for _ in range(3))
    return Of(lambda own, x: own.layers[x.shape[1] % 2](x), layers=layers)


used_by_some = chained(lambda: [with_spare(), chosen(), mixer(), nn.Tanh(), chosen(), with_spare()])


def compute_half(own: Of, x: Tensor) -> Tensor:
    """Computes in bfloat16, whatever the neighbours do."""
    weight, bias = own.mixer.weight.bfloat16(), own.mixer.bias.bfloat16()
    return linear(x.bfloat16(), weight, bias).to(x.dtype)


def sends_half() -> nn.Sequential:
    half = Of(compute_half, mixer=mixer())
    return chain(half, Apply(Tensor.bfloat16), Apply(Tensor.double), mixer())


@functools.lru_cache
def slopes(width: int) -> Tensor:
    return torch.arange(width) / width


class Sloped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * slopes(x.shape[-1])


cached_aside = chained(lambda: [Sloped(), mixer()])


def renormed() -> nn.Sequential:
    model = chain(mixer(), nn.Tanh())
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), *model[1:])


def renormed_and_tied() -> nn.Sequential:
    model = renormed()
    model[3].weight = model[0].weight
    return model


lazy = chained(lambda: [nn.LazyLinear(WIDTH), mixer()])


def nothing_to_train() -> nn.Sequential:
    return chain(mixer()).requires_grad_(False)


def with_none() -> nn.Sequential:
    model = chain(mixer())
    model.add_module("3", None)
    return model


def with_own_parameter() -> nn.Sequential:
    model = chain(mixer())
    model.scale = nn.Parameter(torch.ones(1))
    return model


def wrong_output() -> nn.Sequential:
    return nn.Sequential(*chain(mixer()), nn.Flatten(0, 1))


_CALLS = [0]


def another_each_time() -> nn.Sequential:
    _CALLS[0] += 1
    inner = WIDTH + _CALLS[0]
    return chain(nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH))


def drawn() -> nn.Sequential:
    """Draws by every generator there is, one of them its own, and reads what it has drawn."""
    model = chain(mixer(), nn.Tanh(), mixer(), mixer())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
        model[1].weight.mul_(random.random())
        model[3].bias.copy_(torch.from_numpy(np.random.rand(WIDTH)))  # noqa: NPY002
        model[4].weight.copy_(torch.nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)))
        model[4].bias.copy_(model[1].weight[0] * 0.5)
        model[5].weight.mul_(1 / float(model[0].weight.norm()))
    return model


def first() -> Apply:
    return Apply(lambda x: x[0])


recurrent = chained(lambda: [nn.GRU(WIDTH, WIDTH, batch_first=True), first(), mixer()])


def llama(num_layers: int = 4) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def shared_layer() -> LlamaForCausalLM:
    model = llama()
    model.model.layers[3] = model.model.layers[0]
    return model


class EveryOtherStep(nn.Module):
    """Uses its layer for the microbatches of every other step of four."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.num_calls = layer, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.layer(x) if (self.num_calls - 1) // 4 % 2 == 0 else x


def shared_at_times() -> nn.Sequential:
    layer = mixer()
    return chain(EveryOtherStep(layer), mixer(), nn.Tanh(), EveryOtherStep(layer))


def shared_layer_with_cache() -> LlamaForCausalLM:
    """With a cache its second use would see the keys of its first, which no training wants."""
    model = shared_layer()
    model.config.use_cache = True
    return model


def shared_projection() -> LlamaForCausalLM:
    model = llama()
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    layers[3].input_layernorm.weight = model.model.norm.weight
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    return model


def tied_and_used_again() -> LlamaForCausalLM:
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].mlp.spare = nn.Embedding(VOCABULARY, 16)
    model.model.layers[1].mlp.spare.weight = model.model.embed_tokens.weight
    weight = model.model.layers[1].mlp.spare.weight

    model.model.layers[1].mlp.register_forward_hook(lambda m, _x, y: y + m.spare.weight.mean(0))
    assert weight is model.lm_head.weight
    return model


def hooked_llama() -> LlamaForCausalLM:
    model = llama()
    layers = model.model.layers
    layers[0].register_forward_pre_hook(lambda _m, x: (x[0] * 2, *x[1:]))
    layers[3].register_forward_hook(lambda _m, _x, y: y * 0.5)
    layers[2].mlp.register_full_backward_hook(lambda _m, of_x, _y: (of_x[0] * 2,))
    layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model


def hooked_shared_llama() -> LlamaForCausalLM:
    model = shared_layer()
    model.model.layers[0].mlp.up_proj.weight.register_hook(
        lambda gradient: gradient.clamp(-1e-5, 1e-5)
    )
    return model


def frozen_llama() -> LlamaForCausalLM:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def stopped_llama() -> LlamaForCausalLM:
    """A Llama whose first layers let no gradient through."""
    model = llama()
    model.model.layers[2].register_forward_hook(lambda _m, _x, y: y.detach())
    return model


class Backless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


stopped_in_its_backward = chained(lambda: [mixer(), mixer(), Apply(Backless.apply), mixer()])
"""No gradient comes through, which only the backward knows."""
