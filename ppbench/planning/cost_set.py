"""The costs that a plan is made with: of a model's layers, by setting, and of a link."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
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
    hardware, where it is known. `origin` is `measured` or `file <name>`.
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

    @property
    def num_layers(self) -> int:
        """Layers of the model; the same in every setting."""
        return len(next(iter(self.by_setting.values())).layers)

    def check_is_of(self, model: str, dtype: str, seq_len: int, optimizer: str) -> None:
        """Raise UsageError for costs of another model, or of another way to train it."""
        wanted = {"model": model, "dtype": dtype, "seq_len": seq_len, "optimizer": optimizer}
        for key, value in wanted.items():
            if (own := getattr(self, key)) != value:
                raise UsageError(
                    f"costs ({self.origin}): {key} is {own}, but the plan is for {value}; give "
                    "costs of the same, or leave them out to measure them here"
                )


def problem_of(costs: CostSet) -> str | None:
    """What is wrong with a set of costs, whoever made it; None: nothing."""
    if not costs.by_setting:
        return "it has costs of no setting"
    counts = {len(of_model.layers) for of_model in costs.by_setting.values()}
    if len(counts) > 1 or 0 in counts:
        found = " and ".join(map(str, sorted(counts)))
        return f"its settings have {found} layers; expected the same number, of at least one"
    for setting, of_model in costs.by_setting.items():
        if setting.microbatch_size < 1:
            return f"microbatch_size is {setting.microbatch_size}; expected at least 1"
        if (problem := _problem_of_model(of_model)) is not None:
            return f"{setting}: {problem}"
    link = costs.link
    if not (_is_amount(link.latency_ns) and _is_amount(link.error)):
        return f"link: latency and error must be finite and not negative, got {link}"
    if math.isnan(link.bytes_per_s) or link.bytes_per_s <= 0:
        return f"link: bytes_per_s must be above 0, got {link.bytes_per_s}"
    return None


def parts_of(costs: ModelCosts) -> dict[str, LayerCosts]:
    """The parts of a model by what they are called, in order."""
    layers = {f"layer {index}": layer for index, layer in enumerate(costs.layers)}
    return {"before": costs.before, **layers, "after": costs.after}


def _problem_of_model(costs: ModelCosts) -> str | None:
    if not _is_amount(costs.action_ns):
        return f"action_ns must be finite and not negative, got {costs.action_ns}"
    for name, part in parts_of(costs).items():
        for field, value in dataclasses.asdict(part).items():
            if not _is_amount(value):
                return f"{name}: {field} must be finite and not negative, got {value}"
        times = part.forward_ns + part.backward_ns + part.input_ns + part.weight_ns
        if times <= 0 and name not in ("before", "after"):
            return f"{name}: takes no time, forward or backward"
    return None


def _is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0
