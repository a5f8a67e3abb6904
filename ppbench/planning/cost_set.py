"""The costs that a plan is made with: of a model's layers, by setting, and of a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.plan.collectives import CollectivePolicy, NoCollectives
from engine.plan.model_costs import LinkCosts, ModelCosts
from ppbench.errors import UsageError

MEASURED = "measured"


class Setting(NamedTuple):
    """How layers are run: sequences of a microbatch, and whether layers are recomputed."""

    microbatch_size: int
    recompute: bool

    def __str__(self) -> str:
        words = f"microbatches of {self.microbatch_size}"
        return f"{words}, recomputed" if self.recompute else words


@dataclass(frozen=True)
class CostSet:
    """The costs of a model in some settings, of a link, and where they come from.

    `optimizer` and `device` are names, such as `adamw` and `cpu`; `device_name` is that of the
    hardware, where it is known. `origin` is `measured` or `file <name>`. `is_busy` says that other
    processes kept the machine busy while they were measured. With replicas they are those of one.
    """

    model: str
    dtype: str
    seq_len: int
    optimizer: str
    device: str
    origin: str
    by_setting: Mapping[Setting, ModelCosts]
    link: LinkCosts
    device_name: str = ""
    is_busy: bool = False
    replicas: int = 1
    policy: CollectivePolicy = field(default_factory=NoCollectives)

    def check_is_of(self, model: str, dtype: str, seq_len: int, optimizer: str) -> None:
        """Raise UsageError for costs of another model, or of another way to train it."""
        wanted = {"model": model, "dtype": dtype, "seq_len": seq_len, "optimizer": optimizer}
        for key, value in wanted.items():
            if (own := getattr(self, key)) != value:
                raise UsageError(
                    f"costs ({self.origin}): {key} is {own}, but the plan is for {value}; give "
                    "costs of the same, or leave them out to measure them here"
                )
