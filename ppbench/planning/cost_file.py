"""Costs in a file, so that one can plan for a cluster that one does not have.

`docs/howto/plan.md` shows one. Its tables are:

    [link]              between two ranks: latency_ms, gb_per_s (1e9 bytes per second), error
    [[setting]]         one for each microbatch_size, recompute or not; action_ms is what the
                        runtime adds to each action
    [setting.before]    what stands before the layers: embeddings
    [[setting.layers]]  one entry for a layer, or for `repeat` equal ones in a row
    [setting.after]     what follows the layers: final norm, head and loss

and the costs of a part are:

    forward_ms, backward_ms   or the halves, input_ms and weight_ms, or all three
    held_after_forward_mib    by one microbatch, from its forward on
    held_after_input_mib      what a split backward's first half leaves of it
    transient_mib             more while an action runs: messages, and what it recomputes
    first_transient_mib       the same of the first backward, which makes the gradients
    weight_transient_mib      the same of a split backward's second half
    gradient_mib              gradients, which the first backward makes
    static_mib                parameters, optimizer state, buffers
    message_mib, optimizer_ms, error (relative standard error)

Needed of a layer are its times, `held_after_forward`, `static` and `message`; of the other two
their times and `static`. Without halves, each is half of the backward; without a backward, it is
both; without `held_after_input`, a first half leaves all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.config.toml import Place, Source, as_toml, describe, parse, quoted, read_text
from ppbench.errors import UsageError
from ppbench.files import whole_file
from ppbench.planning.cost_set import CostSet, Setting

NS_PER_MS = 1_000_000
MIB = 2**20
BYTES_PER_GB = 1e9
MOST_LAYERS = 10_000
_TIMES = ("forward", "backward", "input", "weight", "optimizer")
_SIZES = (
    *("held_after_forward", "held_after_input"),
    *("transient", "first_transient", "weight_transient", "gradient", "static", "message"),
)
_NAMES = {name: name if name.startswith("held") else f"{name}_bytes" for name in _SIZES}
"""Fields of `LayerCosts`, by the names of their sizes."""
_TEXTS = ("model", "dtype", "optimizer", "device")
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=2**62)]
_Name = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Link(_Table):
    latency_ms: _Amount = 0.0
    gb_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = math.inf
    error: _Amount = 0.0


class _Part(_Table):
    forward_ms: _Amount
    backward_ms: _Amount | None = None
    input_ms: _Amount | None = None
    weight_ms: _Amount | None = None
    optimizer_ms: _Amount = 0.0
    held_after_forward_mib: _Amount = 0.0
    held_after_input_mib: _Amount | None = None
    transient_mib: _Amount = 0.0
    first_transient_mib: _Amount = 0.0
    weight_transient_mib: _Amount = 0.0
    gradient_mib: _Amount = 0.0
    static_mib: _Amount
    message_mib: _Amount = 0.0
    error: _Amount = 0.0


class _Layers(_Part):
    repeat: _Count = 1
    held_after_forward_mib: _Amount
    message_mib: _Amount


class _Setting(_Table):
    microbatch_size: _Count
    recompute: bool = False
    action_ms: _Amount = 0.0
    before: _Part
    layers: list[_Layers]
    after: _Part


class _File(_Table):
    model: _Name
    dtype: _Name
    optimizer: _Name
    device: _Name
    seq_len: _Count
    device_name: str = ""
    link: _Link = _Link()
    setting: list[_Setting]


def read_costs_file(file: Path) -> CostSet:
    """Read costs from a TOML file.

    Raises UsageError for a file that cannot be read, SweepFileError with file, line and key.
    """
    try:
        text = read_text(file)
        tree = parse(file, text)
    except UsageError as error:
        raise UsageError(str(error).replace("sweep file", "costs file")) from None
    source = Source(str(file), text, frozenset())
    try:
        given = _File.model_validate(tree)
    except ValidationError as error:
        # A key that is misspelt explains one that is missing.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise source.error(first["loc"], describe(first, _File)) from None
    by_setting: dict[Setting, ModelCosts] = {}
    for index, table in enumerate(given.setting):
        at = ("setting", index)
        layers: list[LayerCosts] = []
        for number, entry in enumerate(table.layers):
            place = (*at, "layers", number)
            if len(layers) + entry.repeat > MOST_LAYERS:
                problem = f"more than {MOST_LAYERS:,} layers; expected fewer"
                raise source.error((*place, "repeat"), problem)
            layer = _costs_of(entry, source, place)
            if not layer.forward_ns + layer.backward_ns + layer.input_ns + layer.weight_ns:
                raise source.error((*place, "forward_ms"), "the layer takes no time at all")
            layers += [layer] * entry.repeat
        before = _costs_of(table.before, source, (*at, "before"))
        after = _costs_of(table.after, source, (*at, "after"))
        setting = Setting(table.microbatch_size, table.recompute)
        if setting in by_setting:
            raise source.error(at, f"a second entry for {setting}; leave out one")
        num_layers = len(next(iter(by_setting.values())).layers) if by_setting else len(layers)
        if not layers or len(layers) != num_layers:
            raise source.error(
                (*at, "layers"),
                f"{len(layers)} layers, but the first setting has {num_layers or 'none'}; expected "
                "the same model in every setting",
            )
        action_ns = table.action_ms * NS_PER_MS
        by_setting[setting] = ModelCosts(before, tuple(layers), after, action_ns)
    link = given.link
    return CostSet(
        **{key: getattr(given, key) for key in (*_TEXTS, "seq_len", "device_name")},
        origin=f"file {file.name}",
        by_setting=by_setting,
        link=LinkCosts(link.latency_ms * NS_PER_MS, link.gb_per_s * BYTES_PER_GB, link.error),
    )


def _costs_of(part: _Part, source: Source, place: Place) -> LayerCosts:
    """The costs of a part; what it leaves out of a backward follows from the rest."""
    backward_ms, input_ms, weight_ms = part.backward_ms, part.input_ms, part.weight_ms
    if input_ms is None and weight_ms is None and backward_ms is not None:
        input_ms = weight_ms = backward_ms / 2
    if input_ms is None or weight_ms is None:
        both = input_ms is None and weight_ms is None
        key = "backward_ms" if both else "input_ms" if input_ms is None else "weight_ms"
        raise source.error((*place, key), "is missing")
    held = part.held_after_forward_mib
    sizes = {name: getattr(part, f"{name}_mib") for name in _SIZES}
    if part.held_after_input_mib is None:
        sizes["held_after_input"] = held
    return LayerCosts(
        forward_ns=part.forward_ms * NS_PER_MS,
        backward_ns=(input_ms + weight_ms if backward_ms is None else backward_ms) * NS_PER_MS,
        input_ns=input_ms * NS_PER_MS,
        weight_ns=weight_ms * NS_PER_MS,
        error=part.error,
        **{_NAMES[name]: round(mib * MIB) for name, mib in sizes.items()},
        optimizer_ns=part.optimizer_ms * NS_PER_MS,
    )


def write_costs_file(costs: CostSet, file: Path, option: str = "") -> None:
    """Write costs as a file that `read_costs_file` reads; `option` is named where it cannot be.

    Raises StoreError.
    """
    lines = [*(f"{key} = {quoted(getattr(costs, key))}" for key in _TEXTS)]
    lines.append(f"seq_len = {costs.seq_len}")
    if costs.device_name:
        lines.append(f"device_name = {quoted(costs.device_name)}")
    lines += ["", f"# {costs.origin}", "[link]", f"latency_ms = {_ms(costs.link.latency_ns)}"]
    if math.isfinite(costs.link.bytes_per_s):
        lines.append(f"gb_per_s = {as_toml(costs.link.bytes_per_s / BYTES_PER_GB)}")
    lines.append(f"error = {as_toml(costs.link.error)}")
    for setting, of_model in costs.by_setting.items():
        lines += ["", "[[setting]]", f"microbatch_size = {setting.microbatch_size}"]
        lines.append(f"recompute = {as_toml(setting.recompute)}")
        lines.append(f"action_ms = {_ms(of_model.action_ns)}")
        lines += ["", "[setting.before]", *_lines_of_part(of_model.before)]
        for layer, equal in itertools.groupby(of_model.layers):
            lines += ["", "[[setting.layers]]", f"repeat = {len(list(equal))}"]
            lines += _lines_of_part(layer)
        lines += ["", "[setting.after]", *_lines_of_part(of_model.after)]
    with whole_file(file, option) as opened:
        opened.write("\n".join([*lines, ""]).encode())


def _lines_of_part(part: LayerCosts) -> Iterator[str]:
    for name in _TIMES:
        yield f"{name}_ms = {_ms(getattr(part, f'{name}_ns'))}"
    for name in _SIZES:
        yield f"{name}_mib = {as_toml(getattr(part, _NAMES[name]) / MIB)}"
    yield f"error = {as_toml(part.error)}"


def _ms(ns: float) -> str:
    return as_toml(float(ns / NS_PER_MS))
