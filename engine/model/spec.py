"""The part of a configuration that names the model and says how it is cut.

Plain values, also for processes that do not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model.presets import PRESETS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelSpec:
    """What is trained and how it is cut.

    `name` is a preset, a hub id, a local checkpoint folder or `package.module:factory`.
    `dtype` is `float32`, `float64` or `bfloat16`.
    `partition` is `uniform`, `parameters`, `measured` or the number of layers of each stage.
    `weights` are a checkpoint's own where there is one (`auto`), or `random` from `seed`.
    `split = "trace"` cuts a factory's module before the submodules named in `split_points`.
    A transformers model is cut in its list `layers`, `before_layers` are on the first stage and
    `after_layers` on the last: names of modules, of which those that are not given are found.
    """

    name: str = "llama-8m"
    dtype: str = "float32"
    partition: str | tuple[int, ...] = "uniform"
    seed: int = 0
    weights: str = "auto"
    trust_remote_code: bool = False
    split: str = "auto"
    split_points: tuple[str, ...] = ()
    layers: str = ""
    before_layers: tuple[str, ...] = ()
    after_layers: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def has_plan(self) -> bool:
        """Whether it says where layers are."""
        return bool(self.layers or self.before_layers or self.after_layers)

    @property
    def is_factory(self) -> bool:
        return ":" in self.name

    @property
    def home(self) -> str | None:
        """The folder or hub id where a tokenizer may lie beside the model; None if it has none."""
        return None if self.is_factory or self.name in PRESETS else self.name
