"""Plain descriptions of models, for processes that do not import torch.

`engine.describe` reads and writes them as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.model.spec import ModelSpec


@dataclass(frozen=True)
class Identity:
    """A model that somebody asks about, and with which tokenizer."""

    spec: ModelSpec
    tokenizer: str

    @classmethod
    def of(cls, values: dict[str, Any]) -> Identity:
        """The identity of its values, as JSON has them."""
        spec: dict[str, Any]
        spec = {n: tuple(v) if isinstance(v, list) else v for n, v in values["spec"].items()}
        return cls(ModelSpec(**spec), values["tokenizer"])


@dataclass(frozen=True)
class Problem:
    """Why something cannot run: the setting that is at fault, and what is wrong with it."""

    key: str
    message: str


@dataclass(frozen=True)
class Facts:
    """Facts of a model; None where it sets no limit or is not known."""

    num_layers: int | None = None
    max_positions: int | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    tokenizer_size: int | None = None  # the highest id, plus one; None: text is read as bytes
    problem: Problem | None = None
    part_sizes: tuple[int, ...] = ()  # parameters before the layers, of each, after them
    targets_per_sample: int | None = None  # of a factory's own batches; None: trained on text


@dataclass(frozen=True)
class Attention:
    """One layer's attention."""

    width: float  # heads × head dim; the mean of keys' and values' where they differ
    window: int | None = None  # tokens that are looked back at; None: all


@dataclass(frozen=True)
class FlopFacts:
    """Facts for a formula of a model's FLOPs per token (`ppbench.analysis.mfu`)."""

    num_multiplying: int | None  # parameters, without tables that are only looked up; None: varies
    attentions: tuple[Attention, ...] | None = None  # of each layer that has one; None: not known
    note: str = ""  # why something is None, or what else a formula's reader must know


@dataclass(frozen=True)
class CostRequest:
    """A model whose layers are to be measured, and how they are run.

    Each of the settings is a size of microbatch and whether layers are recomputed. `optimizer` are
    fields of `engine.run.optimizer.OptimizerSpec`; `device` is `cpu` or `cuda`; `budget_s` are the
    seconds of samples for each setting. With `has_link` a link between two ranks is measured too.
    """

    identity: Identity
    seq_len: int
    settings: tuple[tuple[int, bool], ...]
    device: str = "cpu"
    autocast: str = "none"
    optimizer: dict[str, str | float] = field(default_factory=dict)
    num_threads: int = 1
    budget_s: float = 2.0
    has_link: bool = True
